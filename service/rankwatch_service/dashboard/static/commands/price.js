// What a command to a job costs and how it is undone, as facts for its dialog.

import { fill, h } from "../common/dom.js";
import { ACTIONS, ago, duration, moment, number } from "../common/format.js";
import { unit } from "../incidents/impact.js";

const PAUSE_LEASE_S = 60; // orders/order.py

// A list of facts that `draw(id)` fills, for the checkpoint with this id or, if it is empty, the one that is chosen by itself.
export function priceOf(job, action, checkpoints) {
  const list = h("dl", { class: "facts price" });
  const draw = (id) => fill(list, facts(job, action, checkpoints, id).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]));
  draw("");
  return { list, draw };
}

function facts(job, action, checkpoints, id) {
  const { rollback_to: back, relaunch_from: resume } = job.checkpoints ?? {};
  const wanted = id || { rollback: back, relaunch: resume, stop: resume }[action];
  const good = checkpoints.find((one) => one.id === wanted);
  const found = [["Ranks", job.world_size ? `all ${number(job.world_size)}` : "all"]];
  if (action === "pause") found.push(["Target step", step(job)], ["Costs", `${costs(job, 3600)} for each hour of the pause`], ["Lease", `renewed while the service and all agents report; without that the ranks go on by themselves after ${PAUSE_LEASE_S} s`]);
  if (action === "checkpoint") found.push(["Target step", step(job)], ["Takes", job.checkpoints?.save_s ? `about ${duration(job.checkpoints.save_s)}, ${costs(job, job.checkpoints.save_s)}` : "not known: none was saved yet"]);
  if (action === "stop") found.push(["Target step", step(job)]);
  if (["rollback", "relaunch"].includes(action)) found.push(["Target step", good ? number(good.step) : "not known: there is no good checkpoint"]);
  if (ACTIONS[action].is_costly) found.push(...losses(job, good));
  found.push(["To undo", ACTIONS[action].undo]);
  return found;
}

// The next step that all ranks can reach together.
const step = (job) => (job.step >= 0 ? `the next that all ranks can reach, after ${number(job.step)}` : "the first that all ranks can reach");

function losses(job, good) {
  if (!good) return [["Steps lost", "all since the last save that survives the processes"]];
  const lost = Math.max(0, job.step - good.step);
  const again = job.step_time_s ? lost * job.step_time_s : null;
  return [
    ["Steps lost", `${number(lost)}, from ${number(good.step)} to ${number(job.step)}`],
    ["Costs", again === null ? "not known: the job has no step time yet" : `${duration(again)} of training, ${costs(job, again)}`],
    ["Checkpoint", h("span", { title: moment(good.saved_unix_ns) }, `${good.tier}, ${good.verdict}, saved ${ago(good.saved_unix_ns)}`)],
  ];
}

// The hours of all ranks in this time.
function costs(job, seconds) {
  return job.world_size ? `${number((job.world_size * seconds) / 3600)} ${unit(job.accelerated).hours}` : "cost unknown";
}

// A field in which the name of the job is typed: a click alone does not end what cannot be brought back.
export function typedName(name) {
  const input = h("input", { name: "typed", autocomplete: "off", required: true, spellcheck: "false" });
  const check = () => input.setCustomValidity(input.value === name ? "" : `Type ${name}`);
  input.addEventListener("input", check);
  check();
  return h("label", {}, h("span", {}, "To confirm, type the name of the job: ", h("b", { class: "break" }, name)), input);
}
