// A job's measured values, as charts take them.

import { get, path } from "./api.js";
import { KIND } from "./heatmap.js";

const POINTS = 320;
const MARK = { ABSENT: 0, FINITE: 1, MINUS_INF: 2, INF: 3, NAN: 4 };
const KIND_OF_MARK = [KIND.MISSING, KIND.FINITE, KIND.MINUS_INF, KIND.INF, KIND.NAN];

// The mean over ranks, from a step on: {lines, marks}.
export async function mean(job, metric, from) {
  const segments = await read(job, metric, from, "mean");
  return { lines: [line(segments, "mean", { name: "mean", colour: "--accent" })], marks: marks(segments) };
}

// Median, 5th to 95th percentile and slowest of the ranks, from a step on: {lines, marks}.
export async function fan(job, metric, from) {
  const segments = await read(job, metric, from, "fan");
  const [low, high] = [line(segments, "p5", {}), line(segments, "p95", {})];
  return {
    lines: [
      { ...high, low: low.low, name: "5–95 %", colour: "--accent", band: true },
      line(segments, "max", { name: "slowest", colour: "--mark", dash: "dot" }),
      line(segments, "p50", { name: "median", colour: "--accent" }),
    ],
    marks: marks(segments),
  };
}

async function read(job, metric, from, reduce) {
  const found = await get(path("jobs", job, "series"), { metric, reduce, points: POINTS, from_step: from }).catch(unmeasured);
  return found?.segments ?? [];
}

// A job that does not measure this has no such series; that is no fault of the page.
function unmeasured(error) {
  if (error.status === 404) return null;
  throw error;
}

// One line through all attempts, interrupted between them. Steps repeat where training went back.
function line(segments, name, looks) {
  const joined = { steps: [], low: [], high: [] };
  for (const segment of segments) {
    const one = segment.lines.find((each) => each.name === name);
    if (joined.steps.length) push(joined, segment.step[0], null, null);
    segment.step.forEach((step, n) => push(joined, step, finite(one.low[n]), finite(one.high[n])));
  }
  const thin = joined.low.every((value, n) => value === joined.high[n]);
  return { ...looks, ...joined, low: thin ? joined.high : joined.low };
}

function push(joined, step, low, high) {
  joined.steps.push(step);
  joined.low.push(low);
  joined.high.push(high);
}

const finite = (value) => (Number.isFinite(value) ? value : null);

// Steps at which something is not a number, by what it is; and the gaps of the segment where nothing was measured.
function marks(segments) {
  const found = { nan: [], inf: [], minusInf: [], missing: [] };
  for (const { step, lines } of segments) {
    const usual = step.length > 1 ? Math.max(1, Math.min(...step.slice(1).map((one, n) => one - step[n]))) : 1;
    step.forEach((one, n) => {
      const mark = Math.max(...lines.map((each) => each.mark[n]));
      if (mark === MARK.NAN) found.nan.push(one);
      else if (mark === MARK.INF) found.inf.push(one);
      else if (mark === MARK.MINUS_INF) found.minusInf.push(one);
      else if (mark === MARK.ABSENT) found.missing.push(one);
      if (n && one - step[n - 1] > usual) found.missing.push(step[n - 1] + usual);
    });
  }
  return found;
}

export async function metricsOf(job) {
  const { items } = await get(path("jobs", job, "metrics"));
  return items;
}

// A grid for HeatMap; null where this job does not measure the metric.
export async function grid(job, metric, columns, { from = null, to = null } = {}) {
  const found = await get(path("jobs", job, "heatmap"), { metric, columns, from_step: from, to_step: to }).catch(unmeasured);
  if (!found?.step.length) return null;
  const values = Float32Array.from(found.high.flat(), (value) => finite(value) ?? 0);
  const kinds = Uint8Array.from(found.mark.flat(), (mark) => KIND_OF_MARK[mark]);
  return { steps: found.step, ranks: found.high.map((_, rank) => rank), values, kinds };
}
