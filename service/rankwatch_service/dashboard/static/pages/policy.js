// The policy: its switches, limits and rules; precision, and the tunings of detectors.

import { get, getList, put } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { measured, moment, words } from "../common/format.js";
import { precisionCard } from "../components/precision.js";
import { card, guarded, mayDo, shell, toast, whenChanged } from "../components/shell.js";
import { loadTunings, tuningCard } from "../components/tuning.js";
import { rulesCard } from "../policy/rules.js";

const JOBS_SHOWN = 100;

const main = shell("Policy");
const page = h("div", { class: "column" });
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Policy")), page);
load();

async function load() {
  await guarded(async () => {
    const [policy, precision, jobs, tuning, operate, command, admin] = await Promise.all([get("policy"), get("precision"), getList("precision/jobs", {}, JOBS_SHOWN), loadTunings(), mayDo("operate"), mayDo("command"), mayDo("admin")]);
    show(policy, policy.hands_off ? command : operate, admin, precision, jobs.items, tuning, operate);
  });
}

const show = whenChanged((policy, mayTurn, admin, precision, ofJobs, [inForce, settings], operate) => {
  const { hands_off: handsOff, two_people: twoPeople, limits } = policy;
  fill(
    page,
    card(
      "Switches",
      h(
        "div",
        { class: "body column" },
        toggle("Hands off", "No rule acts; what it would do becomes a suggestion.", handsOff, mayTurn, (on) => put("policy/hands-off", { hands_off: on })),
        toggle("Two people", `Rollback, relaunch and stop of jobs with more than ${limits.approval_ranks} ranks wait for the approval of a second person.`, twoPeople, admin, setTwoPeople),
        h("div", { class: "muted" }, policy.unsigned_until_unix_ns === null ? "Telemetry of agents that have not enrolled is accepted, and no date is set for its end." : ["Telemetry of agents that have not enrolled is accepted until ", moment(policy.unsigned_until_unix_ns), "."]),
      ),
    ),
    card("Limits", h("div", { class: "body" }, h("dl", { class: "facts" }, Object.entries(limits).map(([name, value]) => [h("dt", {}, words(name)), h("dd", {}, measured(name, value))])))),
    rulesCard(policy, admin, load),
    precisionCard(precision, ofJobs),
    tuningCard(inForce, settings.items, admin, operate, load),
  );
});

function toggle(name, does, on, may, turn) {
  const box = h("input", { type: "checkbox", checked: on, disabled: !may, onchange: () => turned(name, box, turn) });
  return h("label", { class: "switch" }, box, h("span", {}, h("b", {}, name), h("div", { class: "muted" }, does)));
}

// Switching it off needs the approval of a second person.
async function setTwoPeople(on) {
  const reply = await put("policy/approvals", { two_people: on });
  if (reply?.approval_required) toast(["The approval by two people stays on until another person approves the change ", h("a", { href: `/commands/${encodeURIComponent(reply.id)}` }, "Progress")]);
  return reply;
}

async function turned(name, box, turn) {
  const reply = await guarded(() => turn(box.checked));
  if (reply && !reply.approval_required) toast(`${name}: ${box.checked ? "on" : "off"}`);
  if (reply) load();
  if (!reply || reply.approval_required) box.checked = !box.checked;
}
