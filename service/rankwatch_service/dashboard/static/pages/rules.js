// Rules on metrics that jobs log: listed, tried on a job's own past, saved and deleted.

import { get, getList, now, path, post, put, remove } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { age, duration, number } from "../common/format.js";
import { ask, card, empty, guarded, mayDo, said, SEVERITIES, severityPill, shell, toast, whenChanged } from "../components/shell.js";

const JOBS_SHOWN = 200;
const CONDITIONS = { above: "above", below: "below", absent: "absent", peers: "ratio to peers", change: "change of level" };
const DIRECTIONS = { both: "up or down", up: "up", down: "down" };

const main = shell("Rules");
const list = h("div");
const form = h("form", { class: "body rule", onsubmit: save });
const found = h("div");
const metrics = h("datalist", { id: "metrics" });
let mayChange = false;
let jobs = [];
main.append(
  h("div", { class: "pagehead" }, h("h1", {}, "Rules")),
  h("div", { class: "column" }, card("Rules on metrics", list, { hint: "what scripts log; a rule that holds opens an incident" }), card("Write a rule", [form, metrics, found], { hint: "preview it on a job's past before it is saved" })),
);
begin();

async function begin() {
  await guarded(async () => {
    const [listed, may] = await Promise.all([getList("jobs", {}, JOBS_SHOWN), mayDo("operate")]);
    mayChange = may;
    jobs = listed.items.map((job) => job.name);
    write({});
    await load();
  });
}

const load = () => guarded(async () => show((await get("rules")).items));

const show = whenChanged((rules) => {
  const titles = ["Rule", "Metric", "When", "For", "Severity", "Jobs", ""];
  if (!rules.length) return void empty(list, "No rules: metrics that scripts log besides the loss are charted and not checked.");
  fill(list, h("div", { class: "wide", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, titles.map((title) => h("th", {}, title)))), h("tbody", {}, rules.map(row)))));
});

function row(rule) {
  const when = [CONDITIONS[rule.when], rule.value !== null && number(rule.value), rule.direction !== "both" && DIRECTIONS[rule.direction], rule.each_rank && "on each rank"];
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("b", {}, rule.name), h("div", { class: "under" }, `${rule.updated_by} · ${age(now() / 1e3 - rule.updated_unix_ns / 1e9)} ago`)),
    h("td", { class: "break" }, rule.metric),
    h("td", {}, when.filter(Boolean).join(" ")),
    h("td", { class: "nowrap" }, rule.hold_s ? duration(rule.hold_s) : "at once"),
    h("td", {}, severityPill(rule.severity)),
    h("td", { class: "break" }, rule.jobs.join(", ") || "all"),
    h("td", { class: "right nowrap" }, h("button", { onclick: () => edit(rule) }, "Edit"), " ", mayChange && h("button", { onclick: () => drop(rule.name) }, "Delete")),
  );
}

// The form, filled with a rule or empty. Fields that the chosen condition does not have are hidden.
function write(rule) {
  const text = (label, name, properties = {}) => h("label", {}, label, h("input", { name, autocomplete: "off", ...properties }));
  const choice = (label, name, options, chosen) => h("label", {}, label, h("select", { name }, Object.entries(options).map(([value, words]) => h("option", { value, selected: value === chosen }, words))));
  const when = choice("When", "when", CONDITIONS, rule.when ?? "above");
  const value = text("Value", "value", { type: "number", step: "any", value: String(rule.value ?? "") });
  const direction = choice("Direction", "direction", DIRECTIONS, rule.direction ?? "both");
  const each = h("label", { class: "switch" }, h("input", { type: "checkbox", name: "each_rank", checked: rule.each_rank ?? false }), "each rank");
  const shown = () => {
    const chosen = when.querySelector("select").value;
    value.hidden = chosen === "absent" || chosen === "change";
    direction.hidden = chosen !== "change";
    each.hidden = chosen !== "above" && chosen !== "below";
  };
  when.addEventListener("change", shown);
  shown();
  const job = choice("Job to preview on", "job", Object.fromEntries(jobs.map((name) => [name, name])), jobs[0]);
  job.addEventListener("change", suggest);
  fill(
    form,
    text("Name", "name", { required: true, maxlength: 64, value: rule.name ?? "" }),
    text("Metric", "metric", { required: true, list: "metrics", value: rule.metric ?? "" }),
    when,
    value,
    direction,
    text("Hold (seconds)", "hold_s", { type: "number", min: 0, step: "any", value: String(rule.hold_s ?? 0) }),
    choice("Severity", "severity", Object.fromEntries(SEVERITIES.map((one) => [one, one])), rule.severity ?? "warning"),
    text("Jobs (patterns, by commas)", "jobs", { placeholder: "all", value: (rule.jobs ?? []).join(", ") }),
    each,
    job,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: preview, disabled: !jobs.length }, "Preview"), h("button", { class: "primary", disabled: !mayChange }, "Save")),
  );
  suggest();
}

async function suggest() {
  const job = form.elements.job.value;
  if (!job) return;
  const known = await get(path("jobs", job, "metrics")).catch(() => ({ items: [] }));
  fill(metrics, known.items.map((name) => h("option", { value: name })));
}

function edit(rule) {
  write(rule);
  fill(found);
  form.scrollIntoView({ block: "nearest" });
  form.elements.name.focus();
}

// The rule as the form has it, without what its condition does not take.
function written() {
  const values = Object.fromEntries(new FormData(form));
  const rule = { name: values.name.trim(), metric: values.metric.trim(), when: values.when, hold_s: Number(values.hold_s || 0), severity: values.severity };
  rule.jobs = values.jobs.split(",").map((one) => one.trim()).filter(Boolean);
  if (rule.when !== "absent" && rule.when !== "change") rule.value = values.value === "" ? null : Number(values.value);
  if (rule.when === "change") rule.direction = values.direction;
  if (rule.when === "above" || rule.when === "below") rule.each_rank = values.each_rank === "on";
  return rule;
}

async function save(event) {
  event.preventDefault();
  const rule = written();
  if (await said(put(path("rules", rule.name), rule), "Rule saved")) load();
}

async function drop(name) {
  if (await ask(`Delete ${name}?`, "Incidents that it opened end.", [], "Delete", true, () => remove(path("rules", name)))) toast("Rule deleted");
  load();
}

async function preview() {
  if (!form.reportValidity()) return;
  const job = form.elements.job.value;
  const answer = await said(post(path("jobs", job, "rules", "preview"), written()));
  if (!answer) return;
  const { opens: incidents, steps, first_step: first, last_step: last } = answer;
  const judged = steps ? `${number(steps)} steps of ${job} were judged, ${number(first)} to ${number(last)}.` : `${job} has no stored values of this metric.`;
  const count = incidents.length === 1 ? "1 incident would have opened." : `${number(incidents.length)} incidents would have opened.`;
  fill(found, h("p", { class: "body", role: "status" }, `${count} ${judged}`), incidents.length ? h("div", { class: "wide", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, ["Step", "Over in step", "What"].map((title) => h("th", {}, title)))), h("tbody", {}, incidents.map(opened)))) : null);
}

function opened(one) {
  const ended = one.is_open ? "open still" : one.resolved_step === null ? "at the end of its attempt" : number(one.resolved_step);
  return h("tr", {}, h("td", { class: "nowrap" }, number(one.detected_step)), h("td", { class: "nowrap" }, ended), h("td", {}, one.summary, one.ranks.length > 0 && h("div", { class: "under" }, `ranks ${one.ranks.join(", ")}`)));
}
