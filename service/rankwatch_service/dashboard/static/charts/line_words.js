// What a line chart shows, in words: for its label, which screen readers read, and for tooltips.

import { measured, number } from "../common/format.js";
import { timeLabel } from "./scales.js";

export const MARK_NAMES = { nan: "NaN", inf: "Inf", minusInf: "−Inf", missing: "not measured" };
const PLACES_TOLD = 3;

export const placeName = (at, times) => (times ? timeLabel(at) : `step ${number(Math.round(at))}`);

// A value, or the lowest and the highest; empty if there is none.
export function span(metric, low, high) {
  if (low === null || high === null) return "";
  const [a, b] = [measured(metric, low), measured(metric, high)];
  return a === b ? a : `${a} to ${b}`;
}

export function inWords(label, metric, times, { lines, marks, incidents, events }) {
  const at = (place) => placeName(place, times);
  const places = lines.flatMap((one) => one.steps);
  if (!places.length) return `${label}. No data in this range.`;
  const told = (steps) => `${steps.slice(0, PLACES_TOLD).map(at).join(", ")}${steps.length > PLACES_TOLD ? ` and ${steps.length - PLACES_TOLD} more` : ""}`;
  return [
    `${label}. From ${at(Math.min(...places))} to ${at(Math.max(...places))}`,
    ...lines.map((one) => lineInWords(metric, one)).filter(Boolean),
    ...Object.entries(MARK_NAMES).filter(([kind]) => marks[kind].length).map(([kind, name]) => `${name} at ${told(marks[kind])}`),
    ...incidents.slice(0, PLACES_TOLD).map(({ from, severity }) => `${severity ?? ""} incident from ${at(from)}`.trim()),
    ...events.slice(-PLACES_TOLD).map(({ step, text }) => `${text} at ${at(step)}`),
  ].join(". ").concat(".");
}

function lineInWords(metric, { name, low, high, dash }) {
  const values = (dash ? high : [...low, ...high]).filter(Number.isFinite);
  if (!values.length) return "";
  const last = high.findLast(Number.isFinite);
  const [least, most] = [Math.min(...values), Math.max(...values)].map((value) => measured(metric, value));
  return least === most ? `${name}: ${least}` : `${name}: ${measured(metric, last)} at the end, between ${least} and ${most}`;
}
