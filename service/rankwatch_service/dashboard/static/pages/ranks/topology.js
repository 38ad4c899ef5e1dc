// The topology of a job: its ranks by pipeline stage, data and tensor group, and by host, each with its state: lost, not
// heard of, hanging, or in another trouble, as its unresolved incidents say.

import { get, getList, path } from "../../common/api.js";
import { fill, h, refill } from "../../common/dom.js";
import { kindName, number, rankList } from "../../common/format.js";
import { gathered, listen } from "../../common/live.js";
import { notFound } from "../../components/error_page.js";
import { card, empty, guarded, SEVERITIES, severityPill, shell, statePill, whenChanged } from "../../components/shell.js";

const INCIDENTS_MAX = 500;
const HOST_INCIDENTS_MAX = 4;

// States of a rank by the kinds of incidents that mean them; any other kind is trouble.
const STATES = { rank_lost: "lost", telemetry_lost: "silent", hang: "hanging" };
const STATE_NAMES = { lost: "lost", silent: "silent", hanging: "hanging", trouble: "in other trouble", done: "ended on request or finished" };
const GRAVEST = Object.keys(STATE_NAMES);

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
    if (answers) show(answers[0].state, answers[0].topology.ranks ?? [], answers[1].items.map(({ id, ranks, hosts, severity, kind, state }) => ({ id, ranks, hosts, severity, kind, state })));
  });
}

function unknown(error) {
  if (error.status !== 404) throw error;
  missing = true;
  notFound(main, `There is no job ${name}`, "It has never reported under this name, was deleted, or you may not see it.", "/jobs", "All jobs");
  return null;
}

const show = whenChanged((state, ranks, incidents) => {
  incidents = incidents.toSorted((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity));
  const troubles = troublesOf(incidents);
  fill(head, h("div", { class: "line" }, h("h1", { class: "break" }, "Topology of ", h("a", { href: of }, name)), statePill(state)), h("p", { class: "under" }, `${number(ranks.length)} ranks, ${number(troubles.size)} with an unresolved incident`), legend(troubles));
  if (!ranks.length) return void empty(parts, "The ranks have not reported their topology yet.");
  const stages = Object.groupBy(ranks, (rank) => rank.pp);
  refill(parts, unresolved(incidents), Object.keys(stages).length > 1 ? Object.entries(stages).map(([stage, mine]) => card(`Pipeline stage ${stage}`, grid(mine, troubles))) : card("Ranks", grid(ranks, troubles)), hosts(ranks, troubles, incidents));
});

// What is wrong with each rank that an incident names: its gravest incident, and its state by all of them.
function troublesOf(incidents) {
  const troubles = new Map();
  for (const one of incidents) {
    const state = one.kind === "rank_lost" && one.severity === "info" ? "done" : (STATES[one.kind] ?? "trouble");
    for (const rank of one.ranks) {
      const known = troubles.get(rank) ?? { gravest: one, state };
      if (GRAVEST.indexOf(state) < GRAVEST.indexOf(known.state)) known.state = state;
      troubles.set(rank, known);
    }
  }
  return troubles;
}

function legend(troubles) {
  const counts = Object.groupBy(troubles.values(), (one) => one.state);
  const known = GRAVEST.filter((state) => counts[state]);
  return known.length ? h("ul", { class: "states", "aria-label": "States of ranks" }, known.map((state) => h("li", {}, h("span", { class: `place ${state}`, "aria-hidden": "true" }), ` ${number(counts[state].length)} ${STATE_NAMES[state]}`))) : null;
}

function unresolved(incidents) {
  if (!incidents.length) return null;
  const row = (one) => h("tr", {}, h("td", {}, severityPill(one.severity)), h("td", { class: "nowrap" }, link(one)), h("td", { class: "break" }, rankList(one.ranks, 8)), h("td", { class: "break" }, one.hosts.slice(0, 4).map((host, at) => [at > 0 && ", ", hostLink(host)]), one.hosts.length > 4 && ` +${number(one.hosts.length - 4)}`), h("td", {}, statePill(one.state)));
  return card("Unresolved incidents", h("div", { class: "wide", tabindex: "0" }, h("table", { class: "compact" }, h("tbody", {}, incidents.map(row)))));
}

const link = (incident) => h("a", { href: `/incidents/${encodeURIComponent(incident.id)}` }, kindName(incident.kind));
const hostLink = (host) => h("a", { href: `/hosts/${encodeURIComponent(host)}` }, host);

// A row for each data group, with its ranks in the order of their tensor, context and expert groups.
function grid(ranks, troubles) {
  const rows = Object.entries(Object.groupBy(ranks, (rank) => rank.dp));
  return h("div", { class: "wide body" }, h("table", { class: "compact grid" }, h("tbody", {}, rows.map(([dp, mine]) => h("tr", {}, h("th", { scope: "row" }, `dp ${dp}`), h("td", {}, h("div", { class: "places" }, mine.toSorted((a, b) => a.tp - b.tp || a.cp - b.cp || a.ep - b.ep).map((rank) => place(rank, troubles.get(rank.rank))))))))));
}

function place(rank, trouble) {
  const { gravest, state } = trouble ?? {};
  const title = `rank ${rank.rank} on ${rank.host} · dp ${rank.dp} tp ${rank.tp} pp ${rank.pp}${trouble ? ` · ${state === "trouble" ? "" : `${STATE_NAMES[state]} · `}${kindName(gravest.kind)}, ${gravest.severity}` : ""}`;
  return h("a", { class: trouble ? `place ${gravest.severity} ${state}` : "place", href: `/ranks/${encodeURIComponent(name)}/${rank.rank}`, title, "aria-label": title }, rank.rank);
}

// Beside each host its incidents, those included that name none of its ranks.
function hosts(ranks, troubles, incidents) {
  const here = new Map();
  for (const one of incidents) for (const host of one.hosts) here.set(host, [...(here.get(host) ?? []), one]);
  const row = ([host, mine]) => h("tr", {}, h("td", { class: "break" }, hostLink(host), mine[0].switch && h("span", { class: "muted" }, ` switch ${mine[0].switch}`), (here.get(host) ?? []).slice(0, HOST_INCIDENTS_MAX).map((one) => h("div", { class: "nowrap" }, severityPill(one.severity), " ", link(one)))), h("td", {}, h("div", { class: "places" }, mine.map((rank) => place(rank, troubles.get(rank.rank))))));
  return card("Hosts", h("div", { class: "wide" }, h("table", { class: "compact" }, h("tbody", {}, Object.entries(Object.groupBy(ranks, (rank) => rank.host)).map(row)))));
}
