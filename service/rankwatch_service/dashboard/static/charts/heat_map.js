// Rank × step heat map on a canvas: one image draw for all cells, marks for NaN, Inf and missing that do not depend on
// colour, incidents outlined, a tooltip for the cell under the pointer.
//
// A grid is {steps, ranks, rankCount, values, kinds}. A column covers its step up to the next column's, a row its rank up
// to the next row's, the last one up to `rankCount`. The cell of row r and column c has the index r * columns + c; `kinds`
// says what it is (KIND), and `values` is valid only where it is FINITE.

import { css, packed, palette } from "./cividis.js";
import { h } from "../common/dom.js";
import { measured, number } from "../common/format.js";

export const KIND = { FINITE: 0, NAN: 1, INF: 2, MINUS_INF: 3, MISSING: 4 };

const LEFT_PX = 62;
const BOTTOM_PX = 20;
const MARK_MIN_PX = 5;
const ROW_MIN_PX = 2;
const ROW_MAX_PX = 26;
const LABEL_MIN_PX = 12;
const SIGMAS = 8;
const SIGMA_MIN = 0.005;
const NAN_COLOUR = packed(214, 40, 140);
const INF_COLOUR = packed(230, 92, 20);
const MISSING_COLOUR = { light: packed(226, 229, 235), dark: packed(38, 45, 58) };
const SEVERITY = { critical: "#e5342b", warning: "#e8890c", info: "#3a86d8" };

export class HeatMap {
  // `height` is the largest height in pixels; `names` gives the label of a rank for the tooltip.
  constructor(holder, { height, names = (rank) => `rank ${rank}` }) {
    this.height = height;
    this.names = names;
    this.canvas = h("canvas", { class: "heat", role: "img", "aria-label": "Heat map of ranks over steps" });
    this.tip = h("div", { class: "tip", hidden: true });
    this.scale = h("div", { class: "scale" });
    holder.append(h("div", { class: "heatbox" }, this.canvas, this.tip), this.scale);
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    addEventListener("themechange", () => this.draw());
  }

  // `relative` shades each cell by its ratio to the median of its column, so that ranks which differ from peers stand out.
  // `outlines` are {ranks, from, to, severity}; no ranks = all, `to` null = up to now.
  show(grid, { metric, relative = false, outlines = [], order = null }) {
    this.grid = grid;
    this.metric = metric;
    this.relative = relative;
    this.outlines = outlines;
    this.rows = order ?? grid.ranks.map((_, row) => row);
    this.shaded = relative ? againstMedian(grid) : grid.values;
    this.range = (relative ? peerRange : robustRange)(this.shaded, grid.kinds);
    this.draw();
    this.#legend();
  }

  draw() {
    if (!this.grid) return;
    const { steps, ranks } = this.grid;
    const box = this.canvas.parentElement.getBoundingClientRect();
    const ratio = devicePixelRatio || 1;
    this.plotWidth = Math.max(40, Math.floor(box.width) - LEFT_PX);
    // With more ranks than fit, several share a row of pixels, and the most extreme of them shows.
    this.fold = Math.max(1, Math.ceil((ranks.length * ROW_MIN_PX) / this.height));
    this.lines = Math.ceil(ranks.length / this.fold);
    this.rowPx = Math.min(ROW_MAX_PX, Math.max(ROW_MIN_PX, Math.floor(this.height / Math.max(1, this.lines))));
    this.columnPx = this.plotWidth / Math.max(1, steps.length);
    const plotHeight = this.lines * this.rowPx;
    this.canvas.style.height = `${plotHeight + BOTTOM_PX}px`;
    this.canvas.width = Math.floor(box.width * ratio);
    this.canvas.height = Math.floor((plotHeight + BOTTOM_PX) * ratio);
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, box.width, plotHeight + BOTTOM_PX);
    if (!steps.length || !ranks.length) return;
    context.imageSmoothingEnabled = false;
    context.drawImage(this.#image(), LEFT_PX, 0, this.plotWidth, plotHeight);
    this.#marks(context);
    this.#outline(context, plotHeight);
    this.#axes(context, plotHeight);
  }

  #image() {
    const columns = this.grid.steps.length;
    const image = new ImageData(columns, this.lines);
    const pixels = new Uint32Array(image.data.buffer);
    const [low, high] = this.range;
    const shade = (palette.length - 1) / (high - low || 1);
    const missing = MISSING_COLOUR[document.documentElement.dataset.theme] ?? MISSING_COLOUR.light;
    for (let line = 0; line < this.lines; line += 1) {
      for (let column = 0; column < columns; column += 1) {
        const cell = this.#cell(line, column);
        const kind = this.grid.kinds[cell];
        let colour = missing;
        if (kind === KIND.FINITE) colour = palette[Math.round(Math.min(palette.length - 1, Math.max(0, (this.shaded[cell] - low) * shade)))];
        else if (kind === KIND.NAN) colour = NAN_COLOUR;
        else if (kind !== KIND.MISSING) colour = INF_COLOUR;
        pixels[line * columns + column] = colour;
      }
    }
    const bitmap = new OffscreenCanvas(columns, this.lines);
    bitmap.getContext("2d").putImageData(image, 0, 0);
    return bitmap;
  }

  // The cell that a row of pixels shows: of the ranks in it the worst, not their mean.
  #cell(line, column) {
    const columns = this.grid.steps.length;
    let worst = this.rows[line * this.fold] * columns + column;
    for (let n = 1; n < this.fold && line * this.fold + n < this.rows.length; n += 1) {
      const cell = this.rows[line * this.fold + n] * columns + column;
      if (this.#badness(cell) > this.#badness(worst)) worst = cell;
    }
    return worst;
  }

  #badness(cell) {
    const kind = this.grid.kinds[cell];
    if (kind === KIND.MISSING) return -Infinity;
    return kind === KIND.FINITE ? this.shaded[cell] : Infinity;
  }

  #marks(context) {
    if (this.columnPx < MARK_MIN_PX || this.rowPx < MARK_MIN_PX) return;
    context.strokeStyle = "#fff";
    context.lineWidth = 1.25;
    const size = Math.min(this.columnPx, this.rowPx) / 2 - 1.5;
    context.beginPath();
    for (let line = 0; line < this.lines; line += 1) {
      for (let column = 0; column < this.grid.steps.length; column += 1) {
        const kind = this.grid.kinds[this.#cell(line, column)];
        if (kind === KIND.FINITE || kind === KIND.MISSING) continue;
        const x = LEFT_PX + (column + 0.5) * this.columnPx;
        const y = (line + 0.5) * this.rowPx;
        if (kind === KIND.NAN) {
          context.moveTo(x - size, y - size);
          context.lineTo(x + size, y + size);
          context.moveTo(x + size, y - size);
          context.lineTo(x - size, y + size);
        } else {
          const up = kind === KIND.INF ? -1 : 1;
          context.moveTo(x - size, y - (up * size) / 2);
          context.lineTo(x, y + (up * size) / 2);
          context.lineTo(x + size, y - (up * size) / 2);
        }
      }
    }
    context.stroke();
  }

  #outline(context, plotHeight) {
    const lineOf = new Map(this.rows.flatMap((row, place) => this.#ranksOf(row).map((rank) => [rank, Math.floor(place / this.fold)])));
    const floor = getComputedStyle(this.canvas).getPropertyValue("--surface");
    for (const outline of this.outlines) {
      const from = LEFT_PX + Math.max(0, this.#column(outline.from)) * this.columnPx;
      const to = LEFT_PX + Math.min(this.grid.steps.length, this.#column(outline.to) + 1) * this.columnPx;
      if (to <= LEFT_PX || from >= LEFT_PX + this.plotWidth) continue;
      const width = Math.max(3, to - from);
      const boxes = outline.ranks.length
        ? [...new Set(outline.ranks.map((rank) => lineOf.get(rank)).filter((line) => line !== undefined))].map((line) => [line * this.rowPx, this.rowPx])
        : [[0, plotHeight]];
      for (const [top, tall] of boxes) {
        for (const [colour, thick] of [[floor, 4], [SEVERITY[outline.severity] ?? SEVERITY.info, 2]]) {
          context.strokeStyle = colour;
          context.lineWidth = thick;
          context.strokeRect(from, top + 1, width, Math.max(2, tall - 2));
        }
      }
    }
  }

  #ranksOf(row) {
    const { ranks, rankCount } = this.grid;
    const from = ranks[row];
    return Array.from({ length: (ranks[row + 1] ?? rankCount) - from }, (_, n) => from + n);
  }

  // The column of a step; steps before the grid give -1, later ones the last column.
  #column(step) {
    if (step === null) return this.grid.steps.length;
    const { steps } = this.grid;
    if (step < steps[0]) return -1;
    let low = 0;
    let high = steps.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (steps[middle] <= step) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  #axes(context, plotHeight) {
    const style = getComputedStyle(this.canvas);
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = style.getPropertyValue("--muted");
    context.textBaseline = "middle";
    context.textAlign = "right";
    const every = Math.max(1, Math.ceil(LABEL_MIN_PX / this.rowPx));
    let free = 0; // where the label above ends: the first one is moved down into the plot
    for (let line = 0; line < this.lines; line += every) {
      const rank = this.grid.ranks[this.rows[line * this.fold]];
      const y = Math.min(plotHeight - 5, Math.max(6, (line + 0.5) * this.rowPx));
      if (y - 5 < free) continue;
      context.fillText(`rank ${rank}`, LEFT_PX - 7, y);
      free = y + 5;
    }
    context.textBaseline = "alphabetic";
    const { steps } = this.grid;
    const places = Math.max(2, Math.min(9, Math.floor(this.plotWidth / 110)));
    for (let n = 0; n < places; n += 1) {
      const column = Math.round(((steps.length - 1) * n) / (places - 1));
      context.textAlign = n === 0 ? "left" : n === places - 1 ? "right" : "center";
      context.fillText(n === 0 ? `step ${number(steps[column])}` : number(steps[column]), LEFT_PX + ((column + (n === 0 ? 0 : n === places - 1 ? 1 : 0.5)) * this.columnPx), plotHeight + 15);
    }
  }

  #point(event) {
    const at = this.#at(event);
    this.tip.hidden = at === null;
    if (at === null) return;
    const { cell, ranks, column } = at;
    const [first, last] = [ranks[0], ranks.at(-1)];
    const value = this.grid.kinds[cell] === KIND.FINITE ? measured(this.metric, this.grid.values[cell]) : ["", "NaN", "Inf", "−Inf", "not measured"][this.grid.kinds[cell]];
    const relative = this.relative && this.grid.kinds[cell] === KIND.FINITE ? ` (${number(this.shaded[cell], 3)} × median)` : "";
    this.tip.textContent = `${first === last ? this.names(first) : `ranks ${first}–${last}`} · step ${number(this.grid.steps[column])}\n${value}${relative}`;
    const box = this.canvas.parentElement.getBoundingClientRect();
    const x = event.clientX - box.left;
    this.tip.style.left = `${Math.min(box.width - this.tip.offsetWidth - 4, Math.max(4, x + 14))}px`;
    this.tip.style.top = `${event.clientY - box.top + 14}px`;
  }

  #at(event) {
    if (!this.grid?.steps.length) return null;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - LEFT_PX) / this.columnPx);
    const line = Math.floor((event.clientY - box.top) / this.rowPx);
    if (column < 0 || column >= this.grid.steps.length || line < 0 || line >= this.lines) return null;
    const cell = this.#cell(line, column);
    return { cell, column, ranks: this.#ranksOf(Math.floor(cell / this.grid.steps.length)) };
  }

  #legend() {
    const [low, high] = this.range;
    const bar = h("canvas", { class: "bar", width: 120, height: 8 });
    const context = bar.getContext("2d");
    for (let x = 0; x < 120; x += 1) {
      context.fillStyle = css(x / 119);
      context.fillRect(x, 0, 1, 8);
    }
    const label = (value) => (this.relative ? `${number(value, 3)} ×` : measured(this.metric, value));
    this.scale.replaceChildren(
      h("span", {}, `${this.relative ? "≤ " : ""}${label(low)}`), bar, h("span", {}, label(high)),
      h("span", { class: "key nan" }, "NaN"), h("span", { class: "key inf" }, "Inf"), h("span", { class: "key missing" }, "not measured"), h("span", { class: "key outlined" }, "incident"),
    );
  }
}

function againstMedian(grid) {
  const columns = grid.steps.length;
  const ratios = new Float32Array(grid.values.length);
  for (let column = 0; column < columns; column += 1) {
    const finite = [];
    for (let cell = column; cell < grid.values.length; cell += columns) if (grid.kinds[cell] === KIND.FINITE) finite.push(grid.values[cell]);
    finite.sort((a, b) => a - b);
    const median = finite.length ? (finite[(finite.length - 1) >> 1] + finite[finite.length >> 1]) / 2 : 1;
    for (let cell = column; cell < grid.values.length; cell += columns) ratios[cell] = median === 0 ? 1 : grid.values[cell] / median;
  }
  return ratios;
}

// From the 1st to the 99th percentile, so that one extreme cell does not reduce the contrast of the rest.
function robustRange(values, kinds) {
  const finite = sortedFinite(values, kinds);
  if (!finite.length) return [0, 1];
  const [low, high] = [at(finite, 0.01), at(finite, 0.99)];
  return high > low ? [low, high] : [low, low + (Math.abs(low) * 0.01 || 1)];
}

// From the median up to a value that usual noise hardly ever reaches: ranks with noise alone stay dark, and a rank that
// is a few percent slower all the time does not.
function peerRange(ratios, kinds) {
  const finite = sortedFinite(ratios, kinds);
  if (!finite.length) return [1, 2];
  const sigma = (at(finite, 0.75) - at(finite, 0.25)) / 1.349; // of a normal distribution with these quartiles
  return [1, Math.max(1 + SIGMAS * Math.max(sigma, SIGMA_MIN), at(finite, 0.99))];
}

function sortedFinite(values, kinds) {
  return Float32Array.from(values).filter((_, cell) => kinds[cell] === KIND.FINITE).sort();
}

const at = (sorted, share) => sorted[Math.round((sorted.length - 1) * share)];
