// Silences from the page of an incident: nobody is notified of what matches until the silence ends.

import { now, post } from "../common/api.js";
import { h } from "../common/dom.js";
import { clock, kindName } from "../common/format.js";
import { ask, toast } from "../components/shell.js";

const HOUR_NS = 3600e9;
const HOURS = { 1: "1 hour", 4: "4 hours", 8: "8 hours", 24: "1 day", 168: "7 days" };
const MORNING = 8; // o'clock

// How many hours it is until the next morning.
function untilMorning() {
  const at = new Date(now());
  at.setHours(MORNING, 0, 0, 0);
  if (at.getTime() <= now()) at.setDate(at.getDate() + 1);
  return (at.getTime() - now()) / 3600e3;
}

// Asks what to silence and for how long. True if a silence was made.
export async function silence(incident) {
  const kind = kindName(incident.kind).toLowerCase();
  const reaches = { scope: `${kind} at ${incident.scope} of ${incident.job}`, kind: `every ${kind} of ${incident.job}`, job: `everything of ${incident.job}` };
  const options = (texts, chosen) => Object.entries(texts).map(([value, text]) => h("option", { value, selected: value === chosen }, text));
  const fields = [
    h("label", {}, "Nobody is notified of", h("select", { name: "reach" }, options(reaches, "scope"))),
    h("label", {}, "For", h("select", { name: "hours" }, options(HOURS, "4"), h("option", { value: untilMorning() }, "until 08:00 in the morning"))),
    h("label", {}, "Comment", h("textarea", { name: "comment", required: true, maxLength: 1000, placeholder: "Why, and who is on it" })),
  ];
  const send = ({ reach, hours, comment }) => {
    const body = { job: incident.job, ends_unix_ns: Math.round(now() * 1e6 + hours * HOUR_NS), comment };
    if (reach !== "job") body.kind = incident.kind;
    if (reach === "scope") body.scope = incident.scope;
    return post("silences", body);
  };
  const made = await ask("Silence", "Incidents still open, and are listed here.", fields, "Silence", false, send);
  if (made) toast(`Silenced until ${clock(made.ends_unix_ns)}`);
  return made !== null;
}
