// What to do about an incident: the runbook's first steps, the best command with its price, and the way back.

import { DIRECTIVES } from "../components/directives.js";
import { h, icon, withCode } from "../common/dom.js";
import { duration, number, words } from "../common/format.js";
import { card, statePill } from "../components/shell.js";

const LOSES_STEPS = ["rollback", "relaunch"];

// `hours` is the unit of costs; `request(action)` asks for a command; null for whoever may not give one.
export function responseCard(incident, job, checkpoints, hours, request) {
  return card("What to do", h("div", { class: "body" }, incident.state === "resolved" ? over(incident) : advised(incident, job, checkpoints, hours, request)));
}

function over(incident) {
  return h("p", { class: "muted" }, incident.first_steps.map(withCode));
}

function advised(incident, job, checkpoints, hours, request) {
  const suggestion = incident.suggestion ?? {};
  const good = checkpoints.find((one) => one.id === (suggestion.checkpoint ?? incident.checkpoint));
  const back = good && job ? job.step - good.step : null;
  const steps = incident.first_steps.length > 0 && h("ol", { class: "steps" }, incident.first_steps.map((text) => h("li", {}, withCode(text))));
  return [steps, ways(incident, job, suggestion, { back, hours }, request), abilities(incident, job), !incident.evidence.ended_by_itself && lastGood(incident, good, back, job)];
}

// The action of the best command of a suggestion; null if there is none.
export function bestAction(incident) {
  const { action } = incident.suggestion ?? {};
  return incident.state !== "resolved" && DIRECTIVES[action] ? action : null;
}

function ways(incident, job, suggestion, price, request) {
  // Until when to wait, and for what, stands in the steps.
  const all = [suggestion, ...(suggestion.alternatives ?? [])].filter(({ action }) => DIRECTIVES[action]);
  const best = all[0] === suggestion ? suggestion : null;
  const others = all.filter((one) => one !== best);
  if (!all.length) return null;
  const offer = (one, primary) => {
    const directive = DIRECTIVES[one.action];
    const able = request && job && job.state !== "ended";
    return h(
      "li",
      { class: primary ? "best" : "" },
      h("div", { class: "way" }, h("b", {}, directive.name), h("span", { class: "cost" }, priced(one, price))),
      h("div", { class: "muted" }, one.reason),
      able && h("button", { class: primary ? "primary" : "small", onclick: () => request(one.action) }, icon(directive.icon), directive.name),
      primary && h("code", { class: "copy", title: "Command for a terminal" }, `rankwatch ${one.action} ${shellWord(incident.job)} --wait`),
    );
  };
  const worth = suggestion.break_even_s > 0 && h("p", { class: "hint" }, `Pays off if the wait exceeds ${duration(suggestion.break_even_s)}.`);
  const rest = others.length > 0 && h("details", { "data-fold": "alternatives" }, h("summary", {}, `${number(others.length)} ${best ? "other " : ""}${others.length === 1 ? "action" : "actions"}`), h("ul", { class: "ways" }, others.map((one) => offer(one, false))));
  return [best && h("ul", { class: "ways" }, offer(best, true)), worth, rest];
}

function priced(way, { back, hours }) {
  const known = way.cost_gpu_hours !== null && way.cost_gpu_hours !== undefined;
  const cost = known ? `${number(way.cost_gpu_hours, 2)} ${hours}${way.action === "pause" ? " every hour" : ""}` : "cost unknown";
  return LOSES_STEPS.includes(way.action) && back > 0 ? `${cost}, ${number(back)} steps lost` : cost;
}

// What the job supports: suggestions leave out the rest.
function abilities(incident, job) {
  const can = incident.can.map((action) => (DIRECTIVES[action]?.name ?? words(action)).toLowerCase());
  const text = job?.state === "ended" ? "The job has ended." : can.length ? `This job can: ${can.join(", ")}.` : "rankwatch can only watch this job. To pause or roll it back from here, its loop needs watch.steps (docs/sdk.md), and its agent must report.";
  return h("p", { class: "hint" }, text);
}

function lastGood(incident, checkpoint, back, job) {
  if (!checkpoint) return h("div", { class: "lastgood" }, h("h3", { class: "sub" }, "Last good checkpoint"), h("p", { class: "muted break" }, incident.checkpoint ?? "none"));
  return h(
    "div",
    { class: "lastgood" },
    h("h3", { class: "sub" }, "Last good checkpoint"),
    h("p", {}, h("b", {}, `step ${number(checkpoint.step)}`), ` · ${checkpoint.tier} `, statePill(checkpoint.verdict)),
    back > 0 && h("p", { class: "muted" }, `${number(back)} steps would be repeated (${duration(back * (job.step_time_s ?? NaN))}).`),
  );
}

function shellWord(text) {
  return /^[\w.@%+=:,/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}
