// The table of incidents, one line for each. Sorted by urgency, those that nobody has acknowledged stand above the rest.

import { now } from "../common/api.js";
import { h, withCode } from "../common/dom.js";
import { age, kindName, moment, number, rankList } from "../common/format.js";
import { incidentPill, severityPill } from "../components/shell.js";

const COST = "Cost";
const COLUMNS = ["Severity", "Incident", "Job", "Where", "Since", COST, "State", "Id"];
const RIGHT = ["Since", COST];
const ROOMY = 12; // up to so many rows have their whole sentence, and what to do first
const SECTIONS = { acknowledged: "Acknowledged", resolved: "Resolved" };

// `parted`: a heading stands between open, acknowledged and resolved ones, which the list has in this order. `fresh` says
// whether an incident has just come, `many` what the ranks of their jobs occupy.
export function incidentTable(incidents, parted, fresh, many) {
  const heads = COLUMNS.map((name) => h("th", { scope: "col", class: RIGHT.includes(name) ? "right" : "" }, name === COST ? `${many} lost` : name));
  const body = incidents.map((one, n) => [parted && one.state !== incidents[n - 1]?.state && heading(one.state, incidents), row(one, fresh(one), many)]);
  return h("table", { class: incidents.length <= ROOMY ? "incidents roomy" : "incidents" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, body));
}

function heading(state, incidents) {
  if (!SECTIONS[state]) return null;
  const many = incidents.filter((one) => one.state === state).length;
  return h("tr", { class: "section" }, h("th", { scope: "rowgroup", colSpan: COLUMNS.length }, `${SECTIONS[state]} · ${number(many)}`));
}

function row(incident, isFresh, many) {
  const where = `/incidents/${encodeURIComponent(incident.id)}`;
  const cost = incident.state === "resolved" ? 0 : incident.impact_gpu_hours_per_hour; // what is over costs nothing now
  const hosts = incident.hosts.length > 1 ? `${number(incident.hosts.length)} hosts` : incident.hosts[0];
  return h(
    "tr",
    { class: `link ${isFresh ? "fresh" : ""}`, "data-id": incident.id, onclick: (event) => !event.target.closest("a") && location.assign(where) },
    h("td", { class: "c-severity" }, severityPill(incident.severity)),
    h("td", { class: "c-what", title: incident.summary }, h("a", { class: "title", href: where }, kindName(incident.kind)), " ", h("span", { class: "sentence" }, incident.summary), incident.state !== "resolved" && h("div", { class: "first-step muted" }, withCode(incident.first_step))),
    h("td", { class: "c-job", title: incident.job }, incident.job),
    h("td", { class: "c-where", title: incident.hosts.join(", ") }, rankList(incident.ranks, 2), hosts && h("span", { class: "muted" }, ` · ${hosts}`)),
    h("td", { class: "c-since right", title: moment(incident.onset_unix_ns), "data-since": incident.onset_unix_ns, "data-until": incident.resolved_unix_ns }),
    h("td", { class: "c-cost right", "data-label": `${many} lost` }, cost > 0 ? number(cost, 2) : "–"),
    h("td", { class: "c-state", title: incident.acknowledged_by }, incident.acknowledged_by && incident.state === "acknowledged" ? incident.acknowledged_by : incidentPill(incident)),
    h("td", { class: "c-id mono" }, incident.short_id),
  );
}

// Writes how long each incident lasts; `over` stands before how long one that is resolved has lasted.
export function showAges(holder, over = "") {
  for (const cell of holder.querySelectorAll("[data-since]")) {
    const until = Number(cell.dataset.until);
    const seconds = ((until || now() * 1e6) - Number(cell.dataset.since)) / 1e9;
    cell.textContent = until ? `${over}${age(seconds)}` : age(seconds);
  }
}

const SEVERITIES = ["info", "warning", "critical"];
const KEYS = {
  urgency: (one) => [one.state === "resolved" ? 0 : (one.state === "open" ? 4 : 1) + SEVERITIES.indexOf(one.severity), one.onset_unix_ns],
  newest: (one) => [one.onset_unix_ns],
  oldest: (one) => [-one.onset_unix_ns],
  updated: (one) => [one.updated_unix_ns],
  cost: (one) => [one.impact_gpu_hours_per_hour, one.onset_unix_ns],
};
export const ORDERS = { urgency: "Most urgent", newest: "Newest", oldest: "Oldest", updated: "Last changed", cost: "Most expensive" };

// The order of the service, for incidents that came one by one.
export function inOrder(incidents, order) {
  const keys = (one) => [...KEYS[order](one), one.id];
  return incidents.toSorted((a, b) => {
    const [left, right] = [keys(a), keys(b)];
    const n = left.findIndex((key, place) => key !== right[place]);
    return n < 0 ? 0 : left[n] < right[n] ? 1 : -1;
  });
}
