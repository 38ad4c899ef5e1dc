// Home: unresolved incidents, most urgent first. Filters are part of the address, so that a view can be shared. After a
// change only the incidents that changed are read.

import { get, getList, now, path, post } from "../common/api.js";
import { fill, h, icon } from "../common/dom.js";
import { KIND_NAMES, number } from "../common/format.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { watchTotals } from "../common/totals.js";
import { unit } from "../incidents/impact.js";
import { incidentTable, inOrder, ORDERS, showAges } from "../incidents/incident_table.js";
import { offerProjects } from "../components/job_project.js";
import { keys } from "../components/keys.js";
import { allQuiet, noMatch } from "../incidents/quiet.js";
import { guarded, mayDo, rest, seesEveryJob, SEVERITIES, shell, sum, toast, whenChanged } from "../components/shell.js";
import { newReceiver } from "../notifications/receivers.js";
import { readHealth, watchHealth } from "../service/health_banner.js";
import { silence } from "../incidents/silence.js";

const PAGE = 100;
const DELTA_MAX = 50; // more changed incidents than this are read with the whole list
const TYPED_MS = 250;
const VIEWS = { unresolved: "Unresolved", open: "Open", acknowledged: "Acknowledged", resolved: "Resolved", all: "All" };
const PERIODS = { "1h": ["Last hour", 3600], "24h": ["Last 24 hours", 86_400], "7d": ["Last 7 days", 604_800] };
const FILTERS = ["severity", "kind", "host", "project", "job", "period", "search"];

const query = new URLSearchParams(location.search);
const names = { host: new Set(), job: new Set() }; // that a filter offers
const changed = new Set();
let known = null; // ids of incidents that have been shown
let shown = [];
let total = 0;
let loaded = false;
let drawn = null;
let totals = null;
let wanted = PAGE;
let working = Promise.resolve();

const main = shell("Incidents");
const views = h("div", { class: "views", role: "group", "aria-label": "State" });
const search = h("input", { type: "search", name: "search", placeholder: "Search", "aria-label": "Search", maxLength: 200, value: query.get("search") ?? "", oninput: gathered(() => set("search", search.value.trim()), TYPED_MS) });
const project = h("select", { "aria-label": "Any project", hidden: true, onchange: () => set("project", project.value) });
const chosen = {
  severity: choice("severity", "Any severity"),
  kind: choice("kind", "Any kind"),
  host: choice("host", "Any host"),
  job: choice("job", "Any job"),
  period: choice("period", "Any time"),
  order: choice("order", "Most urgent"),
};
const filters = h("div", { class: "filters" }, chosen.severity, chosen.kind, chosen.host, chosen.job, project, chosen.period, chosen.order);
const fold = h("button", { class: "fold", type: "button", "aria-expanded": "false", onclick: () => showFilters(filters.classList.toggle("shown")) }, "Filters");
const summary = h("p", { class: "totals", role: "status" });
const list = h("div", { class: "card list" });
const nobody = h("button", { class: "nobody", hidden: true, onclick: () => newReceiver(readHealth) }, icon("warning"), "Nobody is notified: add a receiver");
watchHealth(async ({ receivers }) => (nobody.hidden = receivers.length > 0 || !(await seesEveryJob()) || !(await mayDo("admin"))));
main.classList.add("home");
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Incidents"), summary, nobody, views), h("div", { class: "searching" }, search, fold, filters), list);
keys(() => [...list.querySelectorAll("tr.link")], { a: { does: "acknowledge", run: acknowledge }, s: { does: "silence", run: mute } }, search);

const showSummary = whenChanged(() => fill(summary, summaryOf()));
offer("severity", Object.fromEntries(SEVERITIES.map((one) => [one, one])));
offer("kind", KIND_NAMES);
offer("period", Object.fromEntries(Object.entries(PERIODS).map(([name, [text]]) => [name, text])));
offer("order", Object.fromEntries(Object.entries(ORDERS).filter(([name]) => name !== "urgency")));
showFilters([...FILTERS, "order"].some((name) => name !== "search" && query.has(name)));
showViews();

listen((topic, job, change) => {
  if (topic === "incident" && change.id) {
    changed.add(change.id);
    follow();
  } else if (topic === "job" && change.state === "deleted") reload();
});
const follow = gathered(() => inTurn(readChanged));
const reload = gathered(() => inTurn(load));
watchTotals((newest, polled) => {
  const missed = polled && totals !== null && newest.updated_unix_ns !== totals.updated_unix_ns;
  totals = newest;
  showSummary(totals);
  if (missed) reload();
  else if (loaded && !shown.length) draw();
});
const count = () => showAges(list, "lasted ");
everySecond(count);
new MutationObserver(count).observe(list, { childList: true });
inTurn(load);
offerNames();

// One after the other, so that an older response never replaces a newer one.
function inTurn(work) {
  working = working.then(() => guarded(work)).catch((error) => console.error(error));
}

function choice(name, any) {
  return h("select", { "aria-label": any, onchange: () => set(name, chosen[name].value) });
}

function offer(name, texts) {
  const select = chosen[name];
  const set = query.get(name) ?? "";
  const all = set && !(set in texts) ? { ...texts, [set]: set } : texts;
  fill(select, h("option", { value: "" }, select.getAttribute("aria-label")), Object.entries(all).map(([value, text]) => h("option", { value, selected: value === set }, text)));
}

async function offerNames() {
  const [jobs, projects] = await Promise.all([get("jobs", { limit: 100 }).catch(() => ({ items: [] })), get("projects", { limit: 500 }).catch(() => ({ items: [] }))]);
  for (const one of jobs.items) names.job.add(one.name);
  offerProjects(project, projects.items.map((one) => one.name), query.get("project"));
  offerSeen();
}

const offered = whenChanged((hosts, jobs) => {
  offer("host", Object.fromEntries(hosts.map((one) => [one, one])));
  offer("job", Object.fromEntries(jobs.map((one) => [one, one])));
});
function offerSeen() {
  for (const one of shown) {
    names.job.add(one.job);
    for (const host of one.hosts) names.host.add(host);
  }
  offered([...names.host].sort(), [...names.job].sort());
}

function showFilters(open) {
  filters.classList.toggle("shown", open);
  fold.setAttribute("aria-expanded", String(open));
}

function showViews() {
  const view = query.get("state") ?? "unresolved";
  fill(views, Object.entries(VIEWS).map(([name, label]) => h("button", { class: "view", "aria-pressed": String(name === view), onclick: () => set("state", name === "unresolved" ? "" : name) }, label)));
}

function set(name, value) {
  if (value) query.set(name, value);
  else query.delete(name);
  changedQuery();
}

function showAll() {
  for (const name of ["state", ...FILTERS]) query.delete(name);
  for (const select of [...Object.values(chosen), project]) select.value = query.get("order") && select === chosen.order ? query.get("order") : "";
  search.value = "";
  changedQuery();
}

function changedQuery() {
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  showViews();
  wanted = PAGE;
  known = null;
  reload();
}

// What the page asks the service for.
function asked() {
  const view = query.get("state") ?? "unresolved";
  const [, seconds] = PERIODS[query.get("period")] ?? [];
  return {
    state: view === "all" ? null : view,
    order: query.get("order") ?? "urgency",
    from_unix_ns: seconds && Math.round((now() - seconds * 1e3) * 1e6),
    ...Object.fromEntries(["severity", "kind", "host", "project", "job", "search"].map((name) => [name, query.get(name)])),
  };
}

async function load() {
  changed.clear();
  const found = await getList("incidents", asked(), wanted);
  [shown, total, loaded] = [found.items, found.total, true];
  draw();
}

async function readChanged() {
  const ids = [...changed];
  if (!ids.length) return;
  if (ids.length > DELTA_MAX) return load();
  changed.clear();
  const [{ items }, first] = await Promise.all([get("incidents", { ...asked(), id: ids, limit: ids.length }), total > shown.length ? get("incidents", { ...asked(), limit: 1 }) : null]);
  const kept = shown.filter((one) => !ids.includes(one.id));
  const ordered = inOrder([...kept, ...items], asked().order);
  // Where only the first ones are shown, what comes after the last of them is not known.
  const known = first === null ? ordered : ordered.slice(0, ordered.indexOf(kept.at(-1)) + 1);
  total = first === null ? known.length : first.total;
  shown = known.slice(0, wanted);
  if (shown.length < Math.min(total, wanted - DELTA_MAX)) return load();
  draw();
}

// Redraws only after a change, since the pointer may be on a row, and leaves the focus where it is.
function draw() {
  if (!shown.length && !totals) return;
  const state = JSON.stringify(shown.length ? [shown, total, asked().order] : [query.toString(), totals]);
  if (state === drawn) return;
  drawn = state;
  const focused = document.activeElement?.closest("tr.link")?.dataset.id;
  const fresh = (one) => known !== null && !known.has(one.id);
  if (shown.length) fill(list, incidentTable(shown, asked().order === "urgency", fresh, devices()), rest(shown.length, total, showMore));
  else fill(list, noneShown());
  if (focused) list.querySelector(`[data-id="${focused}"] a`)?.focus();
  offerSeen();
  known = new Set([...(known ?? []), ...shown.map((one) => one.id)]);
}

function noneShown() {
  const unresolved = sum(totals.open) + sum(totals.acknowledged);
  const narrowed = FILTERS.some((name) => query.has(name)) || query.has("state");
  return unresolved > 0 || narrowed ? noMatch(unresolved, showAll) : allQuiet(totals);
}

function showMore() {
  wanted += PAGE;
  reload();
}

const devices = () => unit(totals?.accelerated ?? true).many;

// Everything unresolved and every job without progress, whatever the filters show.
function summaryOf() {
  const many = (severity) => totals.open[severity] + totals.acknowledged[severity];
  const worst = SEVERITIES.filter((one) => many(one) > 0).map((one) => h("span", { class: `pill ${one}` }, icon(one), `${number(many(one))} ${one}`));
  const cost = totals.impact_gpu_hours_per_hour;
  const still = totals.jobs.stalled + totals.jobs.lost;
  const parts = [
    ...worst,
    cost > 0 && h("b", {}, `the work of ${number(cost)} ${devices()} is lost`),
    still > 0 && h("a", { href: "/jobs?state=stalled&state=lost" }, `${number(still)} ${still === 1 ? "job" : "jobs"} not progressing`),
    sum(totals.acknowledged) > 0 && `${number(sum(totals.acknowledged))} acknowledged`,
  ].filter(Boolean);
  return parts.map((part, n) => [n > 0 && h("span", { "aria-hidden": "true" }, "·"), part]);
}

async function acknowledge(row) {
  const incident = shown.find((one) => one.id === row?.dataset.id);
  if (incident?.state !== "open" || !(await mayDo("operate"))) return;
  if (await guarded(() => post(path("incidents", incident.id, "acknowledge"), {}))) toast(`Acknowledged ${incident.short_id}`);
  changed.add(incident.id);
  follow();
}

async function mute(row) {
  const incident = shown.find((one) => one.id === row?.dataset.id);
  if (incident && (await mayDo("operate"))) await silence(incident);
}
