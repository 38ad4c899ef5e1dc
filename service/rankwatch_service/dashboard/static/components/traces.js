// What ranks recorded for a trace: a fold of its command, which reads the summaries when it is opened.

import { get, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { bytes, duration, number, words } from "../common/format.js";

const opened = new Map(); // by command, what was read: pages draw the fold anew whenever something changes

// Nothing for other commands, and while ranks may still answer.
export function traceFold(command) {
  if (command.action !== "trace" || !command.finished_unix_ns) return null;
  const body = h("div", {});
  const show = (found) => fill(body, found ? found.traces.map(rank) : "The summaries cannot be read.");
  const fold = h("details", { open: opened.has(command.id) }, h("summary", {}, "Where the steps went"), body);
  if (fold.open) show(opened.get(command.id));
  fold.addEventListener("toggle", async () => {
    if (!fold.open) opened.delete(command.id);
    else if (!body.firstChild) {
      opened.set(command.id, await get(path("commands", command.id)).catch(() => null));
      show(opened.get(command.id));
    }
  });
  return fold;
}

function rank({ rank: who, error, summary }) {
  const title = h("h3", { class: "sub" }, `Rank ${who}`);
  const why = error && h("p", { class: "muted break" }, error);
  if (!summary.step_times_s) return [title, why];
  const whole_s = summary.step_times_s.reduce((sum, time_s) => sum + time_s, 0);
  const idle = summary.idle_ratio === null ? null : `device idle ${number(summary.idle_ratio * 100)} %`;
  return [
    title,
    why,
    h("p", { class: "muted" }, [`from step ${number(summary.step)}: ${summary.step_times_s.map(duration).join(", ")}`, idle].filter(Boolean).join(" · ")),
    table(["Kind", "Time", "Of the steps"], Object.entries(summary.kinds).map(([kind, time_s]) => [kind, duration(time_s), `${number((time_s / whole_s) * 100)} %`])),
    table(["Group", "Collective", "Calls", "Bytes", "Time"], summary.collectives.map((one) => [one.group || "not known", words(one.name), number(one.count), bytes(one.bytes), duration(one.time_s)])),
    table(["Device", "Stream", "Kernels", "Busy"], summary.streams.map((one) => [one.device, one.stream, number(one.count), duration(one.time_s)])),
    table([summary.on_device ? "Kernel" : "Operation", "Kind", "Calls", "Own time"], summary.top.map((one) => [one.name, one.kind, number(one.count), duration(one.time_s)])),
  ];
}

function table(headings, rows) {
  const cell = (value, place) => h("td", { class: place ? "right nowrap" : "break" }, value);
  const heading = (text, place) => h("th", { class: place ? "right" : "" }, text);
  return rows.length > 0 && h("table", { class: "compact" }, h("thead", {}, h("tr", {}, headings.map(heading))), h("tbody", {}, rows.map((row) => h("tr", {}, row.map(cell)))));
}
