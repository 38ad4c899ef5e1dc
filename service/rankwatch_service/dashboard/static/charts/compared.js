// One metric of attempts and jobs in one chart: each job has a colour, earlier attempts are thin, and lines can be
// smoothed. What they differ by at the last step that all have is said in words.

import { number } from "../common/format.js";
import { mean } from "./series.js";

const COLOURS = ["--accent", "--mark", "--good", "--critical", "--info"];
export const JOBS_MAX = COLOURS.length;

// `names` are jobs, the first of them the page's own, which is read since step `from`; `numbers` are those of its
// attempts, by their ids. `smooth` is a number of points.
export async function compared(names, metric, from, { attempt, times, smooth, numbers }) {
  const found = await Promise.all(names.map((name, n) => mean(name, metric, n ? null : from, { attempt: n ? "" : attempt, times })));
  const shown = attempt || [...numbers.keys()][0]; // the newest comes first
  const called = (n, id) => [names.length > 1 && names[n], id ? `attempt ${(n === 0 && numbers.get(id)) || id}` : n > 0 && "newest attempt"].filter(Boolean).join(", ");
  const lines = found.flatMap((one, n) => one.lines.map((line, at, { length }) => ({ ...line, name: called(n, line.end ?? (n === 0 ? shown : "")), end: at === length - 1 && names.length > 1 ? names[n] : line.end, colour: COLOURS[n], own: n === 0 && at === length - 1 })));
  return { lines: lines.map((line) => smoothed(line, smooth)), marks: found[0].marks, words: times ? "" : difference(lines) };
}

// The mean of the last points; points without a value stay gaps.
function smoothed(line, points) {
  if (points < 2) return line;
  const last = [];
  const values = line.high.map((high, n) => {
    if (high === null) return null;
    last.push((high + line.low[n]) / 2);
    if (last.length > points) last.shift();
    return last.reduce((sum, one) => sum + one, 0) / last.length;
  });
  return { ...line, low: values, high: values };
}

// The values of all lines at the last step that all of them have; empty if there is none, or one line.
function difference(lines) {
  const full = lines.map((line) => ({ ...line, first: line.steps[line.high.findIndex((one) => one !== null)], last: line.steps[line.high.findLastIndex((one) => one !== null)] }));
  const at = Math.min(...full.map((one) => one.last));
  const own = full.find((one) => one.own);
  if (full.length < 2 || !own || full.some((one) => !(one.first <= at))) return "";
  const base = valueAt(own, at);
  const others = full.filter((one) => one !== own).map((one) => `${one.name} ${number(valueAt(one, at), 4)} (${against(valueAt(one, at), base)})`);
  return `At step ${number(at)}: ${own.name} ${number(base, 4)}; ${others.join("; ")}.`;
}

function against(value, base) {
  if (value === base) return "equal";
  if (!base) return `${number(value - base, 3)} more`;
  return `${number(Math.abs((value - base) / base) * 100, 2)} % ${value > base ? "higher" : "lower"}`;
}

function valueAt({ steps, low, high }, at) {
  const n = steps.findLastIndex((step, place) => step <= at && high[place] !== null);
  return (low[n] + high[n]) / 2;
}
