// Line charts on a canvas. Each point covers a range of steps with its lowest and highest value, so that no spike is
// averaged away. Charts over the same axis share the place under the pointer and the zoom (axes.js). Drag to zoom, double
// click to see all; with the keyboard ← → move, + and − zoom, Escape shows all. The label tells the same in words.

import { AXES } from "./axes.js";
import { font, paintAxes, paintEnds, paintEvents, paintLine, paintMarks, paintNotes, paintNothing, placed } from "./line_paint.js";
import { inWords, MARK_NAMES, placeName, span } from "./line_words.js";
import { extent, robustRange, stepTicks, timeTicks, valueTicks } from "./scales.js";
import { h } from "../common/dom.js";

const MARGIN = { right: 12, top: 8, bottom: 24 };
const LEFT_PX = [40, 72]; // between these, as wide as the labels of the y axis
const X_TICK_PX = 88;
const Y_TICK_PX = 34;
const NEAR_PX = 12; // a line has no value further from its next point
const DRAG_PX = 6;
const NO_MARKS = { nan: [], inf: [], minusInf: [], missing: [] };

export class Chart {
  // `metric` gives the unit; `label` says what it shows. With `times`, what is called a step below is a time in ms.
  constructor(holder, { metric, label, times = false }) {
    this.metric = metric;
    this.label = label;
    this.canvas = h("canvas", { class: "line", role: "img", tabindex: "0", "aria-label": label });
    this.hair = h("div", { class: "hair", hidden: true });
    this.picked = h("div", { class: "picked", hidden: true });
    this.tip = h("div", { class: "tip", hidden: true });
    this.said = h("div", { class: "visually-hidden", role: "status" });
    this.all = h("button", { class: "small all", hidden: true, onclick: () => this.axis.zoom(null) }, "Show all");
    this.element = h("div", { class: "chart" }, this.canvas, this.picked, this.hair, this.tip, this.said, this.all);
    holder.append(this.element);
    this.#over(times);
    this.#listen();
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  // `lines` are {name, steps, low, high, colour, band, dash, thin, level}, the steps of each ascending: between low and
  // high it is filled; a level, such as a threshold, has two points. `marks` are steps by kind {nan, inf, minusInf,
  // missing}; `incidents` {from, to, severity} and `events` {step, text, begins} are drawn along the axis; `begins`: with
  // it an attempt begins. `log`: a logarithmic axis, for lines whose values are all positive. `times` changes the axis.
  show(lines, marks, incidents = [], { events = [], log = false, times = this.times, label = this.label } = {}) {
    if (times !== this.times) this.#over(times);
    this.last = { lines, marks: marks ?? NO_MARKS, incidents, events, log };
    this.canvas.setAttribute("aria-label", inWords(label, this.metric, times, this.last));
    this.draw();
  }

  draw() {
    const [width, height] = [this.element.clientWidth, this.element.clientHeight];
    if (!this.last || !width) return;
    this.drawn = true;
    const { lines, marks, log } = this.last;
    const ratio = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(this.element);
    const ink = (name) => style.getPropertyValue(name).trim();
    context.font = font(style.fontFamily);
    const x = this.axis.range ?? this.#whole();
    const shown = lines.map((line) => within(line, x));
    const frame = { right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom, x, y: log ? extent(shown) : robustRange(shown), log };
    const yTicks = valueTicks(this.metric, frame.y, (frame.bottom - frame.top) / Y_TICK_PX, log);
    const wide = Math.max(0, ...yTicks.map(([, text]) => context.measureText(text).width)) + 14;
    frame.left = Math.ceil(Math.min(LEFT_PX[1], Math.max(LEFT_PX[0], wide)));
    this.frame = frame;
    this.all.hidden = this.axis.range === null;
    if (this.#isEmpty(shown)) paintNothing(context, frame, ink);
    else this.#paint(context, frame, { lines: shown, marks, yTicks, ink });
    this.pointed();
  }

  #paint(context, frame, { lines, marks, yTicks, ink }) {
    const xTicks = (this.times ? timeTicks : stepTicks)(frame.x, (frame.right - frame.left) / X_TICK_PX);
    paintAxes(context, frame, { xTicks, yTicks, ink });
    paintEvents(context, frame, { ...this.last, ink });
    for (const line of lines) paintLine(context, frame, line, ink);
    paintEnds(context, frame, lines, ink);
    paintNotes(context, frame, this.last.events, ink);
    paintMarks(context, frame, lines, marks, ink);
  }

  #over(times) {
    this.axis?.leave(this);
    this.times = times;
    this.axis = times ? AXES.time : AXES.step;
    this.axis.join(this);
  }

  // From the first to the last place of lines and marks.
  #whole() {
    const { lines, marks } = this.last;
    const places = [...lines.flatMap((one) => one.steps), ...Object.values(marks).flat()];
    const [from, to] = [Math.min(...places), Math.max(...places)];
    return from < to ? [from, to] : [from - 0.5, to + 0.5];
  }

  #isEmpty(lines) {
    return !lines.some(({ high }) => high.some((value) => value !== null)) && !Object.values(this.last.marks).some((steps) => steps.length);
  }

  // ---- pointer and keyboard ----------------------------------------------------------------------------------------

  #listen() {
    let began = null;
    this.canvas.addEventListener("pointerdown", (event) => {
      if (event.pointerType !== "mouse" || event.button !== 0 || !this.frame) return;
      began = event.offsetX;
      this.canvas.setPointerCapture(event.pointerId);
    });
    this.canvas.addEventListener("pointermove", (event) => {
      if (!this.frame) return;
      this.axis.point(this.#nearest(this.#at(event.offsetX)));
      if (began !== null) this.#pick(began, event.offsetX);
    });
    this.canvas.addEventListener("pointerup", (event) => {
      if (began !== null && Math.abs(event.offsetX - began) > DRAG_PX) this.#zoomTo(this.#at(began), this.#at(event.offsetX));
      began = null;
      this.picked.hidden = true;
    });
    this.canvas.addEventListener("pointerleave", () => this.axis.point(null));
    this.canvas.addEventListener("blur", () => this.axis.point(null));
    this.canvas.addEventListener("dblclick", () => this.axis.zoom(null));
    this.canvas.addEventListener("keydown", (event) => this.#press(event));
  }

  #pick(from, to) {
    const [left, right] = [Math.min(from, to), Math.max(from, to)].map((x) => Math.min(this.frame.right, Math.max(this.frame.left, x)));
    this.picked.hidden = right - left < DRAG_PX;
    Object.assign(this.picked.style, { left: `${left}px`, width: `${right - left}px`, top: `${this.frame.top}px`, height: `${this.frame.bottom - this.frame.top}px` });
  }

  #press(event) {
    const does = { ArrowLeft: () => this.#move(-1), ArrowRight: () => this.#move(1), "+": () => this.#scale(0.5), "-": () => this.#scale(2), Escape: () => this.axis.zoom(null) }[event.key];
    if (!does || !this.frame || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    does();
    this.said.textContent = this.tip.hidden ? "" : this.tip.textContent;
  }

  #move(by) {
    const places = this.#places();
    const now = places.indexOf(this.#nearest(this.axis.at ?? this.frame.x[1]));
    this.axis.point(places[Math.min(places.length - 1, Math.max(0, this.axis.at === null ? now : now + by))] ?? null);
  }

  #scale(by) {
    const [from, to] = this.frame.x;
    const at = this.axis.at ?? (from + to) / 2;
    this.#zoomTo(at - (at - from) * by, at + (to - at) * by);
  }

  #zoomTo(a, b) {
    const [first, last] = this.#whole();
    const [from, to] = [Math.max(first, Math.min(a, b)), Math.min(last, Math.max(a, b))];
    if (from < to) this.axis.zoom(from <= first && to >= last ? null : [from, to]);
  }

  #at(px) {
    const { left, right, x: [from, to] } = this.frame;
    return from + ((px - left) / (right - left)) * (to - from);
  }

  // Places of points, in order, within what is shown. Levels have none.
  #places() {
    const { lines, marks } = this.last;
    const points = lines.flatMap((one) => (one.level ? [] : one.steps));
    const [from, to] = this.frame.x;
    return [...new Set([...points, ...marks.nan, ...marks.inf, ...marks.minusInf])].filter((at) => at >= from && at <= to).sort((a, b) => a - b);
  }

  #nearest(at) {
    return this.#places().reduce((best, one) => (best === null || Math.abs(one - at) < Math.abs(best - at) ? one : best), null);
  }

  // Shows the values at the shared place.
  pointed() {
    const { at } = this.axis;
    const inside = at !== null && this.frame && at >= this.frame.x[0] && at <= this.frame.x[1];
    const found = inside ? this.#valuesAt(at) : [];
    this.hair.hidden = this.tip.hidden = !found.length;
    if (!found.length) return;
    const x = placed.x(this.frame, at);
    Object.assign(this.hair.style, { left: `${x}px`, top: `${this.frame.top}px`, height: `${this.frame.bottom - this.frame.top}px` });
    this.tip.textContent = [placeName(at, this.times), ...found].join("\n");
    const wide = this.tip.offsetWidth;
    this.tip.style.left = `${x + 10 + wide > this.element.clientWidth ? Math.max(0, x - 10 - wide) : x + 10}px`;
    this.tip.style.top = `${this.frame.top}px`;
  }

  #valuesAt(at) {
    const { lines, marks, events } = this.last;
    const near = ((this.frame.x[1] - this.frame.x[0]) * NEAR_PX) / (this.frame.right - this.frame.left);
    const values = lines.flatMap(({ name, steps, low, high, dash, level }) => {
      const n = level ? 0 : nearest(steps, at, near);
      const text = n < 0 ? "" : span(this.metric, dash ? high[n] : low[n], high[n]);
      return text ? [`${name} ${text}`] : [];
    });
    const marked = Object.entries(MARK_NAMES).filter(([kind]) => marks[kind].includes(at)).map(([, name]) => name);
    return [...values, ...marked, ...events.filter((one) => Math.abs(one.step - at) < near / 2).map((one) => one.text)];
  }
}

// The index of the point of a line that is nearest to a place; -1 if there is none.
function nearest(steps, at, near) {
  let best = -1;
  steps.forEach((step, n) => {
    if (Math.abs(step - at) <= near && (best < 0 || Math.abs(step - at) <= Math.abs(steps[best] - at))) best = n;
  });
  return best;
}

// The part of a line that is shown, with one more point at each end, so that it reaches the frame.
function within(line, [from, to]) {
  if (line.level) return line;
  const { steps, low, high } = line;
  const [first, last] = [steps.findIndex((step) => step >= from), steps.findLastIndex((step) => step <= to)];
  if (first < 0 || last < 0) return { ...line, steps: [], low: [], high: [] };
  const part = (values) => values.slice(Math.max(0, first - 1), last + 2);
  const upper = part(high);
  return { ...line, steps: part(steps), high: upper, low: low === high ? upper : part(low) };
}
