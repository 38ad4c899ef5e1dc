// Rank × step heat map on a canvas, with a tooltip for the cell under the pointer.
//
// A grid is {steps, ranks, rankCount, values, kinds}. A column covers its step up to the next column's, a row its rank up
// to the next row's, the last one up to `rankCount`. The cell of row r and column c has the index r * columns + c; `kinds`
// says what it is (KIND), and `values` is valid only where it is FINITE.

import { AXES } from "./axes.js";
import { css } from "./cividis.js";
import { GUTTER, paintAxes, paintCells, paintIncidents, paintMarks, paintMedians } from "./heat_paint.js";
import { againstMedian, KIND, peerRange, robustRange, rowMedians } from "./heat_values.js";
import { font } from "./line_paint.js";
import { stepTicks, timeLabel } from "./scales.js";
import { h } from "../common/dom.js";
import { measured, number } from "../common/format.js";

const LEFT_PX = 62;
const BOTTOM_PX = 20;
const ROW_MIN_PX = 2;
const ROW_MAX_PX = 26;
const PIN_PX = 11;
const PINS_GAP_PX = 5;
const TICK_PX = 110;
const MEDIANS_FROM_PX = 480; // narrower maps have no medians beside them

export class HeatMap {
  // `height` is the largest height in pixels; `names` gives the label of a rank for the tooltip.
  constructor(holder, { height, names = (rank) => `rank ${rank}` }) {
    this.height = height;
    this.names = names;
    this.canvas = h("canvas", { class: "heat", role: "img", "aria-label": "Heat map of ranks over steps" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.hair = h("div", { class: "hair", hidden: true });
    this.scale = h("div", { class: "scale" });
    this.element = h("div", { class: "heatbox" }, this.canvas, this.hair, this.tip);
    holder.append(this.element, this.scale);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#leave());
    new ResizeObserver(() => this.draw()).observe(this.element);
    for (const axis of Object.values(AXES)) axis.join(this);
  }

  // `relative` shades each cell by its ratio to the median of its column. `outlines` are {ranks, from, to, severity}; no
  // ranks = all, `to` null = up to now. `order` are rows from top to bottom; `pinned` ranks stand above all, each in a line
  // of its own. `timeOf` gives the time of a step in ms, for an axis of times. `axes` names rows and columns that are
  // not ranks and steps: {row, column, tip}, functions of their numbers; their values are ratios.
  show(grid, { metric, relative = false, outlines = [], order = null, pinned = [], timeOf = null, axes = null }) {
    Object.assign(this, { grid, metric, relative, outlines, pinned, timeOf, axes });
    this.rows = order ?? grid.ranks.map((_, row) => row);
    this.shaded = relative ? againstMedian(grid) : grid.values;
    this.range = (relative || axes ? peerRange : robustRange)(this.shaded, grid.kinds);
    this.medians = rowMedians(this.shaded, grid);
    this.draw();
    this.#legend();
    this.canvas.setAttribute("aria-label", this.#inWords());
  }

  draw() {
    const wide = Math.floor(this.element.clientWidth);
    if (!this.grid || !wide) return;
    this.drawn = true;
    const { steps, ranks } = this.grid;
    this.frame = this.#layOut(wide);
    const last = this.frame.lines.at(-1);
    const tall = (last ? last.top + last.height : GUTTER.top) + BOTTOM_PX;
    const ratio = devicePixelRatio || 1;
    this.canvas.style.height = `${tall}px`;
    this.canvas.width = Math.floor(wide * ratio);
    this.canvas.height = Math.floor(tall * ratio);
    if (!steps.length || !ranks.length) return;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const style = getComputedStyle(this.canvas);
    const ink = (name) => style.getPropertyValue(name).trim();
    context.font = font(style.fontFamily);
    const cellOf = (line, column) => this.#cell(line, column);
    paintCells(context, this.frame, this.grid, this.shaded, this.range, cellOf);
    paintMarks(context, this.frame, this.grid, cellOf);
    paintIncidents(context, this.frame, this.#spans());
    if (this.frame.medians) paintMedians(context, this.frame, this.medians, this.range, ink);
    paintAxes(context, this.frame, (line) => this.#lineName(line), this.#ticks(), ink);
  }

  // With more ranks than fit, several share a line, and the most extreme of them shows.
  #layOut(wide) {
    const medians = wide >= MEDIANS_FROM_PX && !this.axes;
    const width = Math.max(40, wide - LEFT_PX - GUTTER.bracket - (medians ? GUTTER.medians : 0));
    const columns = this.grid.steps.length;
    const rowOf = (rank) => this.grid.ranks.findLastIndex((first) => first <= rank);
    const pins = this.#isFolded() ? [...new Set(this.pinned.map(rowOf))].filter((row) => row >= 0) : [];
    const begin = GUTTER.top + (pins.length ? pins.length * PIN_PX + PINS_GAP_PX : 0);
    const room = Math.max(60, this.height - (begin - GUTTER.top));
    const fold = Math.max(1, Math.ceil((this.rows.length * ROW_MIN_PX) / room));
    const count = Math.ceil(this.rows.length / fold);
    const height = Math.min(ROW_MAX_PX, Math.max(ROW_MIN_PX, Math.floor(room / Math.max(1, count))));
    const lines = [
      ...pins.map((row, n) => ({ rows: [row], top: GUTTER.top + n * PIN_PX, height: PIN_PX })),
      ...Array.from({ length: count }, (_, n) => ({ rows: this.rows.slice(n * fold, (n + 1) * fold), top: begin + n * height, height })),
    ];
    return { left: LEFT_PX, top: GUTTER.top, width, right: LEFT_PX + width + GUTTER.bracket - 3, columns, columnPx: width / Math.max(1, columns), lines, pins: pins.length, medians };
  }

  // Whether lines are so low that a rank is easily overlooked.
  #isFolded() {
    return this.rows.length * PIN_PX > this.height;
  }

  // The cell that a line shows: of the ranks in it the worst, not their mean.
  #cell(line, column) {
    const columns = this.grid.steps.length;
    const { rows } = this.frame.lines[line];
    let worst = rows[0] * columns + column;
    for (let n = 1; n < rows.length; n += 1) {
      const cell = rows[n] * columns + column;
      if (this.#badness(cell) > this.#badness(worst)) worst = cell;
    }
    return worst;
  }

  #badness(cell) {
    const kind = this.grid.kinds[cell];
    if (kind === KIND.MISSING) return -Infinity;
    return kind === KIND.FINITE ? this.shaded[cell] : Infinity;
  }

  // Where incidents are, in pixels and lines. Those of all ranks have a bracket above alone.
  #spans() {
    const lineOf = new Map();
    this.frame.lines.forEach(({ rows }, line) => rows.forEach((row) => this.#ranksOf(row).forEach((rank) => lineOf.set(rank, [...(lineOf.get(rank) ?? []), line]))));
    const { left, width, columnPx } = this.frame;
    return this.outlines.flatMap(({ ranks, from, to, severity }) => {
      const [begin, end] = [left + Math.max(0, this.#column(from)) * columnPx, left + Math.min(this.frame.columns, this.#column(to) + 1) * columnPx];
      const lines = [...new Set(ranks.flatMap((rank) => lineOf.get(rank) ?? []))];
      return end <= left || begin >= left + width ? [] : [{ from: begin, to: Math.max(begin + 3, end), lines, severity }];
    });
  }

  #ranksOf(row) {
    const { ranks, rankCount } = this.grid;
    const from = ranks[row];
    return Array.from({ length: (ranks[row + 1] ?? rankCount) - from }, (_, n) => from + n);
  }

  // The column of a step; steps before the grid give -1, later ones the last column.
  #column(step) {
    const { steps } = this.grid;
    if (step === null) return steps.length;
    if (step < steps[0]) return -1;
    let [low, high] = [0, steps.length - 1];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  #lineName(line) {
    const rank = this.grid.ranks[this.frame.lines[line].rows[0]];
    return this.axes ? this.axes.row(rank) : `rank ${rank}`;
  }

  #ticks() {
    const { steps } = this.grid;
    const count = Math.max(2, Math.floor(this.frame.width / TICK_PX));
    if (this.axes) return steps.map((one, column) => [column, this.axes.column(one)]);
    if (!this.timeOf) return stepTicks([steps[0], steps.at(-1)], count).map(([step, text]) => [this.#column(step), text]);
    return Array.from({ length: count }, (_, n) => Math.round(((steps.length - 1) * n) / (count - 1))).map((column) => [column, timeLabel(this.timeOf(steps[column]))]);
  }

  // ---- pointer -----------------------------------------------------------------------------------------------------

  #point(event) {
    const at = this.#at(event);
    if (at === null) {
      this.#leave();
      return;
    }
    const step = this.grid.steps[at.column];
    if (!this.axes) (this.timeOf ? AXES.time : AXES.step).point(this.timeOf ? this.timeOf(step) : step);
    this.tip.hidden = false;
    this.tip.textContent = this.#told(at);
    const box = this.element.getBoundingClientRect();
    const x = event.clientX - box.left;
    this.tip.style.left = `${Math.min(box.width - this.tip.offsetWidth - 4, Math.max(4, x + 14))}px`;
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
  }

  #leave() {
    this.tip.hidden = true;
    AXES.step.point(null);
    AXES.time.point(null);
  }

  #told({ cell, ranks, column }) {
    const kind = this.grid.kinds[cell];
    const value = kind === KIND.FINITE ? this.#label(this.grid.values[cell]) : ["", "NaN", "Inf", "−Inf", "not measured"][kind];
    if (this.axes) return `${this.axes.tip(cell)}\n${value}`;
    const [first, last] = [ranks[0], ranks.at(-1)];
    const relative = this.relative && kind === KIND.FINITE ? ` (${number(this.shaded[cell], 3)} × median)` : "";
    const step = this.grid.steps[column];
    const time = this.timeOf ? ` · ${timeLabel(this.timeOf(step))}` : "";
    return `${first === last ? this.names(first) : `ranks ${first}–${last}`} · step ${number(step)}${time}\n${value}${relative}`;
  }

  // The place that the charts of the page show.
  pointed() {
    const { at } = this.timeOf ? AXES.time : AXES.step;
    const column = at === null || !this.grid?.steps.length || this.axes || !this.frame ? -1 : this.timeOf ? this.#columnAt(at) : this.#column(at);
    this.hair.hidden = column < 0;
    if (column < 0) return;
    const last = this.frame.lines.at(-1);
    Object.assign(this.hair.style, { left: `${LEFT_PX + (column + 0.5) * this.frame.columnPx}px`, top: `${GUTTER.top}px`, height: `${last.top + last.height - GUTTER.top}px` });
  }

  // The last column that began by a time; -1 before the first.
  #columnAt(time) {
    return this.grid.steps.findLastIndex((step) => this.timeOf(step) <= time);
  }

  #at(event) {
    if (!this.frame?.lines.length || !this.frame.columns) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT_PX) / this.frame.columnPx);
    const y = event.clientY - box.top;
    const line = this.frame.lines.findIndex(({ top, height }) => y >= top && y < top + height);
    if (column < 0 || column >= this.frame.columns || line < 0) return null;
    const cell = this.#cell(line, column);
    return { cell, column, ranks: this.#ranksOf(Math.floor(cell / this.frame.columns)) };
  }

  // ---- words -------------------------------------------------------------------------------------------------------

  #label(value) {
    return this.axes ? `${number(value, 3)} ×` : measured(this.metric, value);
  }

  #inWords() {
    const { steps, ranks, rankCount } = this.grid;
    if (!steps.length || !ranks.length) return "Heat map without data";
    const highest = this.medians.reduce((best, one, row) => (one > (this.medians[best] ?? -Infinity) ? row : best), 0);
    if (this.axes) return `Heat map of ${this.axes.what}; highest in ${this.axes.row(ranks[highest])}.`;
    const value = this.relative ? `${number(this.medians[highest], 3)} times the median of all` : measured(this.metric, this.medians[highest]);
    return `Heat map of ${number(rankCount)} ranks over steps ${number(steps[0])} to ${number(steps.at(-1))}. Highest over all these steps: rank ${ranks[highest]}, ${value}. ${this.outlines.length} incidents.`;
  }

  #legend() {
    const [low, high] = this.range;
    const bar = h("canvas", { class: "bar", width: 120, height: 8 });
    const context = bar.getContext("2d");
    for (let x = 0; x < 120; x += 1) {
      context.fillStyle = css(x / 119);
      context.fillRect(x, 0, 1, 8);
    }
    const label = (value) => (this.relative ? `${number(value, 3)} ×` : this.#label(value));
    this.scale.replaceChildren(
      h("span", {}, `${this.relative ? "≤ " : ""}${label(low)}`), bar, h("span", {}, label(high)),
      h("span", { class: "key nan" }, "NaN"), h("span", { class: "key inf" }, "Inf"), h("span", { class: "key missing" }, "not measured"), h("span", { class: "key outlined" }, "incident"),
      this.frame?.medians ? h("span", { class: "key medians" }, "median over time") : "",
    );
  }
}
