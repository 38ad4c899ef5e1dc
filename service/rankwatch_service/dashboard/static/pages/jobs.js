// All jobs: state, step, step time, loss, ranks reporting, unresolved incidents. Events bring rows up to date.

import { get, getList, now } from "../common/api.js";
import { fill, h, icon } from "../common/dom.js";
import { age, duration, number, stepNumber } from "../common/format.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { watchTotals } from "../common/totals.js";
import { keys } from "../components/keys.js";
import { firstSteps } from "../incidents/quiet.js";
import { offerProjects, whose } from "../components/job_project.js";
import { empty, guarded, rest, shell, statePill, whenChanged } from "../components/shell.js";

const PAGE = 100;
const TYPED_MS = 250;
const NOT_MOVING = ["stalled", "paused", "lost"]; // rates are the last ones before that
const STALE_S = 15;
const DELTA_MAX = 50; // more changed jobs than this are read with the whole list
const MISSED_NS = 10e9; // telemetry that is newer by this was told in an event that did not come
const COLUMNS = ["Job", "State", "Step", "Step time", "Loss", "Ranks", "Incidents", "Last step"];
const RIGHT = ["Step", "Step time", "Loss", "Ranks"];

const main = shell("Jobs");
const list = h("div", { class: "card list" });
const query = new URLSearchParams(location.search);
const project = h("select", { "aria-label": "Any project", hidden: true, onchange: () => choose("project", project.value) });
const STATES = { running: "Running", stalled: "Stalled", paused: "Paused", lost: "Lost", ended: "Ended" };
const ORDERS = { seen: "Last seen", newest: "Newest", size: "Most ranks" };
const pick = (name, any, texts) => h("select", { "aria-label": any, onchange: (event) => choose(name, event.target.value) }, h("option", { value: "" }, any), Object.entries(texts).map(([value, text]) => h("option", { value, selected: query.get(name) === value }, text)));
const search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search", maxLength: 200, value: query.get("search") ?? "", oninput: gathered(() => choose("search", search.value.trim()), TYPED_MS) });
const filters = h("div", { class: "filters" }, pick("state", "Any state", STATES), project, pick("order", ORDERS.seen, Object.fromEntries(Object.entries(ORDERS).slice(1))));
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Jobs")), h("div", { class: "searching" }, search, filters), list);
keys(() => [...list.querySelectorAll("tr.link")]);

const showProjects = whenChanged((names, chosen) => offerProjects(project, names, chosen));
const rows = new Map(); // by name, the row of each job that is shown
const jobs = new Map(); // by name, the job that a row shows
const changed = new Set(); // names of jobs of which the service has more to say than the event did
const elsewhere = new Set(); // names of jobs that the filter leaves out, or that stand below the last row
let wanted = PAGE;
let newestNs = 0; // when what is shown was heard of last
let working = Promise.resolve();

// An event of a job says what has changed of it; only what events do not tell is read, and of this job alone.
listen((topic, name, change) => {
  newestNs = Math.max(newestNs, change.last_seen_unix_ns ?? 0);
  if (topic === "reset" && !change.polled) reload();
  else if (topic === "job" && change.state === "deleted") reload();
  else if (topic === "job" && jobs.has(name) && change.step !== undefined) show({ ...jobs.get(name), ...fieldsOf(change) });
  else if ((topic === "job" || topic === "incident") && !elsewhere.has(name)) {
    changed.add(name);
    follow();
  }
});
const follow = gathered(() => inTurn(readChanged));
const reload = gathered(() => inTurn(load));
// The slow poll tells whether the page has missed an event.
watchTotals(({ telemetry_unix_ns: newest }, polled) => polled && newest !== null && newest > newestNs + MISSED_NS && reload());
everySecond(showAges);
inTurn(load);

// One after the other, so that an older response never replaces a newer one.
function inTurn(work) {
  working = working.then(() => guarded(work)).catch((error) => console.error(error));
}

const asked = () => ({ project: query.get("project"), search: query.get("search"), state: query.has("state") ? query.getAll("state") : null, order: query.get("order") });
const narrowed = () => ["project", "search", "state"].some((name) => query.has(name));

async function load() {
  changed.clear();
  const [{ items, total }, projects] = await Promise.all([getList("jobs", asked(), wanted), get("projects", { limit: 500 })]);
  const chosen = query.get("project");
  showProjects(projects.items.map((one) => one.name), chosen);
  rows.clear();
  jobs.clear();
  newestNs = items.reduce((newest, one) => Math.max(newest, one.last_seen_unix_ns), newestNs);
  if (!items.length) {
    if (narrowed()) empty(list, "No job matches.");
    else fill(list, firstSteps());
    return;
  }
  for (const one of items) {
    elsewhere.delete(one.name);
    jobs.set(one.name, one);
    rows.set(one.name, row(one));
  }
  const heads = COLUMNS.map((name) => h("th", { scope: "col", class: RIGHT.includes(name) ? "right" : "" }, name));
  fill(list, h("table", { class: "jobs" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, [...rows.values()])), rest(items.length, total, showMore));
  showAges();
}

async function readChanged() {
  const names = [...changed];
  if (!names.length) return;
  changed.clear();
  if (names.length > DELTA_MAX) return load();
  const { items } = await get("jobs", { ...asked(), name: names, limit: names.length });
  for (const one of names.filter((name) => !jobs.has(name))) elsewhere.add(one);
  if (items.some((one) => !jobs.has(one.name))) return load();
  items.forEach(show);
}

// Redraws the row of one job; the focus stays where it is.
function show(job) {
  if (JSON.stringify(job) === JSON.stringify(jobs.get(job.name))) return;
  const [before, after] = [rows.get(job.name), row(job)];
  const focused = before.contains(document.activeElement) ? [...before.querySelectorAll("a")].indexOf(document.activeElement) : -1;
  jobs.set(job.name, job);
  rows.set(job.name, after);
  before.replaceWith(after);
  after.querySelectorAll("a")[focused]?.focus();
  showAges();
}

// What an event tells of a job, without what belongs to the event.
function fieldsOf({ job: _job, at_unix_ns: _at, ...fields }) {
  return fields;
}

function choose(name, value) {
  if (value) query.set(name, value);
  else query.delete(name);
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  wanted = PAGE;
  elsewhere.clear();
  reload();
}

function showMore() {
  wanted += PAGE;
  elsewhere.clear();
  reload();
}

function row(job) {
  const where = `/jobs/${encodeURIComponent(job.name)}`;
  const then = NOT_MOVING.includes(job.state) ? "then" : "";
  return h(
    "tr",
    { class: "link", onclick: (event) => !event.target.closest("a") && location.assign(where) },
    h("td", { class: "c-name" }, h("a", { class: "title", href: where }, job.name), h("div", { class: "under break" }, whose(job.project, job.owner) ?? `attempt ${job.attempt}`)),
    h("td", {}, statePill(job.state)),
    h("td", { class: "right", "data-label": "Step" }, stepNumber(job.step)),
    h("td", { class: `right ${then}`, title: then && `last value before the job was ${job.state}`, "data-label": "Step time" }, duration(job.step_time_s)),
    h("td", { class: `right ${then}`, "data-label": "Loss" }, typeof job.loss === "string" ? h("span", { class: "pill critical" }, icon("critical"), number(job.loss)) : number(job.loss, 4)),
    h("td", { class: "right nowrap", "data-label": "Ranks" }, `${number(job.ranks_reporting)} / ${number(job.world_size)}`),
    h(
      "td",
      { "data-label": "Incidents" },
      job.incidents
        ? h("a", { class: `pill ${job.worst_severity}`, href: `/incidents?job=${encodeURIComponent(job.name)}` }, `${job.incidents} unresolved`)
        : h("span", { class: "faint" }, "none"),
    ),
    h("td", { class: "nowrap", "data-label": "Last step" }, h("div", { "data-progress": job.last_progress_unix_ns }), h("div", { class: "under", "data-seen": job.last_seen_unix_ns, "data-state": job.state })),
  );
}

function showAges() {
  const ageOf = (unixNs) => now() / 1e3 - Number(unixNs) / 1e9;
  for (const place of list.querySelectorAll("[data-seen]")) {
    const seconds = ageOf(place.dataset.seen);
    place.textContent = `seen ${age(seconds)} ago`;
    place.closest("tr").classList.toggle("stale", seconds > STALE_S && place.dataset.state !== "ended");
  }
  for (const place of list.querySelectorAll("[data-progress]")) place.textContent = `${age(ageOf(place.dataset.progress))} ago`;
}
