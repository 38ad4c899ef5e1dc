// How precise each kind of incident is, by what people say of its incidents.

import { h } from "../common/dom.js";
import { kindName, number } from "../common/format.js";
import { card, empty } from "./shell.js";

const COLUMNS = ["Kind", "Precision", "Useful", "Noise", "Duplicate", "No answer"];

// A card with a row for each kind, below it one for each job with answers, and how often the policy acted on noise.
export function precisionCard({ days, kinds, actions }, ofJobs) {
  const rows = kinds.flatMap((kind) => [row(kind, h("b", {}, kindName(kind.kind)), proposal(kind)), ...ofJobs.filter((one) => one.kind === kind.kind && answered(one)).map((one) => row(one, `of ${one.job}`, null))]);
  const table = h("table", {}, h("thead", {}, h("tr", {}, COLUMNS.map((title) => h("th", {}, title)))), h("tbody", {}, rows));
  return card("Precision", [rows.length ? h("div", { class: "wide", tabindex: "0" }, table) : empty(h("div"), `No incidents in the last ${days} days.`), h("p", { class: "body muted" }, falseActions(actions))], { hint: `what people say of the incidents of the last ${days} days` });
}

function row(counts, name, more) {
  const figures = [counts.useful, counts.noise, counts.duplicate, counts.unanswered].map((count) => h("td", {}, number(count)));
  return h("tr", {}, h("td", { class: "break" }, name, more), h("td", {}, share(counts)), figures);
}

const answered = (one) => one.useful + one.noise + one.duplicate > 0;
const percent = (ratio) => `${Math.round(ratio * 100)}%`;

// The ratio, and the range in which it lies: 1 of 1 says little.
function share({ ratio, low, high }) {
  if (ratio === null) return "–";
  return [percent(ratio), h("div", { class: "muted" }, `${percent(low)} to ${percent(high)}`)];
}

function proposal({ demotion, withheld }) {
  return [
    withheld && h("div", {}, h("span", { class: "pill warning", title: "Its precision is not known to reach precision_min" }, "actions wait")),
    demotion && h("div", {}, h("span", { class: "pill warning" }, "proposed for demotion"), h("div", { class: "muted" }, demotion)),
  ];
}

function falseActions({ useful, noise, duplicate, unanswered, false_ratio: ratio }) {
  if (ratio === null) return "The policy has not acted in these days.";
  const all = useful + noise + duplicate + unanswered;
  return `Actions of the policy in these days: ${number(all)}, of which ${number(noise)} on noise (${percent(ratio)}) and ${number(unanswered)} on incidents without an answer.`;
}
