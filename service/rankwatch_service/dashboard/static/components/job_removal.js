// Deleting a job: a button for a job that has ended or is lost, and the dialog that asks for its name.

import { path, Refused, remove } from "../common/api.js";
import { h } from "../common/dom.js";
import { number } from "../common/format.js";
import { ask, REFUSAL_MS, toast } from "./shell.js";

// The button; null for a job that cannot be deleted now. `current` returns the job as it was read last.
export function removal(current) {
  if (!["ended", "lost"].includes(current().state)) return null;
  return h("div", { class: "actions" }, h("button", { class: "danger", onclick: () => deleteJob(current()) }, "Delete"));
}

async function deleteJob(job) {
  const unresolved = job.incidents ? ` ${number(job.incidents)} of its incidents are not resolved.` : "";
  const text = `Its incidents, checkpoints in the ledger, commands and series are deleted for good. The audit trail and the files of checkpoints stay.${unresolved}`;
  const typed = h("label", {}, `Type ${job.name} to delete it`, h("input", { name: "typed", required: true, autocomplete: "off" }));
  const send = (answer) => {
    if (answer.typed !== job.name) throw new Refused(422, "That is not its name: nothing was deleted.");
    return remove(path("jobs", job.name));
  };
  const reply = await ask(`Delete ${job.name}`, text, typed, "Delete", true, send);
  if (reply?.deleted) location.assign("/jobs");
  else if (reply) toast("The job is deleted as soon as stream runs.", REFUSAL_MS);
}
