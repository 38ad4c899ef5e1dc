// Project and owner of a job: what the lists are filtered by, and the dialog in which a person sets them.

import { patch, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { ask, toast } from "./shell.js";

// The button that opens the dialog. `current` returns the job as it was read last; `reload` shows it as it is then.
export function editButton(current, reload) {
  return h("button", { onclick: async () => (await edit(current())) && reload() }, "Edit");
}

async function edit(job) {
  const field = (label, name) => h("label", {}, label, h("input", { name, value: job[name], maxlength: 200, autocomplete: "off" }));
  const text = "The project's receivers and rules apply from now on. The owner is the contact for this job.";
  const send = ({ project, owner }) => patch(path("jobs", job.name), { project: project.trim(), owner: owner.trim() });
  const edited = await ask(`Edit ${job.name}`, text, [field("Project", "project"), field("Owner", "owner")], "Save", false, send);
  if (edited) toast("Job edited");
  return edited;
}

// Whose a job is, in words; null if nobody has said it.
export function whose(project, owner) {
  return [project && `project ${project}`, owner && `owner ${owner}`].filter(Boolean).join(" · ") || null;
}

// Offers projects in a select, which is hidden where there is nothing to choose.
export function offerProjects(select, names, chosen) {
  const all = chosen && !names.includes(chosen) ? [...names, chosen] : names;
  select.hidden = all.length === 0;
  fill(select, h("option", { value: "" }, "Any project"), all.toSorted().map((value) => h("option", { value, selected: value === chosen }, value)));
}
