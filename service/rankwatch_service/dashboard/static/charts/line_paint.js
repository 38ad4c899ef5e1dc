// Draws a line chart on a canvas: axes, lines, marks on the frame, and what happened along the x axis.
//
// A frame is {left, right, top, bottom, x: [from, to], y: [low, high], log}: pixels, and the range of values in them.

const SEVERITY = { critical: "#e5342b", warning: "#e8890c", info: "#3a86d8" };
const LABEL_PX = 11;
const NOTE_ROWS = 3; // notes that would overlap go one row down
const NOTE_PX = 13;
const NOTE_GAP_PX = 6;
const NOTE_CHARS = 24;
const LINE_GAP_PX = 3; // dashed lines that would stand closer are one
const ARROW_PX = 5;
const HALO_PX = 3; // around a note, so that it can be read above a line
const THIN_ALPHA = 0.55;
const EDGE_PX = 12; // labels may reach this far beyond the frame

export const placed = {
  x: ({ left, right, x: [from, to] }, value) => left + ((value - from) / (to - from || 1)) * (right - left),
  y: ({ top, bottom, y: [low, high], log }, value) => {
    const share = log ? Math.log(value / low) / Math.log(high / low) : (value - low) / (high - low || 1);
    return bottom - share * (bottom - top);
  },
};

export function paintAxes(context, frame, { xTicks, yTicks, ink }) {
  const { left, right, top, bottom } = frame;
  context.lineWidth = 1;
  context.fillStyle = ink("--faint");
  context.textBaseline = "middle";
  context.textAlign = "right";
  for (const [value, label] of yTicks) {
    const y = Math.round(placed.y(frame, value)) + 0.5;
    stroke(context, ink("--line"), [[left, y], [right, y]]);
    context.fillText(label, left - 6, Math.min(bottom - 3, Math.max(top + 3, y)));
  }
  stroke(context, ink("--line-strong"), [[left, bottom + 0.5], [right, bottom + 0.5]]);
  context.textBaseline = "top";
  let free = -Infinity;
  for (const [value, label] of xTicks) {
    const [x, half] = [placed.x(frame, value), context.measureText(label).width / 2];
    const at = Math.min(right + EDGE_PX - half, x);
    if (at - half < free) continue;
    stroke(context, ink("--line-strong"), [[Math.round(x) + 0.5, bottom], [Math.round(x) + 0.5, bottom + 4]]);
    context.textAlign = "center";
    context.fillText(label, at, bottom + 7);
    free = at + half + 8;
  }
}

// Incidents as tinted spans, beginnings of attempts as dotted lines, and other events as dashed lines.
export function paintEvents(context, frame, { incidents, events, ink }) {
  const { left, right, top, bottom } = frame;
  const inside = (x) => Math.min(right, Math.max(left, x));
  for (const { from, to, severity } of incidents) {
    const colour = SEVERITY[severity] ?? SEVERITY.info;
    const [x0, x1] = [placed.x(frame, from), placed.x(frame, to)];
    if (x1 < left || x0 > right) continue;
    context.globalAlpha = 0.08;
    context.fillStyle = colour;
    context.fillRect(inside(x0), top, Math.max(1, inside(x1) - inside(x0)), bottom - top);
    context.globalAlpha = 1;
    if (x0 >= left) stroke(context, colour, [[x0, top], [x0, bottom]], 1.5);
  }
  let drawn = -Infinity;
  for (const { step, begins } of events.toSorted((a, b) => a.step - b.step)) {
    const x = placed.x(frame, step);
    if (!begins && x - drawn < LINE_GAP_PX) continue;
    upright(context, frame, step, ink("--line-strong"), begins ? [2, 3] : [4, 3]);
    drawn = x;
  }
}

// What the dashed lines are, above all other lines.
export function paintNotes(context, frame, events, ink) {
  const ends = Array(NOTE_ROWS).fill(-Infinity);
  const last = {}; // by text, where its last note ends
  context.textBaseline = "top";
  context.textAlign = "left";
  for (const { step, text: full } of events.toSorted((a, b) => a.step - b.step)) {
    const x = placed.x(frame, step);
    if (!isWithin(frame, x)) continue;
    const text = full.length > NOTE_CHARS ? `${full.slice(0, NOTE_CHARS - 1)}…` : full;
    const wide = context.measureText(text).width;
    const at = Math.min(x + 3, frame.right - wide);
    const row = ends.findIndex((end) => end < at);
    if (row < 0 || last[text] > at) continue; // its line remains, and the tooltip names it
    label(context, text, at, frame.top + row * NOTE_PX, ink);
    ends[row] = last[text] = at + wide + NOTE_GAP_PX;
  }
}

// The name of a line with an `end`, where it ends within the frame. One that would stand on another is left out: the
// tooltip has it.
export function paintEnds(context, frame, lines, ink) {
  const drawn = [];
  context.textBaseline = "middle";
  context.textAlign = "left";
  for (const { steps, high, end } of lines) {
    if (!end) continue;
    const last = steps.findLastIndex((step, n) => high[n] !== null && isWithin(frame, placed.x(frame, step)));
    if (last < 0) continue;
    const text = end.length > NOTE_CHARS ? `${end.slice(0, NOTE_CHARS - 1)}…` : end;
    const wide = context.measureText(text).width;
    const x = Math.min(placed.x(frame, steps[last]) + NOTE_GAP_PX, frame.right - wide);
    const y = Math.min(frame.bottom - NOTE_PX, Math.max(frame.top + NOTE_PX, placed.y(frame, high[last])));
    if (drawn.some((one) => Math.abs(one.y - y) < NOTE_PX && x < one.to && one.x < x + wide)) continue;
    label(context, text, x, y, ink);
    drawn.push({ x, y, to: x + wide });
  }
}

function label(context, text, x, y, ink) {
  context.strokeStyle = ink("--surface");
  context.lineWidth = HALO_PX;
  context.strokeText(text, x, y);
  context.fillStyle = ink("--muted");
  context.fillText(text, x, y);
}

const isWithin = ({ left, right }, x) => x >= left - 0.5 && x <= right + 0.5;

function upright(context, frame, at, colour, dash) {
  const x = placed.x(frame, at);
  if (isWithin(frame, x)) stroke(context, colour, [[x, frame.top], [x, frame.bottom]], 1, dash);
}

// The area between low and high; a line where these are one. A dashed line follows the highest values.
export function paintLine(context, frame, { steps, low, high, colour, band, dash, thin }, ink) {
  const { left, right, top, bottom } = frame;
  context.save();
  context.beginPath();
  context.rect(left, top, right - left, bottom - top);
  context.clip();
  const points = (values, piece) => piece.map((n) => [placed.x(frame, steps[n]), placed.y(frame, values[n])]);
  for (const piece of pieces(low, high)) {
    const upper = points(high, piece);
    context.globalAlpha = thin ? THIN_ALPHA : 1;
    if (low === high || dash || thin) line(context, ink(colour), upper, dash || thin ? 1.25 : 1.75, DASHES[dash]);
    else area(context, ink(colour), upper, points(low, piece), band);
  }
  context.restore();
}

const DASHES = { dash: [6, 4], dot: [2, 3], dashdot: [8, 3, 2, 3] };

function line(context, colour, points, width, dash = []) {
  if (points.length > 1) {
    stroke(context, colour, points, width, dash);
    return;
  }
  context.fillStyle = colour; // a value without neighbours
  context.beginPath();
  context.arc(points[0][0], points[0][1], 2, 0, 7);
  context.fill();
}

function area(context, colour, upper, lower, band) {
  context.beginPath();
  for (const [x, y] of [...upper, ...lower.toReversed()]) context.lineTo(x, y);
  context.closePath();
  context.fillStyle = colour;
  context.globalAlpha = band ? 0.18 : 0.35;
  context.fill();
  context.globalAlpha = 1;
  if (!band) stroke(context, colour, upper), stroke(context, colour, lower);
}

// Indices of consecutive points with values; between pieces the line has a gap.
function pieces(low, high) {
  const found = [];
  let piece = [];
  for (let n = 0; n <= high.length; n += 1) {
    if (n < high.length && high[n] !== null && low[n] !== null) {
      piece.push(n);
      continue;
    }
    if (piece.length) found.push(piece);
    piece = [];
  }
  return found;
}

// Values that are not finite: × NaN, ▲ Inf, ▼ −Inf, ○ not measured; and arrows where a line leaves the frame.
export function paintMarks(context, frame, lines, marks, ink) {
  const { top, bottom, y: [low, high] } = frame;
  const each = (steps, y, colour, draw) => {
    context.strokeStyle = colour;
    context.fillStyle = colour;
    context.lineWidth = 2;
    let drawn = -Infinity;
    for (const step of steps.toSorted((a, b) => a - b)) {
      const x = placed.x(frame, step);
      if (!isWithin(frame, x) || x - drawn < 3) continue;
      context.beginPath();
      draw(x, y);
      drawn = x;
    }
  };
  const ring = (x, y) => (context.arc(x, y, 2.5, 0, 7), context.stroke());
  const cross = (x, y) => (segments(context, [[x - 4, y - 4], [x + 4, y + 4]], [[x + 4, y - 4], [x - 4, y + 4]]), context.stroke());
  const arrow = (up, filled) => (x, y) => {
    const d = up ? -ARROW_PX : ARROW_PX;
    segments(context, [[x - ARROW_PX, y - d / 2], [x, y + d / 2], [x + ARROW_PX, y - d / 2]]);
    filled ? context.fill() : context.stroke();
  };
  const beyond = (end, outside) => lines.flatMap((one) => one.steps.filter((_, n) => one[end][n] !== null && outside(one[end][n])));
  each(marks.missing, bottom - 5, ink("--faint"), ring);
  each(beyond("high", (value) => value > high), top + 4, ink("--mark"), arrow(true, false));
  each(beyond("low", (value) => value < low), bottom - 5, ink("--mark"), arrow(false, false));
  each(marks.nan, bottom - 5, ink("--critical"), cross);
  each(marks.inf, top + 4, ink("--critical"), arrow(true, true));
  each(marks.minusInf, bottom - 5, ink("--critical"), arrow(false, true));
}

export function paintNothing(context, { left, right, top, bottom }, ink) {
  context.fillStyle = ink("--faint");
  context.textAlign = "center";
  context.textBaseline = "middle";
  context.fillText("No data in this range", (left + right) / 2, (top + bottom) / 2);
}

export const font = (family) => `${LABEL_PX}px ${family}`;

function stroke(context, colour, points, width = 1, dash = []) {
  context.strokeStyle = colour;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.setLineDash(dash);
  context.beginPath();
  for (const [x, y] of points) context.lineTo(x, y);
  context.stroke();
  context.setLineDash([]);
}

function segments(context, ...lines) {
  for (const points of lines) points.forEach(([x, y], n) => (n ? context.lineTo(x, y) : context.moveTo(x, y)));
}
