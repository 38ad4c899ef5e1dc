// Ranges, round ticks and their labels, for values with a unit, for steps and for times in ms.

import { number } from "../common/format.js";

// Units by the end of the metric's name: [name, size, from which highest value on it is used].
const SI = (unit) => [["", 1], ["k", 1e3], ["M", 1e6], ["G", 1e9], ["T", 1e12]].map(([prefix, size]) => [prefix + unit, size, size]);
const UNITS = [
  [/_bytes_per_s$/, SI("B/s")],
  [/_bits_per_s$/, SI("bit/s")],
  [/_per_s$/, [["/s", 1, 0]]],
  [/_s$/, [["µs", 1e-6, 0], ["ms", 1e-3, 1e-3], ["s", 1, 1], ["min", 60, 180], ["h", 3600, 7200]]],
  [/_bytes$/, SI("B")],
  [/_hz$/, SI("Hz")],
  [/_w$/, [["W", 1, 0]]],
  [/_celsius$/, [["°C", 1, 0]]],
];
const PLAIN = [["", 1, 0]];
const FRINGE = 0.06; // of the y range, kept free above and below for marks on the frame
const S = 1000;
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400, 172_800, 604_800].map((seconds) => seconds * S);
const DAY = 86_400 * S;

// The range of nearly all values. Values slightly beyond it extend it; a spike far beyond it is marked by an arrow, and
// does not flatten the rest.
export function robustRange(lines) {
  const lows = lines.flatMap(({ low }) => low).filter(Number.isFinite).sort((a, b) => a - b);
  const highs = lines.flatMap(({ high }) => high).filter(Number.isFinite).sort((a, b) => a - b);
  if (!lows.length) return [0, 1];
  const usual = [lows[Math.floor((lows.length - 1) * 0.01)], highs[Math.ceil((highs.length - 1) * 0.99)]];
  const span = usual[1] - usual[0] || Math.abs(usual[1]) * 0.1 || 1;
  const low = lows[0] > usual[0] - span ? lows[0] : usual[0];
  const high = highs.at(-1) < usual[1] + span ? highs.at(-1) : usual[1];
  return [low - span * FRINGE, high + span * FRINGE];
}

// From the lowest to the highest value, with some room, on a logarithmic axis.
export function extent(lines) {
  const low = Math.min(...lines.flatMap((one) => one.low).filter(Number.isFinite));
  const high = Math.max(...lines.flatMap((one) => one.high).filter(Number.isFinite));
  const room = (high / low) ** FRINGE || 1;
  return high > low ? [low / room, high * room] : [low * 0.9, high * 1.1];
}

// [value, label] of about `count` round ticks within a range, in the metric's unit.
export function valueTicks(metric, [low, high], count, log) {
  const units = UNITS.find(([name]) => name.test(metric))?.[1] ?? PLAIN;
  const top = Math.max(Math.abs(low), Math.abs(high));
  const [unit, size] = units.findLast(([, , from]) => top >= from) ?? units[0];
  const ticks = log ? logTicks(low / size, high / size, count) : fewTicks(low / size, high / size, count);
  return ticks.map(([value, digits]) => [value * size, `${decimal(value, digits)}${unit && ` ${unit}`}`]);
}

// Ticks at whole steps.
export function stepTicks([low, high], count) {
  const found = fewTicks(low, high, count).filter(([value]) => Number.isInteger(value));
  return found.map(([value]) => [value, number(value)]);
}

// Ticks at round times of the local zone.
export function timeTicks([low, high], count) {
  const every = TIMES.find((one) => (high - low) / one <= count) ?? TIMES.at(-1);
  const ahead = -new Date(low).getTimezoneOffset() * 60 * S;
  const ticks = [];
  for (let at = Math.ceil((low + ahead) / every) * every - ahead; at <= high; at += every) ticks.push([at, timeLabel(at, every)]);
  return ticks;
}

export function timeLabel(at, every = S) {
  const [date, time] = [new Date(at), { hour: "2-digit", minute: "2-digit", hourCycle: "h23" }];
  if (every >= DAY) return date.toLocaleDateString("en-CA").slice(5);
  return date.toLocaleTimeString("en-GB", every < 60 * S ? { ...time, second: "2-digit" } : time);
}

// At least two ticks, even where `count` leaves room for one: one alone gives no scale.
function fewTicks(low, high, count) {
  const ticks = roundTicks(low, high, count);
  return ticks.length < 2 ? roundTicks(low, high, 2 * count) : ticks;
}

// [value, digits after the point]
function roundTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  if (!(rough > 0) || !Number.isFinite(rough)) return [];
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = power * [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
  const digits = Math.max(0, -Math.floor(Math.log10(every) + 1e-9));
  const [first, last] = [Math.ceil(low / every - 1e-9), Math.floor(high / every + 1e-9)];
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, n) => [Number(((first + n) * every).toPrecision(12)), digits]);
}

// Powers of ten and, where there is room, 2 and 5 times these; round ticks where a range is too small for them.
function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const every = Math.max(1, Math.ceil((last - first) / count));
  const within = (factors) => {
    const ticks = [];
    for (let power = first; power <= last; power += every) for (const one of factors) ticks.push([Number(`${one}e${power}`), Math.max(0, -power)]);
    return ticks.filter(([value]) => value >= low && value <= high);
  };
  const [fine, coarse] = [within([1, 2, 5]), within([1])];
  if (every === 1 && fine.length >= 2 && fine.length <= count * 1.5) return fine;
  return coarse.length >= 2 ? coarse : roundTicks(low, high, count);
}

function decimal(value, digits) {
  if (value !== 0 && (Math.abs(value) >= 1e7 || digits > 6)) return number(value, 3);
  return value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits }).replace("-", "−");
}
