// Home: unresolved incidents, most severe first. Filters are part of the address, so that a view can be shared.

import { get, getList, now, path, post } from "../common/api.js";
import { fill, h, icon } from "../common/dom.js";
import { age, clock, kindName, moment, number, rankList } from "../common/format.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { offerProjects } from "../components/job_project.js";
import { empty, guarded, incidentPill, keys, mayDo, rest, SEVERITIES, severityPill, shell, sum, toast, whenChanged } from "../components/shell.js";

const PAGE = 100;
const SILENT_S = 30;
const VIEWS = { unresolved: "Unresolved", open: "Open", acknowledged: "Acknowledged", resolved: "Resolved", all: "All" };
const FILTERS = ["severity", "project", "job", "kind"];

const query = new URLSearchParams(location.search);
const known = new Set();
let first = true;
let shown = [];
let wanted = PAGE;

const main = shell("Incidents");
const views = h("div", { class: "views", role: "group", "aria-label": "State" });
const severity = choice("severity", "Any severity", SEVERITIES);
const job = choice("job", "Any job", []);
const project = h("select", { "aria-label": "Any project", hidden: true, onchange: () => set("project", project.value) });
const summary = h("p", { class: "totals", role: "status" });
const list = h("div", { class: "card list" });
main.append(
  h("div", { class: "pagehead" }, h("h1", {}, "Incidents"), views, h("div", { class: "filters" }, severity, project, job)),
  summary,
  list,
  h("p", { class: "keys hint" }, h("kbd", {}, "j"), h("kbd", {}, "k"), " move  ", h("kbd", {}, "Enter"), " open  ", h("kbd", {}, "a"), " acknowledge"),
);
keys(() => [...list.querySelectorAll("tr.link")], { a: acknowledge });

const showViews = whenChanged((view, counts) =>
  fill(
    views,
    Object.entries(VIEWS).map(([name, label]) => {
      const many = counts && h("span", { class: "many" }, number(counts[name]));
      return h("button", { class: "view", "aria-pressed": name === view ? "true" : "false", onclick: () => set("state", name === "unresolved" ? "" : name) }, label, many);
    }),
  ),
);
const showSummary = whenChanged((totals) => fill(summary, summaryOf(totals)));
const offerJobs = whenChanged((names, chosen) => offer(job, "Any job", names, chosen));
const showProjects = whenChanged((names, chosen) => offerProjects(project, names, chosen));
let drawn = null;

const refresh = gathered(load);
listen((topic) => ["incident", "reset", "job"].includes(topic) && refresh());
everySecond(showAges);
load();

function choice(name, any, values) {
  const select = h("select", { "aria-label": any, onchange: () => set(name, select.value) });
  offer(select, any, values, query.get(name));
  return select;
}

function offer(select, any, values, chosen) {
  const all = chosen && !values.includes(chosen) ? [...values, chosen] : values;
  fill(select, h("option", { value: "" }, any), all.map((value) => h("option", { value, selected: value === chosen }, value)));
}

function set(name, value) {
  if (value) query.set(name, value);
  else query.delete(name);
  const search = query.toString();
  history.replaceState(null, "", search ? `?${search}` : location.pathname);
  wanted = PAGE;
  load();
}

async function load() {
  const view = query.get("state") ?? "unresolved";
  await guarded(async () => {
    const asked = { state: view === "all" ? null : view, severity: query.get("severity"), project: query.get("project"), job: query.get("job"), kind: query.get("kind"), order: "urgency" };
    const [incidents, totals, jobs, projects] = await Promise.all([
      getList("incidents", asked, wanted),
      get("incidents/totals", { project: asked.project, job: asked.job }),
      get("jobs", { limit: 100, project: asked.project }),
      get("projects", { limit: 500 }),
    ]);
    const counts = { open: sum(totals.open), acknowledged: sum(totals.acknowledged), resolved: sum(totals.resolved) };
    counts.unresolved = counts.open + counts.acknowledged;
    counts.all = counts.unresolved + counts.resolved;
    showViews(view, counts);
    showSummary(totals);
    showProjects(projects.items.map((one) => one.name), asked.project);
    offerJobs(jobs.items.map((one) => one.name), query.get("job"));
    shown = incidents.items;
    // Redraw only after a change, since the pointer may be on a row.
    const state = JSON.stringify(shown.length ? [shown, incidents.total] : [view, query.toString(), counts, jobs.items]);
    if (state !== drawn) shown.length ? fill(list, table(shown), rest(shown.length, incidents.total, showMore)) : quiet(view, counts, jobs.items);
    drawn = state;
    for (const incident of shown) known.add(incident.id);
    first = false;
  });
}

function showMore() {
  wanted += PAGE;
  load();
}

// Unresolved incidents in one line; empty if there are none.
function summaryOf(totals) {
  const [open, acknowledged] = [sum(totals.open), sum(totals.acknowledged)];
  if (open + acknowledged === 0) return [];
  const worst = SEVERITIES.filter((one) => totals.open[one] + totals.acknowledged[one] > 0).map((one) => h("span", { class: `pill ${one}` }, icon(one), `${number(totals.open[one] + totals.acknowledged[one])} ${one}`));
  const whose = open === 0 ? "all acknowledged" : acknowledged === 0 ? "none acknowledged" : `${number(acknowledged)} acknowledged`;
  const cost = totals.impact_gpu_hours_per_hour;
  return [h("span", {}, h("b", {}, `${number(open + acknowledged)} unresolved`), `, ${whose}`), worst, cost > 0 && h("span", {}, "cost ", h("b", {}, `${number(cost)} GPU-hours per hour`))];
}

function table(incidents) {
  return h(
    "table",
    { class: "incidents" },
    h("thead", {}, h("tr", {}, ["Severity", "Incident", "Where", "Since", "Cost", "State"].map((name) => h("th", { class: name === "Cost" ? "right" : "" }, name)))),
    h("tbody", {}, incidents.map(row)),
  );
}

function row(incident) {
  const where = `/incidents/${encodeURIComponent(incident.id)}`;
  const cost = incident.impact_gpu_hours_per_hour;
  return h(
    "tr",
    {
      class: `link ${!first && !known.has(incident.id) ? "fresh" : ""}`,
      "data-id": incident.id,
      onclick: (event) => !event.target.closest("a") && location.assign(where),
    },
    h("td", { class: "c-severity" }, severityPill(incident.severity)),
    h(
      "td",
      { class: "c-what" },
      h("a", { class: "title", href: where }, incident.summary),
      h("div", { class: "under" }, h("span", {}, kindName(incident.kind)), h("span", { class: "mono" }, incident.short_id), h("span", {}, incident.job)),
    ),
    h("td", { class: "c-where" }, h("div", {}, rankList(incident.ranks)), h("div", { class: "under" }, incident.hosts.slice(0, 2).join(", "), incident.hosts.length > 2 && ` +${incident.hosts.length - 2}`)),
    h(
      "td",
      { class: "c-since nowrap", title: moment(incident.onset_unix_ns) },
      h("div", { "data-since": incident.onset_unix_ns, "data-until": incident.resolved_unix_ns }),
      h("div", { class: "under" }, incident.onset_step === null ? clock(incident.onset_unix_ns) : `step ${number(incident.onset_step)}`),
    ),
    h("td", { class: "c-cost right nowrap" }, cost > 0 ? [number(cost, 2), h("div", { class: "under" }, "GPU-h / h")] : "–"),
    h("td", { class: "c-state" }, incidentPill(incident), incident.acknowledged_by && h("div", { class: "under" }, incident.acknowledged_by)),
  );
}

function quiet(view, counts, jobs) {
  if (!["unresolved", "open"].includes(view) || FILTERS.some((name) => query.get(name))) {
    empty(list, `No ${view === "all" ? "" : `${view} `}incidents match.`);
  } else if (counts.acknowledged > 0) {
    empty(list, `No incident is open. ${number(counts.acknowledged)} acknowledged ${counts.acknowledged === 1 ? "incident is" : "incidents are"} unresolved.`);
  } else if (jobs.length === 0) {
    fill(list, firstSteps());
  } else {
    fill(list, allQuiet(jobs));
  }
}

// No incident is open. Whether that is good depends on whether jobs report.
function allQuiet(jobs) {
  const count = (...states) => jobs.filter((one) => states.includes(one.state)).length;
  const [running, lost, stalled] = [count("running", "paused"), count("lost"), count("stalled")];
  const newest = Math.max(...jobs.map((one) => one.last_seen_unix_ns));
  const silent = lost > 0 || (running > 0 && now() / 1e3 - newest / 1e9 > SILENT_S);
  const calm = !silent && stalled === 0;
  const title = silent ? "No open incidents, but not every job reports" : stalled ? "No open incidents, but not every job makes progress" : running ? "No open incidents" : "No job is running";
  const others = [stalled && `${stalled} stalled`, lost && `${lost} lost`].filter(Boolean);
  return h(
    "div",
    { class: `quiet ${calm ? "" : "unheard"}` },
    h("span", { class: "seal" }, icon(calm ? "good" : "warning")),
    h("h2", {}, title),
    h("p", { class: "muted" }, [`${running} of ${jobs.length} ${jobs.length === 1 ? "job" : "jobs"} running`, ...others].join(", "), ". Last telemetry ", h("b", { "data-since": newest }), " ago."),
  );
}

function firstSteps() {
  const step = (text, code) => h("li", {}, text, h("pre", {}, code));
  return h(
    "div",
    { class: "quiet begin" },
    h("h2", {}, "No job has reported yet"),
    h("p", { class: "muted" }, "Until one does, no incidents does not mean that all is well."),
    h(
      "ol",
      {},
      step("Add this to the training script:", 'import rankwatch\n\nwatch = rankwatch.start(job="gpt-small")\nfor step in watch.steps(max_steps):\n    loss = train_step()\n    watch.log(loss=loss)'),
      step("On this machine nothing else is needed. On other machines set the address and a token, from `rankwatch token create agents --scope ingest`:", `export RANKWATCH_URL=${location.origin}\nexport RANKWATCH_TOKEN=…`),
      step("Or try it with a demo job:", "rankwatch demo"),
    ),
  );
}

function showAges() {
  for (const cell of list.querySelectorAll("[data-since]")) {
    const until = Number(cell.dataset.until);
    const seconds = ((until || now() * 1e6) - Number(cell.dataset.since)) / 1e9;
    cell.textContent = until ? `lasted ${age(seconds)}` : age(seconds);
  }
}

const listed = new MutationObserver(showAges);
listed.observe(list, { childList: true });

async function acknowledge(chosen) {
  const incident = shown.find((one) => one.id === chosen?.dataset.id);
  if (!incident || incident.state !== "open" || !(await mayDo("operate"))) return;
  await guarded(() => post(path("incidents", incident.id, "acknowledge"), {}));
  toast(`Acknowledged ${incident.short_id}`);
  load();
}
