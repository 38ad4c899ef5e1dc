// Counts of incidents and jobs, read once for all that shows them on a page: at the start, after a change of an incident,
// and when a job changes its state. The slow poll of a page reads them too, which shows whether events were missed.

import { get } from "./api.js";
import { gathered, listen } from "./live.js";

const watchers = new Set();
const states = new Map(); // of each job, as the newest event said
const again = gathered(read);
let newest = null;
let polled = false;
let listening = false;

// Calls `changed(totals, polled)` with the totals now, and each time that they were read again. `polled`: perhaps nothing
// has changed.
export function watchTotals(changed) {
  watchers.add(changed);
  if (newest) changed(newest, false);
  if (listening) return;
  listening = true;
  listen(heard);
  read();
}

function heard(topic, job, change) {
  if (topic === "job") {
    if (states.get(job) === change.state) return; // only its step has changed
    states.set(job, change.state);
  } else if (topic !== "incident" && topic !== "reset") return;
  polled ||= topic === "reset";
  again();
}

async function read() {
  const wasPolled = polled;
  polled = false;
  newest = (await get("incidents/totals").catch(() => null)) ?? newest;
  if (newest) for (const changed of watchers) changed(newest, wasPolled);
}
