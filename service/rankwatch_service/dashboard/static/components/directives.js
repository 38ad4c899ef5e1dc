// Telling a job what to do: asks for a reason, says what will happen, requests the command.

import { path, post } from "../common/api.js";
import { h } from "../common/dom.js";
import { number } from "../common/format.js";
import { ask, statePill, toast } from "./shell.js";

export const DIRECTIVES = {
  pause: { icon: "pause", name: "Pause", does: "All ranks wait at the same step and keep their memory, until they are resumed or the pause's lease ends." },
  resume: { icon: "play", name: "Resume", does: "All ranks go on from where they wait." },
  checkpoint: { icon: "save", name: "Checkpoint", does: "All ranks save a checkpoint at the same step, then go on." },
  rollback: { icon: "back", name: "Roll back", does: "All ranks load a checkpoint and repeat the steps since.", danger: true },
  relaunch: { icon: "back", name: "Relaunch", does: "The agents end the processes; the launcher starts them again from the newest good checkpoint.", danger: true },
  stop: { icon: "stop", name: "Stop", does: "The training loop ends on all ranks at the same step.", danger: true },
};

const REFUSAL_MS = 15_000; // two lines are to be read

const MODES = {
  full: "In full, inside the processes: weights, optimizer, schedulers, random states, data and step",
  relaunch: "By a relaunch: new processes load it",
  weights: "Weights alone: data, random states and the script's own counters stay where they are",
};

// The ways in which this job can go back, the one that is taken by itself first.
function modes(can) {
  const full = can.includes("rollback") && "full";
  return [full, can.includes("relaunch") && "relaunch", can.includes("rollback_weights") && "weights"].filter(Boolean);
}

// Whether a job can be told to do this at all.
export function able(can, action) {
  return action === "rollback" ? modes(can).length > 0 : can.includes(action);
}

// What a command came to; for a rollback also what goes back.
export function outcome(command) {
  return [statePill(command.state), command.mode && h("span", { class: "muted" }, ` ${command.mode}`)];
}

// Asks, then requests. `checkpoints` offers targets for a rollback; the first is the default. True if it was requested.
export async function direct(job, action, { checkpoints = [], chosen = null, incident = null } = {}) {
  const directive = DIRECTIVES[action];
  const fields = [];
  if (action === "rollback") fields.push(target(checkpoints, chosen), way(job.can ?? []));
  fields.push(h("label", {}, "Reason", h("textarea", { name: "reason", required: true, maxLength: 500, placeholder: "Stands in the audit and on the timeline" })));
  const answer = await ask(`${directive.name} ${job.name}`, `${directive.does} ${scale(job)}`, fields, directive.name, directive.danger);
  if (answer === null) return false;
  const params = Object.fromEntries(["checkpoint", "mode"].filter((name) => answer[name]).map((name) => [name, answer[name]]));
  const body = { action, params, reason: answer.reason };
  if (incident) body.incident = incident;
  try {
    const command = await post(path("jobs", job.name, "commands"), body);
    toast(`${directive.name}: ${command.state}`);
    return true;
  } catch (error) {
    if (error.status === undefined) throw error; // ours, not the service's
    // Not the page's line for problems: that one goes as soon as the page has loaded again, a second later.
    toast(`${directive.name}: ${error.message}`, REFUSAL_MS);
    return false;
  }
}

function scale(job) {
  return job.world_size ? `${number(job.world_size)} ranks are concerned.` : "";
}

function target(checkpoints, chosen) {
  const options = checkpoints.map((one) =>
    h("option", { value: one.id, selected: one.id === chosen }, `step ${number(one.step)} · ${one.tier} · ${one.verdict}`),
  );
  return h("label", {}, "Checkpoint", h("select", { name: "checkpoint" }, h("option", { value: "" }, "Newest good one"), options));
}

function way(can) {
  const [first, ...others] = modes(can);
  // Where nothing else is possible the weights alone go back only because somebody chose that.
  const byItself = first && first !== "weights" ? h("option", { value: "" }, MODES[first]) : h("option", { value: "" }, "Choose what goes back");
  const chosen = first === "weights" ? [first] : others;
  return h("label", {}, "What goes back", h("select", { name: "mode", required: first === "weights" }, byItself, chosen.map((mode) => h("option", { value: mode }, MODES[mode]))));
}
