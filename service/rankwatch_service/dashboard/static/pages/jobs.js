// All jobs: state, step, step time, loss, ranks reporting, unresolved incidents.

import { get, getList, now } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { age, duration, number, stepNumber } from "../common/format.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { keys } from "../components/keys.js";
import { offerProjects, whose } from "../components/job_project.js";
import { empty, guarded, rest, shell, statePill, whenChanged } from "../components/shell.js";

const PAGE = 100;
const NOT_MOVING = ["stalled", "paused", "lost"]; // rates are the last ones before that
const STALE_S = 15;
const POLL_S = 3;

const main = shell("Jobs");
const list = h("div", { class: "card list" });
const query = new URLSearchParams(location.search);
const archived = query.get("archived") === "true";
const project = h("select", { "aria-label": "Any project", hidden: true, onchange: () => choose(project.value) });
const other = archived ? h("a", { href: "/jobs" }, "‹ Jobs") : h("a", { href: "/jobs?archived=true" }, "Archived jobs");
main.append(h("div", { class: "pagehead" }, h("h1", {}, archived ? "Archived jobs" : "Jobs"), other, h("div", { class: "filters" }, project)), list);
keys(() => [...list.querySelectorAll("tr.link")]);

const showProjects = whenChanged((names, chosen) => offerProjects(project, names, chosen));
const refresh = gathered(load);
listen((topic) => ["job", "incident", "reset"].includes(topic) && refresh());
let seconds = 0;
let wanted = PAGE;
everySecond(() => {
  if (seconds++ % POLL_S === 0) load();
  showAges();
});

async function load() {
  await guarded(async () => {
    const chosen = query.get("project");
    const [{ items, total }, projects] = await Promise.all([getList("jobs", { archived: archived || null, project: chosen }, wanted), get("projects", { limit: 500 })]);
    showProjects(projects.items.map((one) => one.name), chosen);
    if (!items.length) {
      empty(list, chosen ? "No job of this project is listed." : archived ? "No job is archived." : "No job has reported yet.");
      return;
    }
    const headings = ["Job", "State", "Step", "Step time", "Loss", "Ranks", "Incidents", "Last step"];
    const head = h("tr", {}, headings.map((name, n) => h("th", { class: n >= 2 && n <= 5 ? "right" : "" }, name)));
    fill(list, h("table", { class: "jobs" }, h("thead", {}, head), h("tbody", {}, items.map(row))), rest(items.length, total, showMore));
    showAges();
  });
}

function choose(name) {
  if (name) query.set("project", name);
  else query.delete("project");
  history.replaceState(null, "", query.size ? `?${query}` : location.pathname);
  wanted = PAGE;
  load();
}

function showMore() {
  wanted += PAGE;
  load();
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
    h("td", { class: `right ${then}`, "data-label": "Loss" }, number(job.loss, 4)),
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
