// The verdict on a host, and what it means; which of several hosts of one name it is.

import { h } from "../common/dom.js";

const VERDICTS = { ok: "", watched: "info", probation: "warning", refused: "critical" };
const MEANING = {
  ok: "no incident counts against it",
  watched: "one incident: it may have been chance",
  probation: "two incidents, or a critical one: test it before a long job",
  refused: "three incidents, or two critical ones: keep it out of the pool until it is repaired",
};

// How the id of an agent begins: the id of its host.
export const HOST_ID_DIGITS = 8;

// The name of a host without what tells it from others of this name within a job.
export const plainHost = (host) => host.split("/")[0];

// Whose record it is: a name alone does not say which host it is.
export function whose(one) {
  return [one.project && `project ${one.project}`, one.host_id ? `host ${one.host_id}` : `job ${one.job}`].filter(Boolean).join(" · ");
}

export function verdictPill(verdict) {
  return h("span", { class: `pill ${VERDICTS[verdict]}`, title: MEANING[verdict] }, verdict);
}
