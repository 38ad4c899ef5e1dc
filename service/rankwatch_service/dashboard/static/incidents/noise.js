// What to change after an incident was called noise, and what that would have changed over the last week.

import { get, now, post, put } from "../common/api.js";
import { h } from "../common/dom.js";
import { kindName, number } from "../common/format.js";
import { ask, mayDo, seesEveryJob, toast } from "../components/shell.js";

const WEEK_NS = 604_800e9;
const DONE = { silence: "Nobody is notified of these for a week", quiet: "The job has the profile quiet" };

export async function lessNoise({ job, kind, short_id: id }) {
  const since = Math.round(now() * 1e6 - WEEK_NS);
  const admin = (await mayDo("admin")) && (await seesEveryJob());
  const [alike, inForce] = await Promise.all([get("incidents", { job, kind, from_unix_ns: since, limit: 1 }), admin ? get("tuning") : null]);
  const what = kindName(kind).toLowerCase();
  const would = h("p", { class: "muted", role: "status" });
  const texts = { "": "Nothing more", silence: `Notify nobody of any ${what} of ${job} for a week`, ...(admin && { quiet: `Report less and later in ${job} (profile quiet)` }) };
  const tunings = () => [{ jobs: job, profile: "quiet", settings: {} }, ...inForce.tunings.filter((one) => one.jobs !== job)];
  const choose = h("select", { name: "change", onchange: tell }, Object.entries(texts).map(([value, text]) => h("option", { value }, text)));
  const incidents = (count) => `${number(count)} ${count === 1 ? "incident" : "incidents"}`;

  async function tell() {
    const chosen = choose.value;
    would.textContent = { "": "", silence: `Over the last week this concerns ${incidents(alike.total)}. They still open, and are listed.`, quiet: "Replaying what the job has reported …" }[chosen];
    if (chosen !== "quiet") return;
    const found = await post("tuning/preview", { job, tunings: tunings() }).catch((error) => ({ error }));
    if (choose.value !== "quiet") return;
    const gone = found.does_not_open ?? [];
    would.textContent = found.error ? `It cannot be said what it would have changed: ${found.error.message}` : `In steps ${number(found.first_step)} to ${number(found.last_step)}, ${incidents(gone.length)} would not have opened, ${number(gone.filter((one) => one.kind === kind).length)} of them of this kind; ${number(found.opens.length)} others would have.`;
  }

  const send = async ({ change }) => {
    if (change === "silence") await post("silences", { job, kind, ends_unix_ns: Math.round(now() * 1e6 + WEEK_NS), comment: `noise, as ${id}` });
    if (change === "quiet") await put("tuning", { tunings: tunings(), version: inForce.version });
    return { change };
  };
  const made = await ask("Noise: what shall change?", "Your answer is kept. This is for those that come next.", [h("label", {}, "From now on", choose), would], "Apply", false, send);
  if (made?.change) toast(DONE[made.change]);
}
