// The hosts of one name: the verdict on each, the incidents on record, and counters while a job ran there.

import { get, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { clock, kindName, moment } from "../common/format.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { DevicesCard } from "../components/devices.js";
import { card, empty, guarded, severityPill, shell } from "../components/shell.js";
import { ownLinks } from "../components/own_links.js";
import { plainHost, verdictPill, whose } from "../components/verdict.js";

const POLL_S = 5;
const LISTED = 50;

const name = plainHost(decodeURIComponent(location.pathname.slice("/hosts/".length)));
const main = shell("Hosts");
document.title = `${name} · rankwatch`;
const pick = h("select", { class: "small", "aria-label": "Job", onchange: () => show(pick.value) });
const verdict = h("span");
const record = h("div");
const links = h("div");
ownLinks("host", { host: name }).then((found) => fill(links, found));
const counters = h("div");
main.append(
  h("div", { class: "crumbs" }, h("a", { href: "/hosts" }, "‹ Hosts"), h("span", { class: "range" }, pick)),
  h("div", { class: "job-head" }, h("div", { class: "line" }, h("h1", { class: "break" }, name), verdict), links),
  card("Incidents on its record", record, { hint: "of all jobs; they count for 28 days (docs/operations.md, Verdicts on hosts)" }),
  counters,
);

let shown = "";
let drawing = false;
let cards = [];
let seconds = 0;
const refresh = gathered(load);
listen((topic) => ["incident", "reset"].includes(topic) && refresh());
everySecond(() => seconds++ % POLL_S === 0 && load());

async function load() {
  await guarded(async () => {
    const [hosts, incidents, jobs] = await Promise.all([get("hosts", { host: name }), get(path("hosts", name), { limit: LISTED }), get(path("hosts", name, "jobs"))]);
    const several = hosts.items.length > 1;
    const each = hosts.items.map((one) => [verdictPill(one.verdict), several && h("span", { class: "muted" }, ` ${whose(one)} `)]);
    fill(verdict, each.length ? each : verdictPill("ok")); // hosts without an incident are not listed
    showRecord(incidents.items);
    const offered = jobs.items.map((one) => one.job);
    const before = [...pick.options].map((one) => one.value);
    if (offered.toSorted().join("\n") !== before.toSorted().join("\n")) fill(pick, offered.map((job) => h("option", { value: job, selected: job === shown }, job)));
    pick.hidden = !offered.length;
    await show(pick.value);
  });
}

function showRecord(items) {
  if (!items.length) {
    empty(record, "None.");
    return;
  }
  fill(record, h("table", { class: "compact" }, h("tbody", {}, items.map((one) =>
    h("tr", {},
      h("td", {}, severityPill(one.severity)),
      h("td", { class: "break" }, h("a", { href: `/incidents/${encodeURIComponent(one.incident_id)}` }, kindName(one.kind)), h("span", { class: "muted" }, one.device_uuid && ` ${one.device_uuid}`)),
      h("td", { class: "break" }, h("a", { href: `/jobs/${encodeURIComponent(one.job)}` }, one.job)),
      h("td", { class: "right nowrap muted", title: moment(one.at_unix_ns) }, clock(one.at_unix_ns)),
    ),
  ))));
}

async function show(job) {
  if (!job || (drawing && job === shown)) return;
  if (job !== shown) {
    shown = job;
    cards = ["gpu", "port", "host"].map((kind) => new DevicesCard(job, kind, name));
    fill(counters, cards.map((one) => one.card));
  }
  drawing = true;
  try {
    await Promise.all(cards.map((one) => one.draw()));
  } finally {
    drawing = false;
  }
}
