// Draws a heat map on a canvas: one image draw for all cells, marks for NaN and Inf that do not depend on colour,
// incidents as brackets in the gutters, so that they hide no data, and the median of each line over time.
//
// A frame is {left, top, width, columnPx, columns, lines: [{rows, top, height}], pins, right}: `lines` are rows of pixels,
// each with the rows of the grid that it shows; the first `pins` are the pinned ones.

import { packed, palette } from "./cividis.js";
import { KIND } from "./heat_values.js";

export const GUTTER = { top: 9, bracket: 10, medians: 48 };
const SEVERITY = { critical: "#e5342b", warning: "#e8890c", info: "#3a86d8" };
const NAN_COLOUR = packed(214, 40, 140);
const INF_COLOUR = packed(230, 92, 20);
const MISSING_COLOUR = { light: packed(226, 229, 235), dark: packed(38, 45, 58) };
const MARK_MIN_PX = 5;
const OUTLINE_MIN_PX = 8; // lines that are this high are outlined besides
const LABEL_MIN_PX = 12;

export function paintCells(context, frame, { kinds }, shaded, range, cellOf) {
  const { columns, lines, pins, left, width } = frame;
  const image = new ImageData(columns, lines.length);
  const pixels = new Uint32Array(image.data.buffer);
  const [low, high] = range;
  const shade = (palette.length - 1) / (high - low || 1);
  const missing = MISSING_COLOUR[document.documentElement.dataset.theme] ?? MISSING_COLOUR.light;
  for (let line = 0; line < lines.length; line += 1) {
    for (let column = 0; column < columns; column += 1) {
      const cell = cellOf(line, column);
      let colour = missing;
      if (kinds[cell] === KIND.FINITE) colour = palette[Math.round(Math.min(palette.length - 1, Math.max(0, (shaded[cell] - low) * shade)))];
      else if (kinds[cell] === KIND.NAN) colour = NAN_COLOUR;
      else if (kinds[cell] !== KIND.MISSING) colour = INF_COLOUR;
      pixels[line * columns + column] = colour;
    }
  }
  const bitmap = new OffscreenCanvas(columns, lines.length);
  bitmap.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  for (const [from, to] of [[0, pins], [pins, lines.length]]) {
    if (from === to) continue;
    const { top, height } = lines[from];
    context.drawImage(bitmap, 0, from, columns, to - from, left, top, width, (to - from) * height);
  }
}

export function paintMarks(context, { lines, columns, columnPx, left }, { kinds }, cellOf) {
  context.strokeStyle = "#fff";
  context.lineWidth = 1.25;
  context.beginPath();
  lines.forEach(({ top, height }, line) => {
    const size = Math.min(columnPx, height) / 2 - 1.5;
    if (columnPx < MARK_MIN_PX || height < MARK_MIN_PX) return;
    for (let column = 0; column < columns; column += 1) {
      const kind = kinds[cellOf(line, column)];
      if (kind === KIND.FINITE || kind === KIND.MISSING) continue;
      const [x, y] = [left + (column + 0.5) * columnPx, top + height / 2];
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
  });
  context.stroke();
}

// Each incident: when, as a bracket above; which ranks, as brackets on the right. `spans` are {from, to, lines, severity}
// in pixels from the left and lines of the frame.
export function paintIncidents(context, frame, spans) {
  const { left, width, right } = frame;
  for (const { from, to, lines, severity } of spans) {
    const colour = SEVERITY[severity] ?? SEVERITY.info;
    context.strokeStyle = colour;
    context.lineWidth = 2;
    bracket(context, [[from, frame.top - 2], [from, frame.top - 6], [to, frame.top - 6], [to, frame.top - 2]]);
    for (const [first, last] of runs(lines)) {
      const [top, bottom] = [frame.lines[first].top + 1, frame.lines[last].top + frame.lines[last].height - 1];
      bracket(context, [[left + width + 2, top], [right, top], [right, Math.max(bottom, top + 2)], [left + width + 2, Math.max(bottom, top + 2)]]);
      if (frame.lines[first].height >= OUTLINE_MIN_PX) context.strokeRect(from, top, Math.max(3, to - from), bottom - top);
    }
  }
}

function bracket(context, points) {
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
}

// Consecutive numbers as [first, last].
function runs(numbers) {
  const found = [];
  for (const number of numbers.toSorted((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && number <= last[1] + 1) last[1] = number;
    else found.push([number, number]);
  }
  return found;
}

// The median of each line over time, as a bar on the right: of several rows, the highest.
export function paintMedians(context, frame, medians, [low, high], ink) {
  const from = frame.right + 6;
  const scale = (GUTTER.medians - 10) / (high - low || 1);
  context.fillStyle = ink("--mark");
  for (const { rows, top, height } of frame.lines) {
    const most = Math.max(...rows.map((row) => medians[row]).filter(Number.isFinite));
    if (!Number.isFinite(most)) continue;
    const wide = Math.min(GUTTER.medians - 10, Math.max(0.5, (most - low) * scale));
    context.fillRect(from, top + (height > 3 ? 1 : 0), wide, Math.max(1, height - (height > 3 ? 2 : 0)));
  }
}

// `labelOf(line)` names a line, `ticks` are [column, text].
export function paintAxes(context, frame, labelOf, ticks, ink) {
  const { lines, left, width, columnPx } = frame;
  const bottom = lines.at(-1).top + lines.at(-1).height;
  context.fillStyle = ink("--muted");
  context.textBaseline = "middle";
  context.textAlign = "right";
  let free = -Infinity; // where the label above ends
  lines.forEach(({ top, height }, line) => {
    const y = Math.min(bottom - 5, Math.max(frame.top + 5, top + height / 2));
    if (y - LABEL_MIN_PX / 2 < free) return;
    context.fillText(labelOf(line), left - 7, y);
    free = y + LABEL_MIN_PX / 2;
  });
  context.textBaseline = "alphabetic";
  context.textAlign = "left";
  let end = -Infinity;
  for (const [column, text] of ticks) {
    const wide = context.measureText(text).width;
    const x = Math.min(left + width - wide, Math.max(left, left + (column + 0.5) * columnPx - wide / 2));
    if (x < end + 10) continue;
    context.fillText(text, x, bottom + 15);
    end = x + wide;
  }
}
