// The rules of the policy: what each would have done in the last days, and whether it acts by itself.

import { put } from "../common/api.js";
import { h } from "../common/dom.js";
import { ACTIONS, KIND_NAMES, kindName, words } from "../common/format.js";
import { ask, card, empty, said, SEVERITIES, severityPill, toast } from "../components/shell.js";
import { dryRun, preview } from "./dry_run.js";

const NAMES = Object.fromEntries(Object.entries(ACTIONS).filter(([, traits]) => traits.may_be_automatic).map(([action, { name }]) => [action, name]));
const ROLLBACK_MODES = { "": "full, else relaunch", full: "full", relaunch: "relaunch" };
const TITLES = ["Rule", "Incidents", "Does", "Acts by itself", ""];

// A card with the rules; whoever `may` change them gets a switch and buttons. `changed` is called after a change.
export function rulesCard(policy, may, changed) {
  const { rules } = policy;
  const set = (wanted) => put("policy", { ...policy, rules: wanted });
  const done = (stored, text) => {
    if (!stored) return false;
    toast(text);
    changed();
    return true;
  };
  const tools = [rules.length > 0 && h("button", { onclick: () => show(policy) }, "Dry run"), may && h("button", { onclick: () => add(policy, set, done) }, "New rule")];
  const head = h("tr", {}, TITLES.map((title) => h("th", {}, title)));
  const rows = rules.map((rule) => row(policy, rule, may, set, done));
  const table = h("div", { class: "wide", tabindex: "0" }, h("table", { class: "stack" }, h("thead", {}, head), h("tbody", {}, rows)));
  return card("Rules", rules.length ? table : empty(h("div"), "None: people are notified, and nothing is done to a job."), { hint: "the first that matches decides", tools });
}

async function show(policy) {
  const found = await said(preview(policy));
  if (found) dryRun(found, policy.hands_off, { title: "What the rules would have done", does: "Done" });
}

function row(policy, rule, may, set, done) {
  const others = policy.rules.filter((one) => one !== rule);
  const drop = async () => done(await ask(`Remove ${rule.id}?`, "The next rule that matches decides about its incidents.", [], "Remove", true, () => set(others)), `${rule.id} is removed`);
  const acts = h("input", { type: "checkbox", checked: rule.mode === "act", disabled: !may, "aria-label": `${rule.id} acts by itself`, onchange: () => turned(policy, rule, acts, set, done) });
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("b", {}, rule.id)),
    h("td", { class: "break" }, rule.severity && severityPill(rule.severity), " ", matched(rule)),
    h("td", {}, does(rule)),
    h("td", {}, rule.mode === "notify" ? h("span", { class: "muted" }, "notifies only") : h("label", { class: "check inline" }, acts, rule.mode === "act" ? "acts" : "proposes")),
    h("td", { class: "right nowrap" }, may && h("button", { class: "small", "aria-label": `Remove ${rule.id}`, onclick: drop }, "Remove")),
  );
}

function matched(rule) {
  return [rule.kind ? kindName(rule.kind) : "all", rule.job && `of ${rule.job}`, rule.project && `of project ${rule.project}`, rule.confidence_min > 0 && `confidence from ${rule.confidence_min}`].filter(Boolean).join(" · ");
}

function does(rule) {
  return rule.action ? [NAMES[rule.action], rule.rollback_mode && ` (${words(rule.rollback_mode).toLowerCase()})`] : "Nothing";
}

// A rule begins to act only after its dry run was seen.
async function turned(policy, rule, box, set, done) {
  const wanted = { ...rule, mode: box.checked ? "act" : "suggest" };
  const rules = policy.rules.map((one) => (one === rule ? wanted : one));
  const on = box.checked;
  const send = () => set(rules);
  const found = on && (await said(preview({ ...policy, rules })));
  const seen = { rule: rule.id, title: `Let ${rule.id} act by itself?`, does: "Switch on", send };
  const stored = on ? found && (await dryRun(found, policy.hands_off, seen)) : await said(send());
  if (!done(stored, on ? `${rule.id} acts by itself` : `${rule.id} only proposes`)) box.checked = !on;
}

async function add(policy, set, done) {
  const options = (texts, chosen) => Object.entries(texts).map(([value, text]) => h("option", { value, selected: value === chosen }, text));
  const choice = (label, name, texts, chosen) => h("label", {}, label, h("select", { name }, options(texts, chosen)));
  const text = (label, name, more) => h("label", {}, label, h("input", { name, autocomplete: "off", maxlength: 200, ...more }));
  const fields = [
    text("Name", "id", { required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9_.\\-]*" }),
    choice("Kind", "kind", { "": "every kind", ...KIND_NAMES }, ""),
    choice("Severity", "severity", { "": "every severity", ...Object.fromEntries(SEVERITIES.map((one) => [one, one])) }, ""),
    text("Job", "job", { placeholder: "every job" }),
    choice("Action", "action", NAMES, "pause"),
    choice("How to roll back", "rollback_mode", ROLLBACK_MODES, ""),
    choice("Where", "before", Object.fromEntries([...policy.rules.map((one) => [one.id, `before ${one.id}`]), ["", "last"]]), ""),
  ];
  const send = async (answer) => ({ answer, found: await preview({ ...policy, rules: placed(policy, answer, "act") }) });
  const tried = await ask("New rule", "It only proposes its action until you switch it to act by itself.", fields, "Dry run", false, send);
  if (!tried) return;
  const id = tried.answer.id.trim();
  const added = { rule: id, title: `If ${id} acted by itself`, does: "Add as a proposal", send: () => set(placed(policy, tried.answer, "suggest")) };
  done(await dryRun(tried.found, policy.hands_off, added), `${id} is added`);
}

// The rules of a policy with the one of a form where that says.
function placed(policy, { id, kind, severity, job, action, rollback_mode: how, before }, mode) {
  const rule = { id: id.trim(), kind, severity, job: job.trim(), mode, action, rollback_mode: action === "rollback" ? how : "" };
  const at = before ? policy.rules.findIndex((one) => one.id === before) : policy.rules.length;
  return policy.rules.toSpliced(at, 0, rule);
}
