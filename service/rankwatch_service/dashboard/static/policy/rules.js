// The rules of the policy: what each would have done in the last days, and whether it acts by itself.

import { put } from "../common/api.js";
import { h } from "../common/dom.js";
import { KIND_NAMES, kindName, words } from "../common/format.js";
import { ask, card, empty, said, SEVERITIES, severityPill } from "../components/shell.js";
import { dryRun } from "./dry_run.js";

const ACTIONS = { pause: "Pause", checkpoint: "Checkpoint", rollback: "Roll back", relaunch: "Relaunch", stop: "Stop" };
const ROLLBACK_MODES = { "": "full, else relaunch", full: "full", relaunch: "relaunch", weights: "weights only" };
const TITLES = ["Rule", "Incidents", "Does", "Acts by itself", ""];

// A card with the rules; whoever `may` change them gets a switch and buttons. `changed` is called after a change.
export function rulesCard(policy, may, changed) {
  const { rules } = policy;
  const set = async (wanted, done) => {
    const stored = await said(put("policy", { ...policy, rules: wanted }), done);
    if (stored) changed();
    return stored;
  };
  const tools = [rules.length > 0 && h("button", { onclick: () => dryRun(policy, { title: "What the rules would have done", does: "Done" }) }, "Dry run"), may && h("button", { onclick: () => add(policy, set) }, "New rule")];
  const head = h("tr", {}, TITLES.map((title) => h("th", {}, title)));
  const rows = rules.map((rule) => row(policy, rule, may, set));
  const table = h("div", { class: "wide", tabindex: "0" }, h("table", { class: "stack" }, h("thead", {}, head), h("tbody", {}, rows)));
  return card("Rules", rules.length ? table : empty(h("div"), "None: people are notified, and nothing is done to a job."), { hint: "the first that matches decides", tools });
}

function row(policy, rule, may, set) {
  const others = policy.rules.filter((one) => one !== rule);
  const acts = h("input", { type: "checkbox", checked: rule.mode === "act", disabled: !may, "aria-label": `${rule.id} acts by itself`, onchange: () => turned(policy, rule, acts, set) });
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("b", {}, rule.id)),
    h("td", { class: "break" }, rule.severity && severityPill(rule.severity), " ", matched(rule)),
    h("td", {}, does(rule)),
    h("td", {}, rule.mode === "notify" ? h("span", { class: "muted" }, "notifies only") : h("label", { class: "check inline" }, acts, rule.mode === "act" ? "acts" : "proposes")),
    h("td", { class: "right nowrap" }, may && h("button", { class: "small", "aria-label": `Remove ${rule.id}`, onclick: async () => (await ask(`Remove ${rule.id}?`, "The next rule that matches decides about its incidents.", [], "Remove", true)) && set(others, `${rule.id} is removed`) }, "Remove")),
  );
}

function matched(rule) {
  return [rule.kind ? kindName(rule.kind) : "all", rule.job && `of ${rule.job}`, rule.project && `of project ${rule.project}`, rule.confidence_min > 0 && `confidence from ${rule.confidence_min}`].filter(Boolean).join(" · ");
}

function does(rule) {
  return rule.action ? [ACTIONS[rule.action], rule.rollback_mode && ` (${words(rule.rollback_mode).toLowerCase()})`] : "Nothing";
}

// A rule begins to act only after its dry run was seen.
async function turned(policy, rule, box, set) {
  const wanted = { ...rule, mode: box.checked ? "act" : "suggest" };
  const rules = policy.rules.map((one) => (one === rule ? wanted : one));
  if (box.checked && !(await dryRun({ ...policy, rules }, { rule: rule.id, title: `Let ${rule.id} act by itself?`, does: "Switch on" }))) box.checked = false;
  else if (!(await set(rules, box.checked ? `${rule.id} acts by itself` : `${rule.id} only proposes`))) box.checked = !box.checked;
}

async function add(policy, set) {
  const options = (texts, chosen) => Object.entries(texts).map(([value, text]) => h("option", { value, selected: value === chosen }, text));
  const choice = (label, name, texts, chosen) => h("label", {}, label, h("select", { name }, options(texts, chosen)));
  const text = (label, name, more) => h("label", {}, label, h("input", { name, autocomplete: "off", maxlength: 200, ...more }));
  const fields = [
    text("Name", "id", { required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9_.\\-]*" }),
    choice("Kind", "kind", { "": "every kind", ...KIND_NAMES }, ""),
    choice("Severity", "severity", { "": "every severity", ...Object.fromEntries(SEVERITIES.map((one) => [one, one])) }, ""),
    text("Job", "job", { placeholder: "every job" }),
    choice("Action", "action", ACTIONS, "pause"),
    choice("How to roll back", "rollback_mode", ROLLBACK_MODES, ""),
    choice("Where", "before", Object.fromEntries([...policy.rules.map((one) => [one.id, `before ${one.id}`]), ["", "last"]]), ""),
  ];
  const answer = await ask("New rule", "It only proposes its action, until it is switched to act by itself.", fields, "Dry run");
  if (!answer) return;
  const { id, kind, severity, job, action } = answer;
  const rule = { id: id.trim(), kind, severity, job: job.trim(), mode: "suggest", action, rollback_mode: action === "rollback" ? answer.rollback_mode : "" };
  const at = answer.before ? policy.rules.findIndex((one) => one.id === answer.before) : policy.rules.length;
  const placed = (mode) => policy.rules.toSpliced(at, 0, { ...rule, mode });
  if (await dryRun({ ...policy, rules: placed("act") }, { rule: rule.id, title: `If ${rule.id} acted by itself`, does: "Add as a proposal" })) set(placed("suggest"), `${rule.id} is added`);
}
