// One rank of a job: how it does, where it runs and ran, the incidents that name it, its series beside those of all ranks,
// and the counters of its host's GPUs.

import { get, path } from "../../common/api.js";
import { fill, h } from "../../common/dom.js";
import { clock, kindName, moment, number } from "../../common/format.js";
import { everySecond, gathered, listen } from "../../common/live.js";
import { DevicesCard } from "../../components/devices.js";
import { ownLinks } from "../../components/own_links.js";
import { notFound } from "../../components/error_page.js";
import { card, empty, guarded, incidentPill, seesEveryJob, SEVERITIES, severityPill, shell, statePill, whenChanged } from "../../components/shell.js";
import { HOST_ID_DIGITS, plainHost, verdictPill } from "../../components/verdict.js";
import { RankGpuCard, RankSeriesCard } from "../../ranks/series_card.js";

const POLL_S = 5;
const LISTED = 50;
const GROUPS = ["dp", "tp", "pp", "cp", "ep"];

const place = location.pathname.slice("/ranks/".length);
const name = decodeURIComponent(place.slice(0, place.lastIndexOf("/")));
const rank = Number(place.slice(place.lastIndexOf("/") + 1));
const main = shell("Jobs");
document.title = `rank ${rank} of ${name} · rankwatch`;
const head = h("div", { class: "job-head" });
const links = h("div");
const [units, troubles, counters] = [h("div"), h("div"), h("div")];
const [series, gpu] = [new RankSeriesCard(name, rank), new RankGpuCard(name)];
main.append(
  h("div", { class: "crumbs" }, h("a", { class: "break", href: `/jobs/${encodeURIComponent(name)}` }, `‹ ${name}`), h("a", { href: `/topology/${encodeURIComponent(name)}` }, "Topology")),
  head,
  links,
  h("div", { class: "column" }, card("Incidents that name it", troubles), series.card, gpu.card, card("Where it runs", units, { hint: "newest attempt first; a restart may give a rank another host" }), counters),
);
let missing = false;
let drawing = false;
let devices = null;
let drawn = null; // what the charts show
const refresh = gathered(load);
listen((topic, job) => (topic === "reset" || (job === name && topic === "incident")) && refresh());
let seconds = 0;
everySecond(() => (seconds += 1) % POLL_S === 0 && draw());
load();

async function load() {
  if (missing) return;
  await guarded(async () => {
    const all = await seesEveryJob();
    const [job, attempts, incidents] = await Promise.all([get(path("jobs", name)), get(path("jobs", name, "attempts"), { limit: LISTED }), Number.isInteger(rank) ? get("incidents", { job: name, rank, limit: LISTED }) : { items: [] }]).catch(unknown);
    if (missing) return;
    const ran = attempts.items.map((one) => ({ ...one, who: (one.topology.ranks ?? []).find((info) => info.rank === rank) })).filter((one) => one.who);
    if (!ran.length) return void unknown({ status: 404 });
    const { host, agent } = ran[0].who;
    const hosts = all ? await get("hosts", { host: plainHost(host) }) : null;
    const hostId = (agent ?? "").slice(0, HOST_ID_DIGITS);
    const mine = hosts?.items.find((one) => one.host_id === hostId && one.project === job.project && ["", name].includes(one.job));
    const verdict = hosts && (mine?.verdict ?? "ok"); // a host without an incident is not listed
    const open = incidents.items.filter((one) => one.state !== "resolved");
    showUnits(ran.map(({ attempt, started_unix_ns, ended_unix_ns, who }) => ({ attempt, started_unix_ns, ended_unix_ns, who })), verdict, SEVERITIES.find((severity) => open.some((one) => one.severity === severity)));
    showTroubles(incidents.items);
    const known = { job: name, rank, host: plainHost(host) };
    fill(links, await ownLinks("rank", known), await ownLinks("host", known));
    drawn = { ...ran[0], incidents: incidents.items };
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
    const { attempt, who, incidents } = drawn;
    const { step } = await get(path("jobs", name));
    await Promise.all([series.draw(attempt, step, incidents), gpu.draw(who.host, who.device_uuid), devices.draw()]);
  } finally {
    drawing = false;
  }
}

const showUnits = whenChanged((ran, verdict, worst) => {
  const { who } = ran[0];
  const groups = GROUPS.filter((group) => group in who).map((group) => `${group} ${who[group]}`).join(" · ");
  fill(head, h("div", { class: "line" }, h("h1", { class: "break" }, `Rank ${number(rank)} of `, h("a", { href: `/jobs/${encodeURIComponent(name)}` }, name)), worst ? severityPill(worst) : statePill("no open incident"), verdict && h("span", { class: "muted" }, "host ", verdictPill(verdict))), h("p", { class: "muted break" }, "on ", h("a", { href: `/hosts/${encodeURIComponent(who.host)}` }, who.host), ` · ${who.device_uuid || "no GPU"} · local rank ${who.local_rank} · ${groups}`));
  const row = (one) => h("tr", {}, h("td", { class: "break" }, one.attempt), h("td", { class: "break" }, h("a", { href: `/hosts/${encodeURIComponent(one.who.host)}` }, one.who.host)), h("td", { class: "break" }, one.who.device_uuid || "no GPU"), h("td", { title: moment(one.started_unix_ns) }, clock(one.started_unix_ns), one.ended_unix_ns === null ? " until now" : ` to ${clock(one.ended_unix_ns)}`));
  fill(units, h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, ["Attempt", "Host", "GPU", "Time"].map((text) => h("th", {}, text)))), h("tbody", {}, ran.map(row)))));
});

const showTroubles = whenChanged((items) => {
  if (!items.length) return void empty(troubles, "None.");
  const row = (one) => h("tr", {}, h("td", {}, severityPill(one.severity)), h("td", { class: "break" }, h("a", { href: `/incidents/${encodeURIComponent(one.id)}` }, kindName(one.kind)), h("div", { class: "under" }, one.summary)), h("td", {}, incidentPill(one)), h("td", { title: moment(one.onset_unix_ns) }, clock(one.onset_unix_ns)));
  fill(troubles, h("table", { class: "compact stack" }, h("tbody", {}, items.map(row))));
});
