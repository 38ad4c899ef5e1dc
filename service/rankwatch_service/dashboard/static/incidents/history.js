// What happened: changes before the onset, then all that was noticed, said and done.

import { h } from "../common/dom.js";
import { ago, clock, moment, number, words } from "../common/format.js";
import { card, endedWithJob } from "../components/shell.js";

const CHANGES_SHOWN = 5;

// `comment` handles the form of a comment; null for whoever may not write one.
export function historyCard(incident, comment) {
  const before = changesBefore(incident);
  const recent = before.slice(-CHANGES_SHOWN);
  const earlier = before.slice(0, -CHANGES_SHOWN);
  const last = endedWithJob(incident) && incident.history.findLast((one) => one.what === "resolved");
  const transitions = incident.history.map((one) => ({ at: one.at_unix_ns, what: one === last ? "Job ended" : words(one.what), who: one.actor, text: one.text, kind: one.what }));
  const say = comment && h("form", { class: "say", onsubmit: comment }, h("textarea", { name: "text", required: true, maxLength: 2000, "aria-label": "Comment", placeholder: "Write a comment" }), h("button", {}, "Comment"));
  return card(
    "History",
    h(
      "div",
      { class: "body" },
      earlier.length > 0 && h("details", { "data-fold": "changes" }, h("summary", {}, `${earlier.length} earlier changes`), h("ol", { class: "timeline" }, earlier.map(entry))),
      h("ol", { class: "timeline" }, [...recent, ...transitions].sort((a, b) => a.at - b.at).map(entry)),
      say,
    ),
  );
}

function entry(one) {
  return h("li", { class: one.kind }, h("time", { title: moment(one.at), datetime: new Date(one.at / 1e6).toISOString() }, clock(one.at), h("span", { class: "ago" }, ago(one.at))), h("div", {}, h("b", { class: "break" }, one.what), " ", h("span", { class: "muted" }, one.who), one.text && h("div", { class: "break" }, one.text)));
}

// Changes before the onset; the same change on several ranks at one step is one entry.
function changesBefore(incident) {
  const changes = [];
  for (const { what, step, unix_ns: at } of incident.changes_before) {
    const last = changes.at(-1);
    if (last?.what === what && last.step === step) last.ranks += 1;
    else changes.push({ what, step, at, ranks: 1, kind: "change", text: "" });
  }
  for (const one of changes) one.who = ["before the onset", one.step !== null && `step ${number(one.step)}`, one.ranks > 1 && `${one.ranks} ranks`].filter(Boolean).join(", ");
  return changes;
}
