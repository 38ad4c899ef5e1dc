// Evidence of any detector: numbers next to their baselines (matched by name), tables and texts.

import { h } from "../common/dom.js";
import { measured, number, words } from "../common/format.js";

const BASELINES = [(name) => `peers_${name}`, (name) => `usual_${name}`, (name) => `baseline_${name}`, (name) => `${name}_baseline`];
const PLAIN_BASELINES = { age_s: ["deadline_s"], since_s: ["usual_s"], seconds: ["usual_s"], stage_busy_s: ["others_busy_s"], value: ["usual", "best", "threshold", "level"] };
const ROWS_MAX = 24;
const LIST_MAX = 16;

const LABELS = {
  age_s: "Without progress, as last reported",
  busy_s: "Busy time",
  peers_busy_s: "peers",
  usual_step_s: "Usual step",
  os_state: "process state",
  ratio: "Slowdown factor",
  rate: "Relative speed",
  witness: "Judged by",
  rows: "Steps compared",
  sigma: "Usual spread",
  log_likelihood_ratio: "Log-likelihood ratio",
  phase_excess_s: "Over the peers by phase",
  ranks_stand: "Where the ranks stand",
  stacks_left_out: "Stacks not shown",
};
const SHOWN_ELSEWHERE = new Set(["cost_gpu_hours_per_hour", "ended_by_itself", "ended_with_job", "pids"]);

export const label = (name) => LABELS[name] ?? words(name);

// Splits evidence into values with a baseline, single values, and long texts {name, text, hint}.
export function sorted({ stacks = [], output = [], ...evidence }) {
  const taken = new Set(SHOWN_ELSEWHERE);
  const compared = [];
  for (const [name, value] of Object.entries(evidence)) {
    const baseline = [...BASELINES.map((of) => of(name)), ...(PLAIN_BASELINES[name] ?? [])].find((one) => typeof evidence[one] === "number");
    if (typeof value !== "number" || !baseline) continue;
    compared.push({ name, value, baseline, against: evidence[baseline] });
    taken.add(name).add(baseline);
  }
  const rest = Object.entries(evidence).filter(([name, value]) => !taken.has(name) && value !== null && value !== "");
  const printed = output.length ? [{ name: "Output", text: output.join("\n"), hint: "the named rank, on its host" }] : [];
  const texts = [...printed, ...stackTexts(stacks), ...rest.filter(isLong).map(([name, text]) => ({ name: label(name), text, hint: null }))];
  return { compared, values: rest.filter((one) => !isLong(one)), texts };
}

const isLong = ([name, value]) => typeof value === "string" && (value.includes("\n") || (value.length > 240 && name !== "ranks_stand"));

// One text for all ranks at the same place, the fewest first: they do something else than the others.
function stackTexts(stacks) {
  return stacks.map(({ ranks, count, rank, stack, where, ...rest }) => ({
    name: `Stack of ${count > 1 ? `${number(count)} ranks: ` : "rank "}${ranks}`,
    text: stack || "No Python stack; see the process state.",
    hint: (count > 1 ? `rank ${rank}: ` : "") + line(rest),
  }));
}

export function comparison({ name, value, baseline, against }) {
  const most = Math.max(Math.abs(value), Math.abs(against)) || 1;
  return h(
    "div",
    { class: "comparison" },
    h("div", { class: "what" }, label(name), against > 0 && value > 0 && h("b", { class: "times" }, `× ${number(value / against, 3)}`)),
    bar("now", "measured", measured(name, value), Math.abs(value) / most),
    bar("base", label(baseline).toLowerCase(), measured(baseline, against), Math.abs(against) / most),
  );
}

// The baseline of a value, in words.
export const against = ({ baseline, against: value }) => `${label(baseline).toLowerCase()} ${measured(baseline, value)}`;

function bar(kind, named, value, share) {
  const filled = h("span", { class: `fill ${kind}` });
  filled.style.width = `${Math.max(1, share * 100)}%`;
  return h("div", { class: "bar" }, h("span", { class: "muted" }, named), h("span", { class: "track" }, filled), h("span", { class: "number" }, value));
}

export function facts(values) {
  return h("dl", { class: "facts" }, values.slice(0, ROWS_MAX).map(fact));
}

function fact([name, value]) {
  const width = isWide(value) ? "wide" : "";
  return [h("dt", { class: width }, label(name)), h("dd", { class: width }, shown(name, value))];
}

const isWide = (value) => JSON.stringify(value).length > 60;

function shown(name, value) {
  if (Array.isArray(value)) {
    if (!value.length) return h("span", { class: "faint" }, "none");
    if (value.every((one) => typeof one === "object" && one !== null)) return value.slice(0, LIST_MAX).map((one) => h("div", {}, line(one, name)));
    if (value.every((one) => typeof one === "string" && one.endsWith("."))) return value.slice(0, LIST_MAX).map((one) => h("div", {}, one));
    return value.slice(0, LIST_MAX).map((one) => measured(name, one)).join(", ") + (value.length > LIST_MAX ? ` +${value.length - LIST_MAX}` : "");
  }
  if (/^https?:\/\/\S+$/.test(value)) return h("a", { href: value }, value);
  if (value !== null && typeof value === "object") return line(value, name) || h("span", { class: "faint" }, "none");
  return measured(name, value);
}

// An object as one line. If its name ends with a unit, as phase_excess_s does, its numbers have that unit.
function line(object, unitOf = "") {
  return Object.entries(object)
    .filter(([, value]) => value !== null && value !== "")
    .map(([name, value]) => `${label(name).toLowerCase()} ${typeof value === "object" ? `(${line(value, name)})` : measured(/_s$|_bytes$/.test(unitOf) ? unitOf : name, value)}`)
    .join(" · ");
}
