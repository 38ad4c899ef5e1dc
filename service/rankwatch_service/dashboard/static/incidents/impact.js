// The strip of an incident: where, since when, what it costs, and how much of the usual work is still done; below it
// whether it is real, how bad it is and what changed, in words.

import { now } from "../common/api.js";
import { h } from "../common/dom.js";
import { clock, interval, kindName, measured, moment, number, rankList } from "../common/format.js";
import { against, label, sorted } from "../components/evidence.js";
import { tile } from "../components/shell.js";

const SPOILS = ["nonfinite", "corruption", "loss_divergence"]; // devices work, but what they compute is worthless

// An incident in one line, without a figure that changes.
export function title(incident) {
  const hosts = incident.hosts.length > 1 ? `${number(incident.hosts.length)} hosts` : incident.hosts[0];
  const what = isEvent(incident) ? (incident.evidence.requested ? "Ended on request" : "Finished before the others") : kindName(incident.kind);
  return `${what}: ${rankList(incident.ranks, 4)}${hosts ? ` on ${hosts}` : ""}`;
}

// Ranks that ended as they were asked to, or were done: nothing is wrong, and so there is no confidence that it is.
const isEvent = (incident) => incident.kind === "rank_lost" && incident.severity === "info";

// What the ranks of a job occupy, by its field `accelerated`: devices, else only themselves.
export const unit = (accelerated) => (accelerated ? { many: "GPUs", hours: "GPU-h" } : { many: "ranks", hours: "rank-h" });

export function tiles(incident, job, placed) {
  const { many, hours } = unit(incident.accelerated);
  const rate = incident.impact_gpu_hours_per_hour;
  const all = job?.world_size ?? 0;
  const resolved = incident.state === "resolved";
  const known = rate > 0 || !resolved;
  const lost = SPOILS.includes(incident.kind) ? `${many} wasted` : `${many} idle`;
  const hosts = incident.hosts.slice(0, 2).map((one, n) => [n > 0 && ", ", h("a", { href: `/hosts/${encodeURIComponent(one)}` }, one)]);
  const scope = incident.scope === "job" ? all > 0 && `${number(all)} ranks` : incident.scope.replace(":", " ");
  const devices = placed.map((one) => one.device_uuid).filter(Boolean);
  return [
    tile("Where", rankList(incident.ranks, 4), [incident.scope.startsWith("switch:") || !hosts.length ? (incident.evidence.host ?? scope) : hosts, (devices[0] ?? incident.devices[0]) && ` · ${devices[0] ?? incident.devices[0]}`]),
    tile(resolved ? "Lasted" : "Since", h("span", { "data-since": incident.onset_unix_ns, "data-until": incident.resolved_unix_ns }), h("span", { title: moment(incident.onset_unix_ns) }, `${incident.onset_step === null ? "" : `step ${number(incident.onset_step)} · `}${clock(incident.onset_unix_ns)}`)),
    tile(capital(lost), rate > 0 ? [number(rate, 3), h("small", {}, ` of ${number(all)}`)] : known ? "none" : "–", rate > 0 ? (resolved ? "while it lasted" : "now") : resolved ? "it is over" : "no cost known"),
    tile(resolved ? "Lost in all" : "Lost so far", rate > 0 ? [h("span", { "data-lost": rate, "data-from": incident.onset_unix_ns, "data-to": incident.resolved_unix_ns }), h("small", {}, ` ${hours}`)] : "–", rate > 0 ? "at this rate since the onset" : "no cost known"),
    tile("Goodput", all && known ? [number(Math.max(0, 100 * (1 - rate / all)), 2), h("small", {}, " % of usual")] : "–", resolved ? "while it lasted" : "now"),
    isEvent(incident) ? tile("Is it real?", "–", "not a fault") : tile("Is it real?", capital(incident.confidence_words), `found ${foundAfter(incident)}`),
  ];
}

// What is normal and how it is instead, what the incident does to its job, and what changed shortly before it.
export function answers(incident) {
  return [
    ["Normal", `${capital(incident.normal)}${figures(incident.evidence)}.`],
    ["Impact", `${capital(incident.impact)}.`],
    ["Likely cause", `${capital(incident.cause_words)}.`],
    ["Changed before", `${capital(incident.changed)}.`],
  ].map(([name, text]) => h("div", {}, h("dt", {}, name), h("dd", { class: "break" }, text)));
}

// The first measured value that has a baseline, beside it.
function figures(evidence) {
  const [one] = sorted(evidence).compared;
  return one ? ` (${label(one.name).toLowerCase()} ${measured(one.name, one.value)}, ${against(one)})` : "";
}

// Brings what grows with time up to date.
export function showLost(holder) {
  for (const cell of holder.querySelectorAll("[data-lost]")) {
    const until = Number(cell.dataset.to) || now() * 1e6;
    cell.textContent = number((Number(cell.dataset.lost) * (until - Number(cell.dataset.from))) / 3600e9, 2);
  }
}

// By time, or by steps where the evidence does not say at which time between them it began.
function foundAfter({ onset_unix_ns: onset, detected_unix_ns: detected, onset_step: first, detected_step: step }) {
  const seconds = (detected - onset) / 1e9;
  if (seconds >= 1e-3) return `after ${interval(seconds)}`;
  return step !== null && first !== null && step > first ? `in step ${number(step)}` : "at once";
}

const capital = (text) => text.charAt(0).toUpperCase() + text.slice(1);
