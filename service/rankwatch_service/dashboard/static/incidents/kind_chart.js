// The chart that shows an incident of its kind best: the loss with its usual band, the local gradients of the ranks where
// NaN began, fingerprints by replica, ranks of a hang by phase, a slow rank and its GPU beside its peers.

import { OF_TIME } from "../charts/incident_map.js";
import { Chart } from "../charts/line_chart.js";
import { around, gpuBesideMedian, metricsOf } from "../charts/series.js";
import { get, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { KINDS, lastStep, number, words } from "../common/format.js";
import { card, whenChanged } from "../components/shell.js";
import { fingerprints, standing } from "./kind_tables.js";

const BEFORE = 120; // steps
const AFTER = 80;
const LOG_FROM = 8; // a range this many times as high as low is drawn on a logarithmic axis
const BAND_SPREADS = 3;
const PINNED = 4; // ranks with a line of their own
const COLOURS = ["--critical", "--mark", "--warning", "--info"];
const AROUND_NS = 600e9; // of the series of GPUs
const GPU_COUNTERS = ["sm_clock_hz", "temperature_celsius"];
const MEAN = { mean: { name: "mean", colour: "--accent" } };

const CHARTS = {
  level: ofLevel,
  ranks: ofRanks,
  peers: besidePeers,
  fingerprints: async (incident) => ({ name: "Fingerprints by replica", parts: fingerprints(incident.evidence) }),
  phases: async (incident) => (incident.evidence.missing?.length ? { name: "Ranks by collective and phase", parts: standing(incident.evidence) } : null),
};
const chartOf = (incident) => CHARTS[KINDS[incident.kind]?.chart];

// A card that `show(incident, job, events, reasons)` fills; it is hidden for kinds that no chart shows. `events` are
// {step, text}, `reasons` explanations of the incident.
export function kindCard() {
  const holder = h("div", { class: "body kind" });
  const element = card("Around the onset", holder, { hint: h("span") });
  element.hidden = true;
  let begun = false;
  const draw = whenChanged(async (incident, upTo, events, reasons) => {
    const found = await chartOf(incident)(incident, { from: Math.max(0, onset(incident) - BEFORE), to: upTo, events, reasons }).catch(refused);
    element.hidden = !found;
    if (!found) return;
    element.querySelector("h2").textContent = found.name;
    element.querySelector(".hint").textContent = found.hint ?? "";
    fill(holder, found.parts);
    for (const one of found.charts ?? []) place(holder, one);
  });
  return {
    element,
    show(incident, job, events, reasons) {
      if (!chartOf(incident)) return;
      if (!begun) element.hidden = false; // what follows must not move when the chart comes
      begun = true;
      const end = Math.max(incident.detected_step ?? 0, onset(incident)) + AFTER;
      draw(incident, Math.min(end, Math.max(job?.step ?? end, onset(incident) + 1)), events, reasons);
    },
  };
}

function place(holder, { metric, label, lines, marks, events = [], log = false, times = false, troubled = [] }) {
  const box = h("div");
  holder.append(label ? h("h3", { class: "sub" }, label) : "", box);
  new Chart(box, { metric, label: label || words(metric), times }).show(lines, marks, troubled, { events, log });
}

// Without its data the page does without the chart; errors of the page are not hidden.
function refused(error) {
  if (error.status === undefined) throw error;
  return null;
}

// Which colour is whose line.
function legend(ranks) {
  return h("p", { class: "legend" }, h("i"), "median of all ranks", ranks.map((rank, n) => [h("i", { class: `pin${n}` }), `rank ${rank}`]));
}

const onset = (incident) => incident.onset_step ?? incident.consequences.find((one) => Number.isInteger(one.step))?.step ?? 0;
const within = (events, from, to) => events.filter((one) => one.step >= from && one.step <= to);
const trouble = (incident, to) => [{ from: onset(incident), to: Math.min(lastStep(incident) ?? to, to), severity: incident.severity }];

// The metric, the band in which it usually is, and the value that it had to reach.
async function ofLevel(incident, { from, to, events, reasons }) {
  const { metric = "loss", usual, scale } = incident.evidence;
  const { lines, marks } = await around(incident.job, metric, { attempt: incident.attempt, from, to, reduce: "mean" }, MEAN);
  if (!lines.length) return null;
  const ends = { steps: [from, to], level: true };
  const even = (value) => [value, value];
  const usually = typeof usual === "number" && typeof scale === "number" && { ...ends, name: "usual", low: even(usual - BAND_SPREADS * scale), high: even(usual + BAND_SPREADS * scale), colour: "--good", band: true };
  const limit = threshold(incident, reasons);
  const bound = limit !== null && { ...ends, name: "threshold", low: even(limit), high: even(limit), colour: "--mark", dash: "dash" };
  const all = [usually, bound, ...lines].filter(Boolean);
  const lows = all.flatMap((one) => one.low).filter(Number.isFinite);
  const log = Math.min(...lows) > 0 && Math.max(...all.flatMap((one) => one.high).filter(Number.isFinite)) > LOG_FROM * Math.min(...lows);
  const hint = [usually && `green: usual ± ${BAND_SPREADS} spreads`, bound && "dashed: threshold", log && "logarithmic"].filter(Boolean).join(" · ");
  return { name: `${words(metric)} around the onset`, hint, charts: [{ metric, lines: all, marks, events: within(events, from, to), log, troubled: trouble(incident, to) }] };
}

// The value that the metric had to reach, if one value decided; null if several did.
function threshold(incident, reasons) {
  const { usual, scale } = incident.evidence;
  const one = reasons.find((each) => each.statistic === "sigmas_from_level");
  if (one && typeof usual === "number") return usual + one.points.threshold.at(-1) * scale;
  return reasons.flatMap((each) => (each.unit === "value" ? each.earlier : [])).find((each) => each.needed !== null)?.needed ?? null;
}

// The local gradients of the ranks where it began, and the parameter.
async function ofRanks(incident, { from, to, events }) {
  const pinned = incident.ranks.slice(0, PINNED);
  const metric = pinned.length && (await metricsOf(incident.job)).includes("local_grad_norm") ? "local_grad_norm" : "grad_norm";
  const [peers, own] = await Promise.all([
    around(incident.job, metric, { attempt: incident.attempt, from, to, reduce: "median" }, { median: { name: "median of all ranks", colour: "--accent" } }),
    pinned.length ? around(incident.job, metric, { attempt: incident.attempt, from, to, reduce: "none", ranks: pinned }, pins(pinned)) : { lines: [], marks: null },
  ]);
  const { parameter, nonfinite_gradients: many, ranks_affected: ranks } = incident.evidence;
  const parts = parameter && h("p", { class: "finding" }, "First in parameter ", h("b", { class: "mono break" }, parameter), many > 0 && `, in ${number(many)} gradients`, ranks > 0 && `; ${number(ranks)} ranks are affected now`, ".");
  return { name: `${words(metric)} around the onset`, hint: "× NaN · ▲ Inf", parts: [parts, legend(pinned)], charts: [{ metric, lines: [...peers.lines, ...own.lines], marks: own.marks ?? peers.marks, events: within(events, from, to), troubled: trouble(incident, to) }] };
}

const pins = (ranks) => Object.fromEntries(ranks.map((rank, n) => [`rank:${rank}`, { name: `rank ${rank}`, colour: COLOURS[n] }]));

// The slow ranks and their GPU, each beside its peers.
async function besidePeers(incident, { from, to, events }) {
  const slow = incident.ranks.slice(0, PINNED);
  const known = await metricsOf(incident.job);
  const metric = OF_TIME.find((one) => known.includes(one));
  if (!metric || !slow.length) return null;
  const asked = { attempt: incident.attempt, from, to };
  const [peers, own, gpus] = await Promise.all([
    around(incident.job, metric, { ...asked, reduce: "fan" }, { p50: { name: "median of all ranks", colour: "--accent" } }),
    around(incident.job, metric, { ...asked, reduce: "none", ranks: slow }, pins(slow)),
    gpuCharts(incident),
  ]);
  const lines = [...peers.lines, ...own.lines];
  if (!lines.length) return null;
  return { name: `${words(metric)}: ${slow.length === 1 ? "the rank" : "the ranks"} beside all`, parts: legend(slow), charts: [{ metric, lines, marks: own.marks, events: within(events, from, to), troubled: trouble(incident, to) }, ...gpus] };
}

async function gpuCharts(incident) {
  const [uuid] = incident.devices;
  if (!uuid) return [];
  const { items } = await get(path("jobs", incident.job, "devices"), { kind: "gpu", host: incident.hosts[0], limit: 64 }).catch(() => ({ items: [] }));
  const gpu = items.find((one) => one.uuid === uuid);
  if (!gpu) return [];
  const counters = GPU_COUNTERS.filter((one) => one in gpu.counters);
  const ends = [incident.onset_unix_ns - AROUND_NS, Math.max(incident.detected_unix_ns, incident.onset_unix_ns) + AROUND_NS].map(Math.round);
  const found = await Promise.all(counters.map((counter) => gpuBesideMedian(incident.job, counter, gpu.number, ...ends)));
  const troubled = [{ from: incident.onset_unix_ns / 1e6, to: (incident.resolved_unix_ns ?? ends[1]) / 1e6, severity: incident.severity }];
  return found.map((one, n) => ({ ...one, metric: counters[n], label: `${words(counters[n])} of ${uuid} beside the median GPU`, times: true, troubled }));
}
