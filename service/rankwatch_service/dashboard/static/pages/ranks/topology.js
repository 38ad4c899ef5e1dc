// The topology of a job: its ranks by pipeline stage, data and tensor group, with the worst open incident of each.

import { get, getList, path } from "../../common/api.js";
import { fill, h, refill } from "../../common/dom.js";
import { kindName, number } from "../../common/format.js";
import { gathered, listen } from "../../common/live.js";
import { notFound } from "../../components/error_page.js";
import { card, empty, guarded, SEVERITIES, shell, statePill, whenChanged } from "../../components/shell.js";

const INCIDENTS_MAX = 500;

const name = decodeURIComponent(location.pathname.slice("/topology/".length));
const of = `/jobs/${encodeURIComponent(name)}`;
const main = shell("Jobs");
document.title = `Topology of ${name} · rankwatch`;
const head = h("div", { class: "job-head" });
const parts = h("div", { class: "column topology" });
main.append(h("div", { class: "crumbs" }, h("a", { class: "break", href: of }, `‹ ${name}`)), head, parts);
let missing = false;
const refresh = gathered(load);
listen((topic, job, change) => (topic === "reset" || (job === name && (topic === "incident" || change.state))) && refresh());
load();

async function load() {
  if (missing) return;
  await guarded(async () => {
    const answers = await Promise.all([get(path("jobs", name)), getList("incidents", { job: name, state: "unresolved" }, INCIDENTS_MAX)]).catch(unknown);
    if (answers) show(answers[0].state, answers[0].topology.ranks ?? [], answers[1].items.map(({ id, ranks, severity, kind }) => ({ id, ranks, severity, kind })));
  });
}

function unknown(error) {
  if (error.status !== 404) throw error;
  missing = true;
  notFound(main, `There is no job ${name}`, "It has never reported under this name, was deleted, or you may not see it.", "/jobs", "All jobs");
  return null;
}

const show = whenChanged((state, ranks, incidents) => {
  const troubles = new Map();
  for (const one of incidents.toSorted((a, b) => SEVERITIES.indexOf(b.severity) - SEVERITIES.indexOf(a.severity))) for (const rank of one.ranks) troubles.set(rank, one);
  fill(head, h("div", { class: "line" }, h("h1", { class: "break" }, "Topology of ", h("a", { href: of }, name)), statePill(state)), h("p", { class: "under" }, `${number(ranks.length)} ranks, ${number(troubles.size)} with an unresolved incident`));
  if (!ranks.length) return void empty(parts, "The ranks have not reported yet who they are.");
  const stages = Object.groupBy(ranks, (rank) => rank.pp);
  refill(parts, Object.keys(stages).length > 1 ? Object.entries(stages).map(([stage, mine]) => card(`Pipeline stage ${stage}`, grid(mine, troubles))) : card("Ranks", grid(ranks, troubles)), hosts(ranks, troubles));
});

// A row for each data group, with its ranks in the order of their tensor, context and expert groups.
function grid(ranks, troubles) {
  const rows = Object.entries(Object.groupBy(ranks, (rank) => rank.dp));
  return h("div", { class: "wide body" }, h("table", { class: "compact grid" }, h("tbody", {}, rows.map(([dp, mine]) => h("tr", {}, h("th", { scope: "row" }, `dp ${dp}`), h("td", {}, h("div", { class: "places" }, mine.toSorted((a, b) => a.tp - b.tp || a.cp - b.cp || a.ep - b.ep).map((rank) => place(rank, troubles.get(rank.rank))))))))));
}

function place(rank, trouble) {
  const title = `rank ${rank.rank} on ${rank.host} · dp ${rank.dp} tp ${rank.tp} pp ${rank.pp}${trouble ? ` · ${kindName(trouble.kind)}, ${trouble.severity}` : ""}`;
  return h("a", { class: `place ${trouble?.severity ?? ""}`, href: `/ranks/${encodeURIComponent(name)}/${rank.rank}`, title, "aria-label": title }, rank.rank);
}

function hosts(ranks, troubles) {
  const row = ([host, mine]) => h("tr", {}, h("td", { class: "break" }, h("a", { href: `/hosts/${encodeURIComponent(host)}` }, host), mine[0].switch && h("span", { class: "muted" }, ` switch ${mine[0].switch}`)), h("td", {}, h("div", { class: "places" }, mine.map((rank) => place(rank, troubles.get(rank.rank))))));
  return card("Hosts", h("div", { class: "wide" }, h("table", { class: "compact" }, h("tbody", {}, Object.entries(Object.groupBy(ranks, (rank) => rank.host)).map(row)))));
}
