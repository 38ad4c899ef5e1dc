// One rank of a job: where it runs and ran, the incidents that name it, and the counters of its host's GPUs.

import { get, path } from "../../common/api.js";
import { fill, h } from "../../common/dom.js";
import { clock, kindName, moment, number } from "../../common/format.js";
import { everySecond, gathered, listen } from "../../common/live.js";
import { DevicesCard } from "../../components/devices.js";
import { notFound } from "../../components/error_page.js";
import { card, empty, guarded, incidentPill, severityPill, shell, whenChanged } from "../../components/shell.js";

const POLL_S = 5;
const LISTED = 50;
const GROUPS = ["dp", "tp", "pp", "cp", "ep"];

const place = location.pathname.slice("/ranks/".length);
const name = decodeURIComponent(place.slice(0, place.lastIndexOf("/")));
const rank = Number(place.slice(place.lastIndexOf("/") + 1));
const main = shell("Jobs");
document.title = `rank ${rank} of ${name} · rankwatch`;
const head = h("div", { class: "job-head" });
const [units, troubles, counters] = [h("div"), h("div"), h("div")];
main.append(
  h("div", { class: "crumbs" }, h("a", { class: "break", href: `/jobs/${encodeURIComponent(name)}` }, `‹ ${name}`), h("a", { href: `/topology/${encodeURIComponent(name)}` }, "Topology")),
  head,
  h("div", { class: "column" }, card("Where it runs", units, { hint: "newest attempt first; a restart may give a rank another host" }), card("Incidents that name it", troubles), counters),
);
let missing = false;
let drawing = false;
let devices = null;
const refresh = gathered(load);
listen((topic, job) => (topic === "reset" || (job === name && topic === "incident")) && refresh());
let seconds = 0;
everySecond(() => (seconds += 1) % POLL_S === 0 && draw());
load();

async function load() {
  if (missing) return;
  await guarded(async () => {
    const [attempts, incidents] = await Promise.all([get(path("jobs", name, "attempts"), { limit: LISTED }), Number.isInteger(rank) ? get("incidents", { job: name, rank, limit: LISTED }) : { items: [] }]).catch(unknown);
    if (missing) return;
    const ran = attempts.items.map((one) => ({ ...one, who: (one.topology.ranks ?? []).find((info) => info.rank === rank) })).filter((one) => one.who);
    if (!ran.length) return void unknown({ status: 404 });
    showUnits(ran.map(({ attempt, started_unix_ns, ended_unix_ns, who }) => ({ attempt, started_unix_ns, ended_unix_ns, who })));
    showTroubles(incidents.items);
    devices ??= new DevicesCard(name, "gpu", ran[0].who.host);
    if (!counters.contains(devices.card)) fill(counters, devices.card);
    await draw();
  });
}

function unknown(error) {
  if (error.status !== 404) throw error;
  missing = true;
  notFound(main, `There is no rank ${rank} of ${name}`, "The job has fewer ranks, they have not reported yet, or you may not see it.", "/jobs", "All jobs");
  return [];
}

async function draw() {
  if (!devices || drawing) return;
  drawing = true;
  try {
    await devices.draw();
  } finally {
    drawing = false;
  }
}

const showUnits = whenChanged((ran) => {
  const { who } = ran[0];
  const groups = GROUPS.map((group) => `${group} ${who[group]}`).join(" · ");
  fill(head, h("div", { class: "line" }, h("h1", { class: "break" }, `Rank ${number(rank)} of `, h("a", { href: `/jobs/${encodeURIComponent(name)}` }, name))), h("p", { class: "under break" }, "on ", h("a", { href: `/hosts/${encodeURIComponent(who.host)}` }, who.host), ` · ${who.device_uuid || "no GPU"} · local rank ${who.local_rank} · ${groups}`));
  const row = (one) => h("tr", {}, h("td", { class: "break" }, one.attempt), h("td", { class: "break" }, h("a", { href: `/hosts/${encodeURIComponent(one.who.host)}` }, one.who.host)), h("td", { class: "break" }, one.who.device_uuid || "no GPU"), h("td", { title: moment(one.started_unix_ns) }, clock(one.started_unix_ns), one.ended_unix_ns === null ? " until now" : ` to ${clock(one.ended_unix_ns)}`));
  fill(units, h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, ["Attempt", "Host", "GPU", "Time"].map((text) => h("th", {}, text)))), h("tbody", {}, ran.map(row)))));
});

const showTroubles = whenChanged((items) => {
  if (!items.length) return void empty(troubles, "None.");
  const row = (one) => h("tr", {}, h("td", {}, severityPill(one.severity)), h("td", { class: "break" }, h("a", { href: `/incidents/${encodeURIComponent(one.id)}` }, kindName(one.kind)), h("div", { class: "under" }, one.summary)), h("td", {}, incidentPill(one)), h("td", { title: moment(one.onset_unix_ns) }, clock(one.onset_unix_ns)));
  fill(troubles, h("table", { class: "compact stack" }, h("tbody", {}, items.map(row))));
});
