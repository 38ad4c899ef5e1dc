// One incident on one screen: what it is, where, what it costs, the chart of its kind, and what to do; then all the rest.

import { get, path, post } from "../common/api.js";
import { approvals } from "../components/approvals.js";
import { direct, DIRECTIVES, outcome, people } from "../components/directives.js";
import { fill, h, icon, refill } from "../common/dom.js";
import { comparison, facts, sorted } from "../components/evidence.js";
import { explanationCard } from "../components/explanation.js";
import { feedbackCard, feedbackKeys } from "../components/feedback.js";
import { kindName, number, rankList, words } from "../common/format.js";
import { aroundIncident } from "../charts/incident_map.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { deliveryCard } from "../incidents/delivery.js";
import { historyCard } from "../incidents/history.js";
import { answers, showLost, tiles, title, unit } from "../incidents/impact.js";
import { showAges } from "../incidents/incident_table.js";
import { kindCard } from "../incidents/kind_chart.js";
import { TABULATED } from "../incidents/kind_tables.js";
import { locationCard, placedRanks } from "../incidents/location.js";
import { bestAction, responseCard } from "../incidents/response.js";
import { MAY_BE_MEANT, meant } from "../incidents/troubles.js";
import { watchHealth } from "../service/health_banner.js";
import { silence } from "../incidents/silence.js";
import { keys } from "../components/keys.js";
import { notFound } from "../components/error_page.js";
import { traceFold } from "../components/traces.js";
import { ask, card, guarded, incidentPill, mayDo, seesEveryJob, severityPill, shell, toast, viewer, whenChanged } from "../components/shell.js";

const id = decodeURIComponent(location.pathname.split("/").pop());
const main = shell("Incidents");
const head = h("div", { class: "incident-head" });
const waiting = h("div", { class: "approvals" });
const strip = h("div", { class: "card tiles strip" });
const inWords = h("dl", { class: "card answers" });
const left = h("div", { class: "column" });
const right = h("div", { class: "column aside" });
const below = h("div", { class: "column below" });
main.classList.add("incident");
main.append(head, waiting, strip, inWords, h("div", { class: "split" }, left, right), below);

const ofKind = kindCard();
const place = h("div", { class: "column" });
const evidence = h("div", { class: "column" });
const mapHolder = h("div", { class: "body" });
const mapCard = card("Ranks around the onset", mapHolder, { hint: "culprits outlined" });
const why = explanationCard();
left.append(ofKind.element, place, evidence, why.element, mapCard);
let incident = null;
let job = null;
let map = null;
let answering = null;
let receivers = 1; // as far as is known
watchHealth(async (health) => {
  const before = receivers;
  receivers = (await seesEveryJob()) ? health.receivers.length : 1;
  if (receivers !== before) refresh();
});

const refresh = gathered(load);
listen((topic, ofJob) => {
  const progress = topic === "job" && incident?.state === "resolved";
  if (!progress && (topic === "reset" || ofJob === null || !incident || ofJob === incident.job)) refresh();
});
everySecond(tick);
keys(null, { a: { does: "acknowledge", run: acknowledge }, s: { does: "silence", run: mute }, ...feedbackKeys(() => answering) });
load();

async function load() {
  await guarded(async () => {
    try {
      incident = await get(path("incidents", id));
    } catch (error) {
      if (error.status !== 404) throw error;
      notFound(main, `There is no incident ${id}`, "Its job may have been deleted, or you may not see that job.", "/incidents", "All incidents");
      return;
    }
    const list = (where, query = { limit: 50 }) => get(where, query).then((page) => page.items).catch(() => []);
    const [found, reasons, checkpoints, attempts, commands, undecided, session, operate, command] = await Promise.all([
      get(path("jobs", incident.job)).catch(() => null),
      list(path("incidents", id, "why"), {}),
      list(path("jobs", incident.job, "checkpoints")),
      list(path("jobs", incident.job, "attempts")),
      list("commands", { job: incident.job, limit: 50 }),
      list("commands", { incident: incident.id, waiting: true, limit: 50 }),
      viewer(),
      mayDo("operate"),
      mayDo("command"),
    ]);
    job = found;
    document.title = document.title.replace(/^(\(\d+\+?\) )?.*/, `$1${incident.short_id} ${title(incident)} · rankwatch`);
    const placed = placedRanks(incident, job, attempts);
    answering = { incident, session, may: operate, given: load };
    showHead(incident, operate, command && job && job.state !== "ended" ? bestAction(incident) : null, checkpoints, session.name);
    showWaiting(undecided, session);
    refill(strip, tiles(incident, job, placed));
    refill(inWords, answers(incident));
    showPlace(incident, placed);
    showEvidence(incident.evidence, incident.consequences);
    showWhy(reasons);
    showRight(incident, checkpoints, commands.filter((one) => one.incident_id === incident.id), command, job?.state, session, operate, job?.step, receivers);
    showBelow(incident, operate);
    ofKind.show(incident, job, events(attempts, checkpoints, commands, job?.configuration ?? []), reasons);
    tick();
    map ??= aroundIncident(mapHolder, mapCard);
    map.show(incident);
  });
}

function tick() {
  showAges(main);
  showLost(main);
}

const showHead = whenChanged((_, operate, best, checkpoints, me) => {
  const open = incident.state !== "resolved";
  const owner = incident.acknowledged_by ? `Owner: ${incident.acknowledged_by}` : "No owner";
  fill(
    head,
    h("div", { class: "crumbs" }, h("a", { href: "/incidents" }, "Incidents"), "/", h("a", { href: `/jobs/${encodeURIComponent(incident.job)}` }, incident.job), "/", h("span", { class: "mono" }, incident.short_id)),
    h(
      "div",
      { class: "line" },
      h("h1", { title: incident.summary }, title(incident)),
      h("div", { class: "pills" }, severityPill(incident.severity), incidentPill(incident), h("span", { class: "pill", title: owner }, owner)),
      operate &&
        open &&
        h(
          "div",
          { class: "actions" },
          incident.state === "open" && h("button", { class: "primary", onclick: acknowledge }, icon("good"), "Acknowledge"),
          incident.state === "acknowledged" && (incident.acknowledged_by === me ? h("button", { onclick: giveBack }, "Give back") : h("button", { onclick: acknowledge }, "Take over")),
          h("button", { onclick: mute }, "Silence"),
          best && h("button", { onclick: () => askCommand(best, checkpoints) }, icon(DIRECTIVES[best].icon), DIRECTIVES[best].name),
          MAY_BE_MEANT.includes(incident.kind) && meant(incident, load),
          h("button", { onclick: resolve }, "Resolve"),
        ),
    ),
    h("p", { class: "muted summary" }, incident.summary),
  );
});

const showWaiting = whenChanged((commands, session) => fill(waiting, approvals(commands, session, load)));
const showPlace = whenChanged((_, placed) => fill(place, locationCard(incident, placed)));
const showWhy = whenChanged((items) => why.show(items));

const showEvidence = whenChanged(() => {
  const tabulated = TABULATED[incident.kind] ?? [];
  const { compared, values, texts } = sorted(Object.fromEntries(Object.entries(incident.evidence).filter(([name]) => !tabulated.includes(name))));
  const parts = [...compared.map(comparison), values.length > 0 && facts(values)].filter(Boolean);
  refill(evidence, [
    parts.length > 0 && card("Evidence", h("div", { class: "body evidence" }, parts)),
    incident.consequences.length > 0 && card("Consequences", h("div", { class: "body" }, h("ul", { class: "lines" }, incident.consequences.map(consequence))), { hint: "part of this incident, notified once" }),
    ...texts.map(({ name, text, hint }) => card(name, h("div", { class: "body" }, h("pre", { class: "dump", tabindex: "0" }, text)), { hint })),
  ]);
});

function consequence(one) {
  return h("li", {}, h("b", {}, kindName(one.kind)), " ", rankList(one.ranks), one.step !== null && one.step !== undefined && ` at step ${number(one.step)}`, h("div", { class: "muted break" }, one.summary));
}

const showRight = whenChanged((_, checkpoints, commands, command, _state, session, operate, _step, receivers) => {
  refill(
    right,
    responseCard(incident, job, checkpoints, unit(incident.accelerated).hours, command ? (action) => askCommand(action, checkpoints) : null),
    deliveryCard(incident, receivers),
    commands.length > 0 && card("Commands", h("div", { class: "body" }, h("ul", { class: "lines" }, commands.map(done)))),
    feedbackCard(incident, session, operate, load),
  );
});

const showBelow = whenChanged((_, operate) => {
  const typed = below.querySelector("textarea")?.value;
  refill(below, historyCard(incident, operate ? comment : null));
  const box = below.querySelector("textarea");
  if (typed && box) box.value = typed;
});

function done(one) {
  const step = one.applied_step === null ? "" : ` at step ${number(one.applied_step)}`;
  return h("li", {}, h("a", { class: "title", href: `/commands/${encodeURIComponent(one.id)}` }, words(one.action)), " ", outcome(one), step, h("div", { class: "muted break" }, [people(one), one.result || one.reason].filter(Boolean).join(" · ")), traceFold(one));
}

// What a chart marks: beginnings of attempts, checkpoints, commands and changes of the configuration, of the incident's
// attempt where that matters.
function events(attempts, checkpoints, commands, configuration) {
  const began = attempts.find((one) => one.attempt === incident.attempt)?.started_unix_ns ?? 0;
  return [
    ...attempts.filter((one) => one.attempt === incident.attempt && one.first_step > 0).map((one) => ({ step: one.first_step, text: "attempt" })),
    ...checkpoints.filter((one) => one.attempt === incident.attempt).map((one) => ({ step: one.step, text: one.tier === "memory" ? "captured" : "saved" })),
    ...commands.filter((one) => one.applied_step !== null).map((one) => ({ step: one.applied_step, text: words(one.action).toLowerCase() })),
    ...configuration.filter((one) => one.step !== null && one.unix_ns >= began).map((one) => ({ step: one.step, text: one.what })),
  ];
}

async function askCommand(action, checkpoints) {
  if (await direct(job, action, { checkpoints, chosen: incident.suggestion?.checkpoint, incident: incident.id })) load();
}

async function act(action, body) {
  const changed = await guarded(() => post(path("incidents", id, action), body));
  if (changed) acted(action);
  load();
}

const acted = (action) => toast(`${words(action)}d`.replace("ee", "e"));

async function acknowledge() {
  if (incident && incident.state !== "resolved" && (await mayDo("operate"))) act("acknowledge", {});
}

async function giveBack() {
  act("unacknowledge", {});
}

async function mute() {
  if (incident && incident.state !== "resolved" && (await mayDo("operate"))) silence(incident);
}

async function resolve() {
  const reason = h("label", {}, "Reason", h("textarea", { name: "text", required: true, maxLength: 2000 }));
  const send = ({ text }) => post(path("incidents", id, "resolve"), { text });
  if (await ask("Resolve this incident", "A new incident opens only if a detector finds a new episode.", [reason], "Resolve", false, send)) acted("resolve");
  load();
}

async function comment(event) {
  event.preventDefault();
  const text = new FormData(event.target).get("text");
  event.target.reset();
  await guarded(() => post(path("incidents", id, "comment"), { text }));
  load();
}
