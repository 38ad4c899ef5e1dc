// Kinds of incidents that a table shows best: fingerprints by replica, and ranks of a hang by collective and phase.

import { h } from "../common/dom.js";
import { duration, MISSING, number, words } from "../common/format.js";

const ROWS = 6;

// Evidence that a table shows, by kind.
export const TABULATED = { corruption: ["fingerprints", "replicas", "replicas_compared", "equal_step"], hang: ["missing", "waiting"] };

// Fingerprints of parameters: ranks that hold the same bits in one row, the deviating ones first.
export function fingerprints({ fingerprints: deviating = {}, replicas = {}, replicas_compared: compared, equal_step: equal }) {
  const rows = [...groups(deviating).map((one) => ({ ...one, differs: true })), ...groups(replicas)];
  const usual = groups(replicas)[0]?.value ?? "";
  const row = ({ value, ranks, differs }) =>
    h("tr", { class: differs ? "differs" : "" }, h("td", { class: "mono" }, differs ? marked(value, usual) : value), h("td", {}, span(ranks)), h("td", {}, differs ? h("b", {}, "differs") : "agree"));
  const listed = Object.keys(replicas).length + Object.keys(deviating).length;
  const text = [compared && `${number(compared)} replicas compared${compared > listed ? `, ${number(listed)} of them listed` : ""}`, equal !== undefined && equal !== null && `all equal in step ${number(equal)}`].filter(Boolean).join("; ");
  return [table(["Fingerprint", "Ranks", "Replicas"], rows.slice(0, ROWS).map(row)), text && h("p", { class: "hint" }, `${text}.`)];
}

function groups(byRank) {
  const found = Object.groupBy(Object.entries(byRank), ([, value]) => String(value));
  return Object.entries(found).map(([value, of]) => ({ value, ranks: of.map(([rank]) => Number(rank)) })).sort((a, b) => b.ranks.length - a.ranks.length);
}

// The digits that differ from the usual fingerprint stand out.
function marked(value, usual) {
  return [...value].map((digit, n) => (usual && digit !== usual[n] ? h("mark", {}, digit) : digit));
}

// Ranks of a hang: those that did not arrive one by one, then those that wait for them, by phase.
export function standing({ missing = [], waiting = [], stacks = [] }) {
  const stackOf = (rank) => stacks.find((one) => holds(String(one.ranks), rank))?.where ?? MISSING;
  const late = missing.map((one) => h("tr", { class: "differs" }, h("td", {}, h("b", {}, `rank ${one.rank}`)), h("td", { class: "right" }, number(one.collective_seq ?? null)), h("td", {}, [one.phase && words(one.phase), one.phase_age_s && `for ${duration(one.phase_age_s)}`].filter(Boolean).join(" ") || MISSING), h("td", { class: "right" }, number(one.step ?? null)), h("td", {}, one.os_state ?? MISSING), h("td", { class: "mono break" }, stackOf(one.rank))));
  const rest = waiting.map((one) => h("tr", {}, h("td", {}, one.ranks === 1 ? "1 rank waits" : `${number(one.ranks)} ranks wait`), h("td", { class: "right" }, number(one.collective_seq ?? null)), h("td", {}, one.phase ? words(one.phase) : MISSING), h("td", { class: "right" }, number(one.step ?? null)), h("td", {}, MISSING), h("td", {}, MISSING)));
  const hidden = late.length - ROWS;
  return [table(["Ranks", "Collective", "Phase", "Step", "Process", "Stack"], [...late.slice(0, ROWS), ...rest.slice(0, ROWS)]), hidden > 0 && h("p", { class: "hint" }, `${number(hidden)} more ${hidden === 1 ? "rank" : "ranks"} did not arrive.`)];
}

// Whether a list such as 0-2,4 holds a rank.
function holds(list, rank) {
  return list.split(",").some((part) => {
    const [first, last = first] = part.split("-").map(Number);
    return first <= rank && rank <= last;
  });
}

function table(heads, rows) {
  return h("div", { class: "wide", tabindex: "0" }, h("table", { class: "compact standing" }, h("thead", {}, h("tr", {}, heads.map((text) => h("th", { scope: "col", class: ["Collective", "Step"].includes(text) ? "right" : "" }, text)))), h("tbody", {}, rows)));
}

function span(ranks) {
  const runs = [];
  for (const rank of ranks.toSorted((a, b) => a - b)) {
    const last = runs.at(-1);
    if (last && last[1] === rank - 1) last[1] = rank;
    else runs.push([rank, rank]);
  }
  return runs.map(([a, b]) => (a === b ? a : `${a}–${b}`)).join(", ");
}
