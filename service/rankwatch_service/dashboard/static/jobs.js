// All jobs: state, step, speed, loss, how many ranks report, what is open.

import { get, now } from "./api.js";
import { fill, h } from "./dom.js";
import { age, duration, number, stepNumber } from "./format.js";
import { everySecond, gathered, listen } from "./live.js";
import { empty, guarded, keys, shell, statePill } from "./shell.js";

const SHOWN = 200;
const STALE_S = 15;
const POLL_S = 3;

const main = shell("Jobs");
const list = h("div", { class: "card list" });
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Jobs")), list);
keys(() => [...list.querySelectorAll("tr.link")]);

const refresh = gathered(load);
listen((topic) => ["job", "incident", "reset"].includes(topic) && refresh());
let seconds = 0;
everySecond(() => {
  if (seconds++ % POLL_S === 0) load();
  showAges();
});

async function load() {
  await guarded(async () => {
    const [jobs, incidents] = await Promise.all([get("jobs", { limit: SHOWN }), get("incidents", { state: "open", limit: 200 })]);
    if (!jobs.items.length) {
      empty(list, "No job has reported yet.");
      return;
    }
    const open = Map.groupBy ? Map.groupBy(incidents.items, (one) => one.job) : grouped(incidents.items);
    const headings = ["Job", "State", "Step", "Step time", "Loss", "Ranks", "Open incidents", "Last telemetry"];
    const head = h("tr", {}, headings.map((name, n) => h("th", { class: n >= 2 && n <= 5 ? "right" : "" }, name)));
    fill(list, h("table", { class: "jobs" }, h("thead", {}, head), h("tbody", {}, jobs.items.map((job) => row(job, open.get(job.name) ?? [])))));
    showAges();
  });
}

function grouped(incidents) {
  const groups = new Map();
  for (const one of incidents) groups.set(one.job, [...(groups.get(one.job) ?? []), one]);
  return groups;
}

function row(job, incidents) {
  const where = `/jobs/${encodeURIComponent(job.name)}`;
  const worst = ["critical", "warning", "info"].find((severity) => incidents.some((one) => one.severity === severity));
  return h(
    "tr",
    { class: "link", onclick: (event) => !event.target.closest("a") && location.assign(where) },
    h("td", { class: "c-name" }, h("a", { class: "title", href: where }, job.name), h("div", { class: "under break" }, `attempt ${job.attempt}`)),
    h("td", {}, statePill(job.state)),
    h("td", { class: "right", "data-label": "Step" }, stepNumber(job.step)),
    h("td", { class: "right", "data-label": "Step time" }, duration(job.step_time_s)),
    h("td", { class: "right", "data-label": "Loss" }, number(job.loss, 4)),
    h("td", { class: "right nowrap", "data-label": "Ranks" }, `${number(job.ranks_reporting)} / ${number(job.world_size)}`),
    h(
      "td",
      { "data-label": "Open incidents" },
      incidents.length
        ? h("a", { class: `pill ${worst}`, href: `/incidents?job=${encodeURIComponent(job.name)}` }, `${incidents.length} open`)
        : h("span", { class: "faint" }, "none"),
    ),
    h("td", { class: "nowrap", "data-label": "Last telemetry", "data-seen": job.last_seen_unix_ns, "data-state": job.state }),
  );
}

function showAges() {
  for (const cell of list.querySelectorAll("[data-seen]")) {
    const seconds = now() / 1e3 - Number(cell.dataset.seen) / 1e9;
    cell.textContent = `${age(seconds)} ago`;
    cell.closest("tr").classList.toggle("stale", seconds > STALE_S && cell.dataset.state !== "ended");
  }
}
