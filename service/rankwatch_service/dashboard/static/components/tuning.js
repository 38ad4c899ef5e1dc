// How readily detectors tell of something, by pattern of names of jobs.

import { get, post, put, remove } from "../common/api.js";
import { h } from "../common/dom.js";
import { kindName, moment, number, rankList } from "../common/format.js";
import { ask, card, empty, said, severityPill, toast } from "./shell.js";

const PROFILES = ["quiet", "standard", "sensitive"];
const PROFILE_HINTS = { quiet: "tells less and later", standard: "every setting has its default", sensitive: "tells more and earlier" };

// A card with the tunings in force; who `may` change them gets buttons. `changed` is called after a change.
export function tuningCard(inForce, settings, may, mayPreview, changed) {
  const { version, tunings, actor, at_unix_ns: at } = inForce;
  const set = (wanted, done) => said(put("tuning", { tunings: wanted, version }), done).then((reply) => reply && changed());
  const table = h("table", {}, h("thead", {}, h("tr", {}, ["Jobs", "Profile", "Settings of their own", ""].map((title) => h("th", {}, title)))), h("tbody", {}, tunings.map((tuning, index) => row(tuning, may && (() => set(tunings.filter((_, other) => other !== index), `The tuning of ${tuning.jobs} is removed`))))));
  const tools = [
    may && h("button", { onclick: () => add(tunings, settings, set) }, "Add tuning"),
    mayPreview && h("button", { onclick: () => preview(tunings, settings) }, "Preview"),
    may && tunings.length > 0 && h("button", { onclick: () => reset(changed) }, "Reset"),
  ];
  const since = version ? h("p", { class: "body muted" }, `Version ${version}, set by ${actor} `, moment(at), ".") : null;
  return card("Tuning", [tunings.length ? h("div", { class: "wide", tabindex: "0" }, table) : empty(h("div"), "None: every setting of every detector has its default."), since], { hint: "how readily detectors tell of something; the first that matches a job decides", tools });
}

function row({ jobs, profile, settings }, drop) {
  const own = Object.entries(settings).map(([name, value]) => h("div", {}, `${name} = ${number(value, 6)}`));
  return h("tr", {}, h("td", { class: "break" }, h("b", {}, jobs)), h("td", {}, profile, h("div", { class: "muted" }, PROFILE_HINTS[profile])), h("td", { class: "break" }, own), h("td", {}, drop && h("button", { onclick: drop, "aria-label": `Remove the tuning of ${jobs}` }, "Remove")));
}

async function add(tunings, settings, set) {
  const given = await ask("Add a tuning", "It comes first, in place of one with the same pattern. Running jobs have it at once, and learn nothing anew.", fields(settings), "Add");
  const tuning = given && read(given);
  if (tuning) set([tuning, ...tunings.filter((one) => one.jobs !== tuning.jobs)], `The tuning of ${tuning.jobs} is set`);
}

async function reset(changed) {
  if (!(await ask("Reset the tunings", "Every setting of every detector has its default again, in all jobs.", null, "Reset"))) return;
  if (await said(remove("tuning"), "Every setting has its default")) changed();
}

async function preview(tunings, settings) {
  const job = h("label", {}, "Job whose stored telemetry is replayed", h("input", { name: "job", required: true }));
  const given = await ask("Preview a tuning", "What would have opened with it in place of what is in force, and what not. Nothing is changed.", [job, fields(settings)], "Preview");
  const tuning = given && read(given);
  if (!tuning) return;
  toast("The telemetry is replayed: this may take some minutes.");
  const found = await said(post("tuning/preview", { job: given.job, tunings: [tuning, ...tunings.filter((one) => one.jobs !== tuning.jobs)] }));
  if (found) await ask(`Preview on ${given.job}`, null, changes(found), "Close");
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
    h("label", {}, "Settings of their own, one in a line", h("textarea", { name: "settings", rows: 4, placeholder: "straggler.budget = 0.1" })),
    h("details", {}, h("summary", {}, "Settings and their ranges"), h("pre", {}, text)),
  ];
}

// The tuning of a form; null, with a message, if a line of it is none. The service checks names and ranges.
function read({ jobs, profile, settings: text }) {
  const settings = {};
  for (const line of text.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const [, name, value] = line.match(/^([\w.]+)\s*=\s*(\S+)$/) ?? [];
    if (!name || !Number.isFinite(Number(value))) {
      toast(`"${line}" is not NAME = NUMBER`);
      return null;
    }
    settings[name] = Number(value);
  }
  return { jobs, profile, settings };
}

export const loadTunings = () => Promise.all([get("tuning"), get("tuning/settings")]);
