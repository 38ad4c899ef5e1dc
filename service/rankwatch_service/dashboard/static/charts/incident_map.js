// The heat map of an incident: the metric that shows its kind best, around the onset, with the culprits outlined.

import { HeatMap } from "./heat_map.js";
import { lastStep, words } from "../common/format.js";
import { grid } from "./series.js";

const METRICS = {
  nonfinite: ["grad_norm", "loss"],
  loss_spike: ["loss"],
  loss_divergence: ["loss"],
  grad_norm: ["grad_norm"],
  corruption: ["local_grad_norm", "grad_norm"],
};
// What shows a slow rank best, best first.
export const OF_TIME = ["device_busy_s", "busy_s", "step_time_s"];
const BEFORE = 60;
const AFTER = 60;
const HEIGHT_PX = 150;

export function aroundIncident(holder, card) {
  let map = null;
  return {
    async show(incident) {
      const felt = whereFelt(incident);
      card.hidden = felt === null;
      if (card.hidden) return;
      const found = await firstMeasured(incident, felt);
      card.hidden = found === null;
      if (card.hidden) return;
      map ??= new HeatMap(holder, { height: HEIGHT_PX });
      card.querySelector("h2").textContent = `${words(found.metric)} around the onset`;
      map.show(found.grid, {
        metric: found.metric,
        relative: OF_TIME.includes(found.metric),
        outlines: [{ from: felt.step, to: lastStep(incident), ranks: felt.ranks, severity: incident.severity }],
      });
    },
  };
}

// The step at which training felt it: its own onset, or, where it has none, as trouble of a device, a consequence's.
function whereFelt(incident) {
  if (incident.onset_step !== null) return { kind: incident.kind, step: incident.onset_step, ranks: incident.ranks };
  return incident.consequences.find((one) => one.step !== null) ?? null;
}

// The first metric of the kind that this job reports, or null.
async function firstMeasured(incident, felt) {
  const ofRule = felt.kind === "metric" ? [incident.evidence.metric] : OF_TIME;
  for (const metric of METRICS[felt.kind] ?? ofRule) {
    const last = Math.max(incident.detected_step ?? 0, felt.step) + AFTER;
    const found = await grid(incident.job, metric, 2 * (BEFORE + AFTER), { from: Math.max(0, felt.step - BEFORE), to: last });
    if (found) return { metric, grid: found };
  }
  return null;
}
