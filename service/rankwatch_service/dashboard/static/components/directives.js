// Commands to a job: the dialog that explains one and asks for a reason, and the request.

import { path, post } from "../common/api.js";
import { h } from "../common/dom.js";
import { ACTIONS, number } from "../common/format.js";
import { priceOf, typedName } from "../commands/price.js";
import { ask, statePill, toast } from "./shell.js";

// What pages offer: the actions that have an icon.
export const DIRECTIVES = Object.fromEntries(Object.entries(ACTIONS).filter(([, traits]) => traits.icon));

// The job of commands that are about all jobs; `GET commands` shows them, and nothing here requests them.
export const ALL_JOBS = "*";

const MODES = {
  full: "Full, within the processes: weights, optimizer, schedulers, random states, data and step",
  relaunch: "Relaunch: new processes load the checkpoint",
};

// The rollback modes that this job supports, the default first.
function modes(can) {
  return [can.includes("rollback") && "full", can.includes("relaunch") && "relaunch"].filter(Boolean);
}

// Whether a job supports an action.
export function able(can, action) {
  return action === "rollback" ? modes(can).length > 0 : can.includes(action);
}

// The state of a command; for a rollback with its mode.
export function outcome(command) {
  return [statePill(command.state), command.mode && h("span", { class: "muted" }, ` ${command.mode}`)];
}

// Who requested a command, and who approved it.
export function people(command) {
  return command.approved_by ? `${command.requested_by}, approved by ${command.approved_by}` : command.requested_by;
}

// Shows the dialog, then requests the command. `checkpoints` are the targets of a rollback. True if it was requested.
export async function direct(job, action, { checkpoints = [], chosen = null, incident = null } = {}) {
  const directive = DIRECTIVES[action];
  const price = priceOf(job, action, checkpoints);
  const fields = [price.list];
  if (action === "rollback") fields.push(target(checkpoints, chosen, price.draw), way(job.can ?? []));
  if (action === "relaunch") fields.push(h("label", { class: "check" }, h("input", { type: "checkbox", name: "from_scratch" }), "From scratch: start without a checkpoint of the ledger. The script decides where it begins, usually at step 0."));
  fields.push(h("label", {}, "Reason", h("textarea", { name: "reason", required: true, maxLength: 500, placeholder: "Shown in the audit trail and on the timeline" })));
  if (job.two_people && directive.is_costly) fields.push(h("p", {}, "Nothing happens until another person approves it."));
  if (directive.is_costly) fields.push(typedName(job.name));
  const send = (answer) => post(path("jobs", job.name, "commands"), wanted(action, incident, answer));
  const command = await ask(`${directive.name} ${job.name}`, directive.does, fields, directive.name, directive.is_costly, send);
  if (command === null) return false;
  const state = command.approval_required ? "waits for the approval of another person" : command.state;
  toast([`${directive.name}: ${state} `, h("a", { href: `/commands/${encodeURIComponent(command.id)}` }, "Progress")]);
  return true;
}

// The request for a command, from what was chosen in the dialog.
function wanted(action, incident, answer) {
  const params = Object.fromEntries(["checkpoint", "mode"].filter((name) => answer[name]).map((name) => [name, answer[name]]));
  if (answer.from_scratch) params.from_scratch = true;
  const body = { action, params, reason: answer.reason };
  if (incident) body.incident = incident;
  return body;
}

// `changed` gets the id of the checkpoint that is chosen.
function target(checkpoints, chosen, changed) {
  const options = checkpoints.map((one) =>
    h("option", { value: one.id, selected: one.id === chosen }, `step ${number(one.step)} · ${one.tier} · ${one.verdict}`),
  );
  const select = h("select", { name: "checkpoint", onchange: () => changed(select.value) }, h("option", { value: "" }, "Newest good checkpoint"), options);
  changed(select.value);
  return h("label", {}, "Checkpoint", select);
}

function way(can) {
  const [first, ...others] = modes(can);
  const options = [h("option", { value: "" }, MODES[first]), ...others.map((mode) => h("option", { value: mode }, MODES[mode]))];
  return h("label", {}, "What to restore", h("select", { name: "mode" }, options));
}
