// How readily detectors tell of something, by pattern of names of jobs.

import { get, post, put, Refused, remove } from "../common/api.js";
import { h } from "../common/dom.js";
import { kindName, moment, number, rankList } from "../common/format.js";
import { ask, card, empty, said, severityPill, toast } from "./shell.js";

const PROFILES = ["quiet", "standard", "sensitive"];
const PROFILE_HINTS = { quiet: "tells less and later", standard: "every setting has its default", sensitive: "tells more and earlier" };

// A card with the tunings in force; who `may` change them gets buttons. `changed` is called after a change.
export function tuningCard(inForce, settings, may, mayPreview, changed) {
  const { version, tunings, actor, at_unix_ns: at } = inForce;
  const set = (wanted) => put("tuning", { tunings: wanted, version });
  const done = (reply, text) => {
    if (!reply) return;
    toast(text);
    changed();
  };
  const drop = async (tuning) => done(await said(set(tunings.filter((one) => one !== tuning))), `The tuning of ${tuning.jobs} is removed`);
  const table = h("table", {}, h("thead", {}, h("tr", {}, ["Jobs", "Profile", "Settings of their own", ""].map((title) => h("th", {}, title)))), h("tbody", {}, tunings.map((tuning) => row(tuning, may && (() => drop(tuning))))));
  const tools = [
    may && h("button", { onclick: () => add(tunings, settings, set, done) }, "Add tuning"),
    mayPreview && h("button", { onclick: () => preview(tunings, settings) }, "Preview"),
    may && tunings.length > 0 && h("button", { onclick: () => reset(done) }, "Reset"),
  ];
  const since = version ? h("p", { class: "body muted" }, `Version ${version}, set by ${actor} `, moment(at), ".") : null;
  return card("Tuning", [tunings.length ? h("div", { class: "wide", tabindex: "0" }, table) : empty(h("div"), "None: every setting of every detector has its default."), since], { hint: "the sensitivity of detectors; the first that matches a job decides", tools });
}

function row({ jobs, profile, settings }, drop) {
  const own = Object.entries(settings).map(([name, value]) => h("div", {}, `${name} = ${number(value, 6)}`));
  return h("tr", {}, h("td", { class: "break" }, h("b", {}, jobs)), h("td", {}, profile, h("div", { class: "muted" }, PROFILE_HINTS[profile])), h("td", { class: "break" }, own), h("td", {}, drop && h("button", { onclick: drop, "aria-label": `Remove the tuning of ${jobs}` }, "Remove")));
}

async function add(tunings, settings, set, done) {
  const text = "Added as the first tuning; replaces one with the same pattern. Applies to running jobs at once; baselines are kept.";
  const stored = await ask("Add a tuning", text, fields(settings), "Add", false, (given) => set(placed(tunings, given)));
  done(stored, stored && `The tuning of ${stored.tunings[0].jobs} is set`);
}

async function reset(done) {
  const text = "Every setting of every detector has its default again, in all jobs.";
  done(await ask("Reset the tunings", text, null, "Reset", false, () => remove("tuning")), "Every setting has its default");
}

async function preview(tunings, settings) {
  const job = h("label", {}, "Job whose stored telemetry is replayed", h("input", { name: "job", required: true }));
  const text = "Which incidents would have opened with it instead of the present tuning, and which not. The job's telemetry is replayed, which may take some minutes; nothing is changed.";
  const send = async (given) => ({ of: given.job, found: await post("tuning/preview", { job: given.job, tunings: placed(tunings, given) }) });
  const preview = await ask("Preview a tuning", text, [job, fields(settings)], "Preview", false, send);
  if (preview) await ask(`Preview on ${preview.of}`, null, changes(preview.found), "Close");
}

function changes({ first_step: first, last_step: last, both, opens, does_not_open: gone, not_previewed: kinds, settings_not_previewed: names }) {
  const lines = [...opens.map((one) => change("opens", one)), ...gone.map((one) => change("does not open", one))];
  return h(
    "div",
    { class: "column" },
    h("p", {}, `Steps ${first} to ${last}: ${number(both)} incidents open with both.`),
    lines.length ? h("table", {}, h("tbody", {}, lines)) : h("p", {}, "The same incidents open."),
    names.length > 0 && h("p", {}, `${names.join(", ")} cannot be previewed.`),
    h("p", { class: "muted" }, `Cannot be previewed: ${kinds.map(kindName).join(", ")}.`),
  );
}

function change(what, { severity, kind, ranks, onset_step: step, summary }) {
  return h("tr", {}, h("td", {}, what), h("td", { class: "break" }, severityPill(severity), " ", kindName(kind), ranks.length > 0 && ` · rank ${rankList(ranks)}`, h("div", { class: "muted" }, `from step ${step}: ${summary}`)));
}

function fields(settings) {
  const text = settings.map(({ name, unit, low, high }) => `${name}: ${low} to ${high} (${unit})`).join("\n");
  return [
    h("label", {}, "Jobs: a pattern of names, * for any text", h("input", { name: "jobs", value: "*", required: true })),
    h("label", {}, "Profile", h("select", { name: "profile" }, PROFILES.map((name) => h("option", { value: name, selected: name === "standard" }, name)))),
    h("label", {}, "Settings, one per line", h("textarea", { name: "settings", rows: 4, placeholder: "straggler.wall.ratio_min = 1.05" })),
    h("details", {}, h("summary", {}, "Settings and their ranges"), h("pre", {}, text)),
  ];
}

// These tunings with that of a form before them, in place of one with the same pattern.
function placed(tunings, given) {
  const tuning = read(given);
  return [tuning, ...tunings.filter((one) => one.jobs !== tuning.jobs)];
}

// The tuning of a form. The service checks names and ranges.
function read({ jobs, profile, settings: text }) {
  const settings = {};
  for (const line of text.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const [, name, value] = line.match(/^([\w.]+)\s*=\s*(\S+)$/) ?? [];
    if (!name || !Number.isFinite(Number(value))) throw new Refused(422, `"${line}" is not NAME = NUMBER`);
    settings[name] = Number(value);
  }
  return { jobs, profile, settings };
}

export const loadTunings = () => Promise.all([get("tuning"), get("tuning/settings")]);
