// Archiving and deleting a job: buttons for a job that has ended or is lost, and the dialog that asks for its name.

import { path, post, Refused, remove } from "../common/api.js";
import { h } from "../common/dom.js";
import { number } from "../common/format.js";
import { ask, REFUSAL_MS, said, toast } from "./shell.js";

// The buttons that this session may use; null if there are none. `reload` shows the job as it is then.
// `current` returns the job as it was read last.
export function removals(current, { operate, admin }, reload) {
  const job = current();
  if (!["ended", "lost"].includes(job.state)) return null;
  const verb = job.archived_unix_ns ? "unarchive" : "archive";
  const change = async () => {
    await said(post(path("jobs", job.name, verb)), `Job ${verb}d`);
    reload();
  };
  return h(
    "div",
    { class: "actions" },
    operate && h("button", { onclick: change }, verb === "archive" ? "Archive" : "Unarchive"),
    admin && h("button", { class: "danger", onclick: () => deleteJob(current()) }, "Delete"),
  );
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
