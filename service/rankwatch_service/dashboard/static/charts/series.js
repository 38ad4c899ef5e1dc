// Reads the metrics of a job for charts.

import { get, getBytes, path } from "../common/api.js";
import { KIND } from "./heat_values.js";

const POINTS = 320;
const MARK = { ABSENT: 0, FINITE: 1, MINUS_INF: 2, INF: 3, NAN: 4 };
const KIND_OF_MARK = [KIND.MISSING, KIND.FINITE, KIND.MINUS_INF, KIND.INF, KIND.NAN];

// The mean over ranks since a step, of one attempt or of all (""): {lines, marks, timeOf}. Each attempt has a line of its
// own, since steps repeat after a rollback; those before the newest are drawn faintly below it, the last of them dashed.
// With `times` the lines are over times in ms, and `timeOf` gives the time of a step; without, it is null.
export async function mean(job, metric, from, { attempt = "", times = false } = {}) {
  const { segments, timeOf } = await segmentsOf(job, metric, from, "mean", attempt, times);
  return { lines: [...earlier(segments, "mean"), ...segments.slice(-1).map((one) => line([one], "mean", { name: "mean", colour: "--accent" }))], marks: marks(segments), timeOf };
}

// Median, 5th to 95th percentile and slowest of the ranks since a step, as `mean`; of earlier attempts only the median.
export async function fan(job, metric, from, { attempt = "", times = false } = {}) {
  const { segments, timeOf } = await segmentsOf(job, metric, from, "fan", attempt, times);
  return { lines: [...earlier(segments, "p50"), ...segments.slice(-1).flatMap((one) => fanOf([one], "slowest").lines)], marks: marks(segments), timeOf };
}

async function segmentsOf(job, metric, from, reduce, attempt, times) {
  const segments = of(attempt, await read(job, metric, from, reduce, { times }));
  if (!times) return { segments, timeOf: null };
  const timed = segments.filter((one) => one.at_unix_ns.length > 0);
  return { segments: timed.map(overTime), timeOf: (step) => timeIn(timed.findLast((one) => one.step[0] <= step) ?? timed[0], step) };
}

// A segment whose places are times.
function overTime(segment) {
  return { ...segment, step: segment.at_unix_ns.map((ns) => ns / 1e6), missing: segment.missing.map((step) => timeIn(segment, step)) };
}

// When a segment made a step, in ms; between two points steps are equally long.
function timeIn(segment, step) {
  if (!segment) return null;
  const { step: steps, at_unix_ns: at } = segment;
  const n = Math.max(0, steps.findLastIndex((one) => one <= step));
  const share = n + 1 < steps.length ? Math.max(0, step - steps[n]) / (steps[n + 1] - steps[n]) : 0;
  return (at[n] + share * ((at[n + 1] ?? at[n]) - at[n])) / 1e6;
}

const of = (attempt, segments) => (attempt ? segments.filter((one) => one.attempt === attempt) : segments);

// Of earlier attempts, the newest first: with more than these, the name at the end of each line tells them apart.
const EARLIER_DASHES = ["dash", "dot", "dashdot", null];

function earlier(segments, name) {
  const looks = (one, age) => ({ name: `attempt ${one.attempt}`, end: one.attempt, colour: "--faint", thin: true, dash: EARLIER_DASHES[age % EARLIER_DASHES.length] });
  return segments.slice(0, -1).map((one, n, all) => line([one], name, looks(one, all.length - 1 - n)));
}

function fanOf(segments, highest) {
  const [low, high] = [line(segments, "p5", {}), line(segments, "p95", {})];
  return {
    lines: [
      { ...high, low: low.low, name: "5–95 %", colour: "--accent", band: true },
      line(segments, "max", { name: highest, colour: "--mark", dash: "dot" }),
      line(segments, "p50", { name: "median", colour: "--accent" }),
    ],
    marks: marks(segments),
  };
}

// Lines of one attempt between two steps: {lines, marks}; no lines if the job does not report the metric. `looks` are
// {name: how it is drawn} by the name of the line, such as mean, p50 or rank:3.
export async function around(job, metric, { attempt, from, to, reduce, ranks = null }, looks) {
  const found = await read(job, metric, from, reduce, { to_step: to, ranks: ranks?.join() });
  const segments = found.filter((one) => one.attempt === attempt);
  if (!segments.length) return { lines: [], marks: marks([]) };
  return { lines: Object.entries(looks).map(([name, look]) => line(segments, name, look)), marks: marks(segments) };
}

async function read(job, metric, from, reduce, more = {}) {
  const found = await get(path("jobs", job, "series"), { metric, reduce, points: POINTS, from_step: from, ...more }).catch(unmeasured);
  return found?.segments ?? [];
}

// A job that does not report this metric has no such series, which is not an error.
function unmeasured(error) {
  if (error.status === 404) return null;
  throw error;
}

// One line through all segments, with gaps between them.
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

// Steps with values that are not finite, by kind, and steps with missing values.
function marks(segments) {
  const found = { nan: [], inf: [], minusInf: [], missing: [] };
  for (const { step, lines, missing } of segments) {
    found.missing.push(...missing);
    step.forEach((one, n) => {
      const mark = Math.max(...lines.map((each) => each.mark[n]));
      if (mark === MARK.NAN) found.nan.push(one);
      else if (mark === MARK.INF) found.inf.push(one);
      else if (mark === MARK.MINUS_INF) found.minusInf.push(one);
    });
  }
  return found;
}

// A counter of a job's devices of a kind since a time, of all or of a list of numbers, as `fan` gives it, at times in ms.
export async function deviceFan(job, kind, counter, fromUnixNs, devices = null) {
  return fanOf(await readDevices(job, { kind, counter, devices, reduce: "fan", from_unix_ns: fromUnixNs }), "highest");
}

// A counter of one GPU beside the median of all of the job, between two times, as `around` gives it.
export async function gpuBesideMedian(job, counter, number, fromUnixNs, toUnixNs) {
  const asked = { kind: "gpu", counter, from_unix_ns: fromUnixNs, to_unix_ns: toUnixNs };
  const [own, all] = await Promise.all([readDevices(job, { ...asked, devices: number, reduce: "none" }), readDevices(job, { ...asked, reduce: "median" })]);
  return { lines: [line(all, "median", { name: "median GPU", colour: "--accent" }), line(own, `device:${number}`, { name: "this GPU", colour: "--critical" })], marks: marks(own) };
}

async function readDevices(job, asked) {
  const found = await get(path("jobs", job, "devices", "series"), { points: POINTS, ...asked }).catch(unmeasured);
  return (found?.segments ?? []).map((one) => ({ lines: one.lines, step: one.at_unix_ns.map((ns) => ns / 1e6), missing: [] }));
}

export async function metricsOf(job) {
  const { items } = await get(path("jobs", job, "metrics"));
  return items;
}

// A grid for HeatMap; null if this job does not report the metric.
export async function grid(job, metric, columns, { from = null, to = null } = {}) {
  const bytes = await getBytes(path("jobs", job, "heatmap.bin"), { metric, columns, from_step: from, to_step: to }).catch(unmeasured);
  const found = bytes && decoded(bytes);
  return found?.steps.length ? found : null;
}

const KIND_OF_CODE = [KIND.MISSING, KIND.NAN, KIND.INF, KIND.MINUS_INF];
const HEADER_BYTES = 24;

// openapi.json describes the layout at this path. Every part is aligned for its type.
function decoded(bytes) {
  const view = new DataView(bytes);
  const [columns, rows, rankCount] = [4, 8, 12].map((at) => view.getUint32(at, true));
  const [scale, levels] = [16, 20].map((at) => view.getFloat32(at, true));
  const cells = rows * columns;
  const steps = Array.from(new Float64Array(bytes, HEADER_BYTES, columns));
  const ranks = Array.from(new Uint32Array(bytes, HEADER_BYTES + 8 * columns, rows));
  const centre = new Float32Array(bytes, HEADER_BYTES + 8 * columns + 4 * rows, columns);
  const lower = new Uint8Array(bytes, HEADER_BYTES + 12 * columns + 4 * rows, cells);
  const upper = new Uint8Array(bytes, HEADER_BYTES + 12 * columns + 4 * rows + cells, cells);
  const values = new Float32Array(cells);
  const kinds = new Uint8Array(cells);
  for (let cell = 0; cell < cells; cell += 1) {
    const code = lower[cell] + 256 * upper[cell];
    kinds[cell] = KIND_OF_CODE[code] ?? KIND.FINITE;
    if (code < KIND_OF_CODE.length) continue;
    const n = code % 2 ? (3 - code) / 2 : (code - 4) / 2;
    values[cell] = centre[cell % columns] + scale * Math.sinh(n / levels);
  }
  return { steps, ranks, rankCount, values, kinds };
}
