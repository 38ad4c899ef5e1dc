// The verdict on a host, and what it means.

import { h } from "../common/dom.js";

const VERDICTS = { ok: "", watched: "info", probation: "warning", refused: "critical" };
const MEANING = {
  ok: "no incident counts against it",
  watched: "one incident: it may have been chance",
  probation: "two incidents, or a critical one: test it before a long job",
  refused: "three incidents, or two critical ones: keep it out of the pool until it is repaired",
};

export function verdictPill(verdict) {
  return h("span", { class: `pill ${VERDICTS[verdict]}`, title: MEANING[verdict] }, verdict);
}
