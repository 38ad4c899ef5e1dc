// What a policy would have done about the incidents of the last days.

import { post } from "../common/api.js";
import { h } from "../common/dom.js";
import { ago, clock, duration, kindName, moment, number, words } from "../common/format.js";
import { ask } from "../components/shell.js";

const SHOWN = 20;

// What `policy` decides about past incidents, as if hands off were off.
export const preview = (policy) => post("policy/preview", { ...policy, hands_off: false });

// Shows in a dialog what `rule` (null: all of them) would have done by this preview of a policy. The button says `does`
// and sends `send`, as in `ask`.
export function dryRun(found, handsOff, { rule = null, title, does, send = null }) {
  const items = found.items.filter((one) => rule === null || one.rule === rule);
  return ask(title, null, [h("div", { class: "column dry-run" }, outcome(found, items, handsOff))], does, false, send);
}

function outcome({ days, incidents, left_out: leftOut }, items, handsOff) {
  const [acted, proposed] = ["act", "suggest"].map((mode) => items.filter((one) => one.mode === mode));
  const judged = `${number(incidents)} ${incidents === 1 ? "incident" : "incidents"} of the last ${days} days`;
  return [
    h("p", {}, `Of ${judged}, `, h("b", {}, `${number(acted.length)} would have been acted on`), ` and ${number(proposed.length)} would have had the action proposed.`),
    acted.length > 0 && h("table", { class: "compact" }, h("tbody", {}, acted.slice(0, SHOWN).map(row))),
    acted.length > SHOWN && h("p", { class: "muted" }, `The newest ${SHOWN} are shown.`),
    proposed.length > 0 && h("div", {}, h("h3", { class: "sub" }, "Only proposed, because"), h("ul", { class: "lines" }, reasons(proposed).map(([reason, count]) => h("li", {}, h("b", {}, number(count)), ` ${reason}`)))),
    h("p", { class: "muted" }, "Decided by the present state of each incident. Nothing is done.", leftOut > 0 && ` ${number(leftOut)} older incidents were left out.`, handsOff && " Hands off is on: until it is off, everything is only proposed."),
  ];
}

function row(one) {
  const lasted = one.resolved_unix_ns === null ? "not over yet" : `over after ${duration((one.resolved_unix_ns - one.detected_unix_ns) / 1e9)}`;
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("a", { href: `/incidents/${encodeURIComponent(one.incident_id)}`, title: one.summary }, kindName(one.kind)), ` in ${one.job}`, h("div", { class: "under", title: moment(one.detected_unix_ns) }, `${clock(one.detected_unix_ns)}, ${ago(one.detected_unix_ns)} · ${lasted}`)),
    h("td", { class: "right" }, words(one.action), one.approval_required && h("div", { class: "under" }, "after approval")),
  );
}

// Reasons with their counts, the most frequent first. Figures in them differ from incident to incident.
function reasons(items) {
  const counts = Object.groupBy(items, (one) => one.reason.replace(/^confidence [\d.]+/, "the confidence"));
  return Object.entries(counts).map(([reason, all]) => [reason, all.length]).sort(([, a], [, b]) => b - a);
}
