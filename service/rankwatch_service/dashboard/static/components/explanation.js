// Why an incident was opened, and why not earlier: each statistic against its threshold, and what was left out.

import { Chart } from "../charts/line_chart.js";
import { fill, h } from "../common/dom.js";
import { kindName, number } from "../common/format.js";
import { card } from "./shell.js";

const CHARTS_MAX = 4;

// A card that `show(items)` fills with explanations; it is hidden while there are none.
export function explanationCard() {
  const body = h("div");
  const fold = h("details", {}, h("summary", {}, "Why it was opened, and why not earlier (dashed: the threshold)"), body);
  const element = card("How it was found", h("div", { class: "body" }, fold));
  element.hidden = true;
  return {
    element,
    show(items) {
      element.hidden = items.length === 0;
      fill(body, items.slice(0, CHARTS_MAX).map((one) => explained(one, items.length > 1)));
    },
  };
}

function explained(one, several) {
  const holder = h("div");
  const parts = h("div", {}, several && h("h3", { class: "sub" }, `${kindName(one.kind)} of ${one.scope}`), h("p", {}, one.why), h("p", {}, one.why_not_earlier), holder, earlierReports(one), leftOut(one.rows));
  draw(one, holder);
  return parts;
}

function draw({ statistic, points, label, onset_step: onset }, holder) {
  const times = points.step.some((step) => step === null);
  const at = times ? points.at_unix_ns.map((ns) => ns / 1e6) : [...points.step];
  const values = [...points.value];
  const thresholds = [...points.threshold];
  // The evidence of a run begins at 0; points are kept from half of the threshold on.
  if (statistic === "log_likelihood_ratio" && onset < at[0]) {
    at.unshift(onset - 1);
    values.unshift(0);
    thresholds.unshift(thresholds[0]);
  }
  const chart = new Chart(holder, { metric: "", label: `${label} and its threshold`, times });
  const value = { name: label, steps: at, low: values, high: values, colour: "--accent" };
  const threshold = { name: "threshold", steps: at, low: thresholds, high: thresholds, colour: "--mark", dash: "dash" };
  chart.show([value, threshold], { nan: [], inf: [], minusInf: [], missing: [] });
}

function earlierReports({ earlier, unit }) {
  const sized = (size) => (size === null ? "–" : unit === "ratio" ? `× ${number(size, 3)}` : `${number(size, 4)}${unit === "s" ? " s" : ""}`);
  if (!earlier.length) return null;
  const heads = ["Steps after the onset", "It was", "It needed"].map((text) => h("th", {}, text));
  const row = (one) => h("tr", {}, h("td", {}, number(one.rows)), h("td", {}, sized(one.size)), h("td", {}, one.needed === null ? "more steps" : sized(one.needed)));
  return h("table", { class: "earlier" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, earlier.map(row)));
}

function leftOut({ judged = 0, ...reasons }) {
  const left = Object.entries(reasons).map(([reason, count]) => `${reason} ${number(count)}`);
  return h("p", { class: "hint" }, `Steps judged: ${number(judged)}.`, left.length > 0 && ` Left out: ${left.join("; ")}.`);
}
