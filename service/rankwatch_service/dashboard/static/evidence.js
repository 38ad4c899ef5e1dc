// Evidence of any detector: numbers beside their baseline where the names say which belongs to which, tables, texts.

import { h } from "./dom.js";
import { measured, number, words } from "./format.js";

const BASELINES = [(name) => `peers_${name}`, (name) => `usual_${name}`, (name) => `baseline_${name}`, (name) => `${name}_baseline`];
const PLAIN_BASELINES = { age_s: "deadline_s" };
const ROWS_MAX = 24;
const LIST_MAX = 16;

// Splits evidence into what is compared, what is one value, and what is long text.
export function sorted(evidence) {
  const taken = new Set();
  const compared = [];
  for (const [name, value] of Object.entries(evidence)) {
    const baseline = [...BASELINES.map((of) => of(name)), PLAIN_BASELINES[name]].find((one) => typeof evidence[one] === "number");
    if (typeof value !== "number" || !baseline) continue;
    compared.push({ name, value, baseline, against: evidence[baseline] });
    taken.add(name).add(baseline);
  }
  const rest = Object.entries(evidence).filter(([name]) => !taken.has(name));
  const texts = rest.flatMap(([name, value]) => longTexts(name, value));
  const values = rest.filter(([name, value]) => longTexts(name, value).length === 0);
  return { compared, values, texts };
}

function longTexts(name, value) {
  if (typeof value === "string") return value.includes("\n") || value.length > 240 ? [{ name, text: value }] : [];
  if (value === null || typeof value !== "object") return [];
  const parts = Object.entries(value).flatMap(([key, one]) => longTexts(`${name} ${key}`, one));
  return parts.length ? parts.concat(short(name, value)) : [];
}

// What stands beside a long text in the same object, as one line in front of it.
function short(name, value) {
  const facts = Object.entries(value).filter(([, one]) => typeof one !== "object" && !(typeof one === "string" && one.includes("\n")));
  return facts.length && !Array.isArray(value) ? [{ name, facts }] : [];
}

export function comparison({ name, value, baseline, against }) {
  const most = Math.max(Math.abs(value), Math.abs(against)) || 1;
  return h(
    "div",
    { class: "comparison" },
    h("div", { class: "what" }, words(name), against > 0 && value > 0 && h("b", { class: "times" }, `× ${number(value / against, 3)}`)),
    bar("now", measured(name, value), Math.abs(value) / most, ""),
    bar("base", measured(baseline, against), Math.abs(against) / most, words(baseline).toLowerCase()),
  );
}

function bar(kind, value, share, label) {
  const filled = h("span", { class: `fill ${kind}` });
  filled.style.width = `${Math.max(1, share * 100)}%`;
  return h("div", { class: "bar" }, h("span", { class: "track" }, filled), h("span", { class: "number" }, value), label && h("span", { class: "faint" }, label));
}

export function facts(values) {
  return h("dl", { class: "facts" }, values.slice(0, ROWS_MAX).map(([name, value]) => [h("dt", {}, words(name)), h("dd", {}, shown(name, value))]));
}

function shown(name, value) {
  if (Array.isArray(value)) {
    if (!value.length) return h("span", { class: "faint" }, "none");
    if (value.every((one) => typeof one === "object" && one !== null)) return value.slice(0, LIST_MAX).map((one) => h("div", {}, line(one)));
    return value.slice(0, LIST_MAX).map((one) => measured(name, one)).join(", ") + (value.length > LIST_MAX ? ` +${value.length - LIST_MAX}` : "");
  }
  if (value !== null && typeof value === "object") return line(value) || h("span", { class: "faint" }, "none");
  return measured(name, value);
}

function line(object) {
  return Object.entries(object)
    .filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => `${words(name).toLowerCase()} ${typeof value === "object" ? JSON.stringify(value) : measured(name, value)}`)
    .join(" · ");
}
