// Home: what is open, worst first. Filters live in the address, so that a view can be shared.

import { get, now, path, post } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { age, clock, kindName, moment, number, rankList } from "./format.js";
import { everySecond, gathered, listen } from "./live.js";
import { empty, guarded, keys, mayDo, SEVERITIES, severityPill, shell, statePill, toast, whenChanged } from "./shell.js";

const SHOWN = 200;
const UNHEARD_S = 30;
const VIEWS = { open: "Open", acknowledged: "Acknowledged", resolved: "Resolved", all: "All" };

const query = new URLSearchParams(location.search);
const known = new Set();
let first = true;
let shown = [];

const main = shell("Incidents");
const views = h("div", { class: "views", role: "group", "aria-label": "State" });
const severity = choice("severity", "Any severity", SEVERITIES);
const job = choice("job", "Any job", []);
const list = h("div", { class: "card list" });
main.append(
  h("div", { class: "pagehead" }, h("h1", {}, "Incidents"), views, h("div", { class: "filters" }, severity, job)),
  list,
  h("p", { class: "keys hint" }, h("kbd", {}, "j"), h("kbd", {}, "k"), " move  ", h("kbd", {}, "Enter"), " open  ", h("kbd", {}, "a"), " acknowledge"),
);
keys(() => [...list.querySelectorAll("tr.link")], { a: acknowledge });

const showViews = whenChanged((view) =>
  fill(
    views,
    Object.entries(VIEWS).map(([name, label]) => h("button", { class: "view", "aria-pressed": name === view ? "true" : "false", onclick: () => set("state", name === "open" ? "" : name) }, label)),
  ),
);
const offerJobs = whenChanged((names, chosen) => offer(job, "Any job", names, chosen));
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
  load();
}

async function load() {
  const view = query.get("state") ?? "open";
  showViews(view);
  await guarded(async () => {
    const wanted = { state: view === "all" ? null : view, severity: query.get("severity"), job: query.get("job"), kind: query.get("kind"), limit: SHOWN };
    const [incidents, jobs] = await Promise.all([get("incidents", wanted), get("jobs", { limit: 100 })]);
    offerJobs(jobs.items.map((one) => one.name), query.get("job"));
    shown = incidents.items.sort(worstFirst);
    // Only what changed is drawn again: the pointer may be on a row.
    const state = JSON.stringify(shown.length ? shown : [view, query.toString(), jobs.items]);
    if (state !== drawn) shown.length ? fill(list, table(shown)) : quiet(view, jobs.items);
    drawn = state;
    for (const incident of shown) known.add(incident.id);
    first = false;
  });
}

const STATE_ORDER = { open: 0, acknowledged: 1, resolved: 2 };

function worstFirst(a, b) {
  return (
    STATE_ORDER[a.state] - STATE_ORDER[b.state] ||
    (a.state === "resolved" ? 0 : SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity)) ||
    (a.state === "resolved" ? b.resolved_unix_ns - a.resolved_unix_ns : a.onset_unix_ns - b.onset_unix_ns)
  );
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
      h("div", { class: "under" }, h("span", {}, kindName(incident.kind)), h("span", {}, `#${incident.number}`), h("span", {}, incident.job)),
    ),
    h("td", { class: "c-where" }, h("div", {}, rankList(incident.ranks)), h("div", { class: "under" }, incident.hosts.slice(0, 2).join(", "), incident.hosts.length > 2 && ` +${incident.hosts.length - 2}`)),
    h(
      "td",
      { class: "c-since nowrap", title: moment(incident.onset_unix_ns) },
      h("div", { "data-since": incident.onset_unix_ns, "data-until": incident.resolved_unix_ns }),
      h("div", { class: "under" }, incident.onset_step === null ? clock(incident.onset_unix_ns) : `step ${number(incident.onset_step)}`),
    ),
    h("td", { class: "c-cost right nowrap" }, cost > 0 ? [number(cost, 2), h("div", { class: "under" }, "GPU-h / h")] : "–"),
    h("td", { class: "c-state" }, statePill(incident.state), incident.acknowledged_by && h("div", { class: "under" }, incident.acknowledged_by)),
  );
}

function quiet(view, jobs) {
  if (view !== "open" || ["severity", "job", "kind"].some((name) => query.get(name))) {
    empty(list, `No ${view === "all" ? "" : `${view} `}incident matches.`);
    return;
  }
  const running = jobs.filter((one) => one.state === "running" || one.state === "paused");
  const newest = Math.max(0, ...jobs.map((one) => one.last_seen_unix_ns));
  const heard = !running.length || now() / 1e3 - newest / 1e9 < UNHEARD_S;
  fill(
    list,
    h(
      "div",
      { class: `quiet ${heard ? "" : "unheard"}` },
      h("span", { class: "seal" }, icon(heard ? "good" : "warning")),
      h("h2", {}, heard ? "All quiet" : "Quiet, but nothing is heard"),
      jobs.length
        ? h("p", { class: "muted" }, `${running.length} of ${jobs.length} ${jobs.length === 1 ? "job" : "jobs"} running. Last telemetry `, h("b", { "data-since": newest }), " ago.")
        : h("p", { class: "muted" }, "No job has reported yet. Quiet does not mean healthy until one does."),
      jobs.length === 0 && h("p", { class: "hint" }, "Put ", h("code", {}, "watch = rankwatch.start(job=…)"), " into a training script, or run ", h("code", {}, "rankwatch demo"), "."),
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
  toast(`Acknowledged #${incident.number}`);
  load();
}
