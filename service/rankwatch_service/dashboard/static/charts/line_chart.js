// Line charts by plotly.js. Each point covers a range of steps with its lowest and highest value, so that no spike is
// averaged away. Values that are not finite are marked on the frame: × NaN, ▲ Inf, ▼ −Inf, ○ not measured.

import { h } from "../common/dom.js";
import { measured } from "../common/format.js";

const assets = new URL("..", import.meta.url).href;
const SEVERITY = { critical: "#e5342b", warning: "#e8890c", info: "#3a86d8" };
// Units of the y axis by the end of the metric's name, with SI prefixes where these are usual.
const UNITS = [
  [/_bytes_per_s$/, "B/s", "~s"],
  [/_bits_per_s$/, "bit/s", "~s"],
  [/_per_s$/, "/s", "~g"],
  [/_s$/, "s", "~s"],
  [/_bytes$/, "B", "~s"],
  [/_hz$/, "Hz", "~s"],
  [/_w$/, " W", "~g"],
  [/_celsius$/, " °C", "~g"],
];
const FRINGE = 0.06; // of the y range, kept free above and below for marks on the frame
let loading = null;

// Resolves when charts can be drawn.
export function plotly() {
  loading ??= new Promise((resolve, reject) => {
    const script = h("script", { src: `${assets}plotly.min.js`, async: true });
    script.addEventListener("load", () => resolve(window.Plotly));
    script.addEventListener("error", () => reject(new Error("plotly.js could not be loaded")));
    document.head.append(script);
  });
  return loading;
}

export class Chart {
  // `metric` gives the unit; `label` says what it shows. With `times`, what is called a step below is a time in ms.
  constructor(holder, { metric, label, times = false }) {
    this.metric = metric;
    this.place = times ? { axis: { type: "date", nticks: 6, tickformat: "%H:%M:%S", hoverformat: "%H:%M:%S" }, text: "%{x|%H:%M:%S}" } : { axis: { nticks: 6, tickformat: ",d", hoverformat: ",d" }, text: "step %{x}" };
    this.box = h("div", { class: "chart", role: "img", "aria-label": label });
    holder.append(this.box);
    addEventListener("themechange", () => this.last && this.show(...this.last));
  }

  // `lines` are {name, steps, low, high, colour, band, dash}: between low and high it is filled. `marks` are steps by
  // kind {nan, inf, minusInf, missing}; `incidents` and `attempts` are drawn on the step axis, and so are `events`
  // {step, text}. `log`: a logarithmic axis, for lines whose values are all positive.
  async show(lines, marks, incidents = [], attempts = [], { events = [], log = false } = {}) {
    this.last = [lines, marks, incidents, attempts, { events, log }];
    const Plotly = await plotly();
    const style = getComputedStyle(this.box);
    const ink = (name) => style.getPropertyValue(name).trim();
    const range = log ? extent(lines) : robustRange(lines);
    const traces = [...lines.flatMap((line) => this.#line(line, ink)), ...this.#marks(marks, range, ink), ...this.#offScale(lines, range, ink)];
    await Plotly.react(this.box, traces, this.#layout({ range, log, events }, shapes(incidents, [...attempts, ...events.map((one) => one.step)], ink), !hasValues(lines, marks), ink, style), { responsive: true, displayModeBar: false, doubleClick: "reset" });
  }

  // The area between low and high, and an invisible line for the tooltip. A dashed line follows the highest values.
  #line({ name, steps, low, high, colour, band, dash }, ink) {
    const stroke = ink(colour);
    const shape = outlined(steps, low, high);
    const hover = { x: steps, y: high, name, type: "scatter", mode: "lines", connectgaps: false, line: { width: 0, color: stroke }, hovertemplate: `${name} %{customdata}<extra></extra>`, customdata: high.map((value, n) => this.#span(low[n], value)) };
    if (low === high || dash) return [{ ...hover, line: { width: dash ? 1.2 : 1.6, color: stroke, dash: dash ?? "solid" } }];
    return [{ ...shape, type: "scatter", mode: "lines", fill: "toself", hoverinfo: "skip", fillcolor: faded(stroke, band ? 0.18 : 0.35), line: { width: band ? 0 : 1, color: stroke } }, hover];
  }

  #formatted(value) {
    return value === null ? "" : measured(this.metric, value);
  }

  #span(low, high) {
    if (low === null || high === null) return "";
    const [a, b] = [this.#formatted(low), this.#formatted(high)];
    return a === b ? a : `${a} to ${b}`;
  }

  #marks(marks, [low, high], ink) {
    const mark = (name, steps, y, symbol, colour, size) => ({
      x: steps, y: steps.map(() => y), type: "scatter", mode: "markers", cliponaxis: false, hovertemplate: `${name} at ${this.place.text}<extra></extra>`,
      marker: { symbol, size, color: colour, line: { width: symbol.includes("thin") || symbol.includes("open") ? 2 : 0, color: colour } },
    });
    return [
      mark("NaN", marks.nan, low, "x-thin-open", ink("--critical"), 9),
      mark("Inf", marks.inf, high, "triangle-up", ink("--critical"), 9),
      mark("−Inf", marks.minusInf, low, "triangle-down", ink("--critical"), 9),
      mark("not measured", marks.missing, low, "circle-open", ink("--faint"), 5),
    ].filter((trace) => trace.x.length);
  }

  // Values outside of the robust range are marked by arrows on the frame.
  #offScale(lines, [low, high], ink) {
    const above = lines.flatMap(({ steps, high: values }) => steps.filter((_, n) => values[n] !== null && values[n] > high));
    const below = lines.flatMap(({ steps, low: values }) => steps.filter((_, n) => values[n] !== null && values[n] < low));
    const arrow = (steps, y, symbol) => ({
      x: steps, y: steps.map(() => y), type: "scatter", mode: "markers", cliponaxis: false, hovertemplate: `off the scale at ${this.place.text}<extra></extra>`,
      marker: { symbol, size: 10, color: ink("--mark"), line: { width: 1.5, color: ink("--mark") } },
    });
    return [arrow(above, high, "arrow-bar-up-open"), arrow(below, low, "arrow-bar-down-open")].filter((trace) => trace.x.length);
  }

  #layout({ range, log, events }, drawn, isEmpty, ink, style) {
    const noted = events.map(({ step, text }) => ({ text, x: step, y: 1, yref: "paper", yanchor: "top", xanchor: "left", showarrow: false, font: { size: 11, color: ink("--muted") } }));
    const axis = { color: ink("--faint"), gridcolor: ink("--line"), zeroline: false, linecolor: ink("--line-strong"), tickfont: { size: 11 }, ticks: "" };
    const [, unit, tickformat] = UNITS.find(([name]) => name.test(this.metric)) ?? [null, "", "~g"];
    return {
      margin: { l: 48, r: 12, t: 8, b: 24 },
      height: this.box.clientHeight,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily, size: 12, color: ink("--text") },
      showlegend: false,
      dragmode: "zoom",
      hovermode: "x unified",
      hoverlabel: { bgcolor: ink("--raised"), bordercolor: ink("--line-strong"), font: { size: 12, color: ink("--text") } },
      annotations: isEmpty ? [{ text: "No data in this range", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5, font: { color: ink("--faint") } }] : noted,
      xaxis: { ...axis, showgrid: false, showline: true, showticklabels: !isEmpty, ...this.place.axis, unifiedhovertitle: { text: this.place.text } },
      yaxis: { ...axis, type: log ? "log" : "linear", range: log ? range.map(Math.log10) : range, showticklabels: !isEmpty, ...(log ? { dtick: "D2" } : { nticks: 5 }), fixedrange: true, tickformat, ticksuffix: unit },
      shapes: drawn,
    };
  }
}

function hasValues(lines, marks) {
  return lines.some(({ high }) => high.some((value) => value !== null)) || Object.values(marks).some((steps) => steps.length);
}

function shapes(incidents, attempts, ink) {
  const upright = { type: "line", yref: "paper", y0: 0, y1: 1, layer: "below" };
  const began = attempts.map((step) => ({ ...upright, x0: step, x1: step, line: { color: ink("--line-strong"), width: 1, dash: "dot" } }));
  const troubled = incidents.flatMap(({ from, to, severity }) => [
    { type: "rect", yref: "paper", y0: 0, y1: 1, x0: from, x1: to, fillcolor: faded(SEVERITY[severity] ?? SEVERITY.info, 0.07), line: { width: 0 }, layer: "below" },
    { ...upright, x0: from, x1: from, line: { color: SEVERITY[severity] ?? SEVERITY.info, width: 1.5 } },
  ]);
  return [...began, ...troubled];
}

// The range of nearly all values. Values slightly beyond it extend it; a spike far beyond it is marked by an arrow, and
// does not flatten the rest.
function robustRange(lines) {
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
function extent(lines) {
  const low = Math.min(...lines.flatMap((one) => one.low).filter(Number.isFinite));
  const high = Math.max(...lines.flatMap((one) => one.high).filter(Number.isFinite));
  const room = (high / low) ** FRINGE;
  return [low / room, high * room];
}

// The outline of the area between two lines: along the upper and back along the lower one, separately for each piece.
function outlined(steps, low, high) {
  const outline = { x: [], y: [] };
  let begin = 0;
  for (let n = 0; n <= steps.length; n += 1) {
    if (n < steps.length && high[n] !== null && low[n] !== null) continue;
    const piece = Array.from({ length: n - begin }, (_, k) => begin + k);
    for (const k of piece) outline.x.push(steps[k]), outline.y.push(high[k]);
    for (const k of piece.reverse()) outline.x.push(steps[k]), outline.y.push(low[k]);
    outline.x.push(null);
    outline.y.push(null);
    begin = n + 1;
  }
  return outline;
}

function faded(colour, share) {
  const hex = colour.replace("#", "");
  const [r, g, b] = [0, 2, 4].map((place) => parseInt(hex.slice(place, place + 2), 16));
  return `rgba(${r},${g},${b},${share})`;
}
