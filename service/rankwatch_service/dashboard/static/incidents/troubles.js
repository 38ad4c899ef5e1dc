// What is wrong with a job now, at the top of its page: each incident as its sentence, with what it costs and buttons.

import { path, post } from "../common/api.js";
import { h } from "../common/dom.js";
import { clock, number, words } from "../common/format.js";
import { guarded, SEVERITIES, severityPill, toast } from "../components/shell.js";
import { silence } from "./silence.js";

const SHOWN = 3;
export const MAY_BE_MEANT = ["loss_spike", "loss_divergence", "slowdown"];

// `open` are unresolved incidents. `may`: the viewer may acknowledge; `changed` runs after a change.
export function troublesNow(open, accelerated, may, changed) {
  const urgent = open.toSorted((a, b) => SEVERITIES.indexOf(a.severity) - SEVERITIES.indexOf(b.severity) || b.onset_unix_ns - a.onset_unix_ns);
  const rows = urgent.slice(0, SHOWN).map((one) => trouble(one, accelerated, may, changed));
  const more = open.length - rows.length;
  return rows.length ? h("section", { class: "card", "aria-label": "Unresolved incidents" }, rows, more > 0 && h("div", { class: "rest" }, h("a", { href: `/incidents?job=${encodeURIComponent(open[0].job)}` }, `${number(more)} more`))) : null;
}

function trouble(incident, accelerated, may, changed) {
  const cost = incident.impact_gpu_hours_per_hour;
  const facts = [`since ${clock(incident.onset_unix_ns)}`, cost > 0 && `costs ${number(cost, 2)} ${accelerated ? "GPU" : "rank"}-hours every hour`, incident.acknowledged_by && `${incident.acknowledged_by} is on it`];
  return h(
    "div",
    { class: "trouble" },
    severityPill(incident.severity),
    h("p", { class: "break" }, h("a", { class: "title", href: `/incidents/${encodeURIComponent(incident.id)}` }, incident.summary), h("span", { class: "under" }, facts.filter(Boolean).join(" · "))),
    may && h("div", { class: "actions" }, incident.state === "open" && act("Acknowledge", incident, "acknowledge", {}, changed), MAY_BE_MEANT.includes(incident.kind) && meant(incident, changed), h("button", { class: "small", onclick: () => silence(incident) }, "Silence")),
  );
}

// Resolves an incident whose level is accepted, as a change of data or schedule was meant to do this.
export function meant(incident, changed) {
  return act("This was intended", incident, "resolve", { text: "this was intended" }, changed);
}

function act(label, incident, action, body, changed) {
  const send = async () => {
    if (await guarded(() => post(path("incidents", incident.id, action), body))) toast(`${words(action)}d`.replace("ee", "e"));
    changed();
  };
  return h("button", { class: "small", onclick: send }, label);
}
