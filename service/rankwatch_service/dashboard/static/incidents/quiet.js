// What the list of incidents says when it is empty. It is quiet only if jobs report and make progress.

import { now } from "../common/api.js";
import { h, icon } from "../common/dom.js";
import { number } from "../common/format.js";

const SILENT_S = 30;

// No incident is unresolved. Whether that is good depends on whether jobs report.
export function allQuiet({ jobs, telemetry_unix_ns: newest }) {
  const count = Object.values(jobs).reduce((sum, many) => sum + many, 0);
  if (count === 0) return firstSteps();
  const running = jobs.running + jobs.paused;
  const silent = jobs.lost > 0 || (running > 0 && now() / 1e3 - newest / 1e9 > SILENT_S);
  const calm = !silent && jobs.stalled === 0;
  const title = silent ? "No open incidents, but not every job reports" : jobs.stalled ? "No open incidents, but not every job makes progress" : running ? "No open incidents" : "No job is running";
  const others = [jobs.stalled && `${number(jobs.stalled)} stalled`, jobs.lost && `${number(jobs.lost)} lost`].filter(Boolean);
  return h(
    "div",
    { class: `quiet ${calm ? "" : "unheard"}` },
    h("span", { class: "seal" }, icon(calm ? "good" : "warning")),
    h("h2", {}, title),
    h("p", { class: "muted" }, [`${number(running)} of ${number(count)} ${count === 1 ? "job" : "jobs"} running`, ...others].join(", "), ". Last telemetry ", h("b", { "data-since": newest }), " ago."),
  );
}

// No incident matches what the page asks for; `hidden` unresolved ones do not.
export function noMatch(hidden, showAll) {
  const many = `${number(hidden)} unresolved ${hidden === 1 ? "incident does" : "incidents do"} not match.`;
  return h("div", { class: "quiet unheard" }, h("h2", {}, "No incident matches"), hidden > 0 && h("p", {}, many), h("button", { onclick: showAll }, "Show all unresolved incidents"));
}

// Whether the address of this page leads other machines to themselves.
const isLocal = () => ["localhost", "127.0.0.1", "[::1]"].includes(location.hostname);

function copyButton(text) {
  const button = h("button", { class: "small", onclick: async () => (await copied(text)) && (button.textContent = "Copied") }, "Copy");
  return button;
}

// Browsers allow it on https and on this machine only; elsewhere the text can be marked.
async function copied(text) {
  return navigator.clipboard?.writeText(text).then(() => true, () => false);
}

export function firstSteps() {
  const step = (text, code) => h("li", {}, text, h("pre", { tabindex: "0" }, code), copyButton(code));
  return h(
    "div",
    { class: "quiet begin" },
    h("h2", {}, "No job has reported yet"),
    h("p", { class: "muted" }, "Until one reports, an empty list does not mean that all is well."),
    h(
      "ol",
      {},
      step("Start the training with this in front of its command; the script needs no change:", "rankwatch run -- torchrun train.py"),
      step("For rollbacks and its own metrics, the script has these lines instead:", 'import rankwatch\n\nwatch = rankwatch.start(job="gpt-small")\nfor step in watch.steps(max_steps):\n    loss = train_step()\n    watch.log(loss=loss)'),
      step("On this machine nothing else is needed. On others, set what this prints here:", "rankwatch token job gpt-small --hosts 1"),
      step(isLocal() ? "together with an address that they reach, since this one is of this machine only:" : "together with the address:", `export RANKWATCH_URL=${isLocal() ? "https://THIS-MACHINE:PORT" : location.origin}\nexport RANKWATCH_TOKEN=…`),
      step("Or try it with a demo job:", "rankwatch demo"),
    ),
  );
}
