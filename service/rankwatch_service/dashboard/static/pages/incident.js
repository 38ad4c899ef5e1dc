// One incident on one screen: severity, location, onset, cost, evidence, and what to do.

import { get, now, path, post } from "../common/api.js";
import { approvals } from "../components/approvals.js";
import { direct, DIRECTIVES, outcome, people } from "../components/directives.js";
import { fill, h, icon, withCode } from "../common/dom.js";
import { comparison, facts, sorted } from "../components/evidence.js";
import { explanationCard } from "../components/explanation.js";
import { feedbackCard, feedbackKeys } from "../components/feedback.js";
import { age, clock, duration, hour, kindName, moment, number, rankList, words, zone } from "../common/format.js";
import { aroundIncident } from "../charts/incident_map.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { traceFold } from "../components/traces.js";
import { ask, card, endedWithJob, guarded, incidentPill, keys, mayDo, severityPill, shell, statePill, tile, toast, viewer, whenChanged } from "../components/shell.js";

const CHANGES_SHOWN = 5;

const id = decodeURIComponent(location.pathname.split("/").pop());
const main = shell("Incidents");
const head = h("div", { class: "incident-head" });
const waiting = h("div", { class: "approvals" });
const strip = h("div", { class: "card tiles strip" });
const left = h("div", { class: "column" });
const right = h("div", { class: "column aside" });
main.append(head, waiting, strip, h("div", { class: "split" }, left, right));

const mapHolder = h("div", { class: "body" });
const mapCard = card("Ranks around the onset", mapHolder, { hint: "culprits outlined" });
const why = explanationCard();
let incident = null;
let job = null;
let map = null;

const refresh = gathered(load);
listen((topic, ofJob) => (topic === "reset" || ofJob === null || !incident || ofJob === incident.job) && refresh());
everySecond(showAges);
let answering = null;
keys(() => [], { a: () => incident?.state === "open" && act("acknowledge", {}), ...feedbackKeys(() => answering) });
load();

async function load() {
  await guarded(async () => {
    incident = await get(path("incidents", id));
    const [found, reasons, checkpoints, commands, undecided, session, operate, command] = await Promise.all([
      get(path("jobs", incident.job)).catch(() => null),
      get(path("incidents", id, "why")).catch(() => ({ items: [] })),
      get(path("jobs", incident.job, "checkpoints"), { limit: 50 }).catch(() => ({ items: [] })),
      get("commands", { incident: incident.id, limit: 50 }).catch(() => ({ items: [] })),
      get("commands", { incident: incident.id, waiting: true, limit: 50 }).catch(() => ({ items: [] })),
      viewer(),
      mayDo("operate"),
      mayDo("command"),
    ]);
    job = found;
    document.title = document.title.replace(/^(\(\d+\+?\) )?.*/, `$1${incident.short_id} ${kindName(incident.kind)} · rankwatch`);
    showHead(incident, operate);
    showWaiting(undecided.items, session);
    showStrip();
    showLeft(incident, operate);
    showWhy(reasons.items);
    answering = { incident, session, may: operate, given: load };
    showRight(incident, checkpoints.items, commands.items, command, job?.state, session, operate);
    showAges();
    map ??= aroundIncident(mapHolder, mapCard);
    map.show(incident);
  });
}

const showHead = whenChanged((_, operate) => {
  fill(
    head,
    h("div", { class: "crumbs" }, h("a", { href: "/incidents" }, "Incidents"), "/", h("a", { href: `/jobs/${encodeURIComponent(incident.job)}` }, incident.job), "/", h("span", { class: "mono" }, incident.short_id)),
    h(
      "div",
      { class: "line" },
      h("div", { class: "pills" }, severityPill(incident.severity), incidentPill(incident), h("span", { class: "pill" }, kindName(incident.kind))),
      operate &&
        h(
          "div",
          { class: "actions" },
          incident.state === "open" && h("button", { class: "primary", onclick: () => act("acknowledge", {}) }, icon("good"), "Acknowledge"),
          incident.state !== "resolved" && h("button", { onclick: resolve }, "Resolve"),
        ),
    ),
    h("h1", { class: "break" }, incident.summary),
  );
});

const showWaiting = whenChanged((commands, session) => fill(waiting, approvals(commands, session, load)));

function detectedAfter() {
  const seconds = (incident.detected_unix_ns - incident.onset_unix_ns) / 1e9;
  return seconds < 1e-3 ? "immediately" : duration(seconds);
}

function showStrip() {
  const where = incident.ranks.length ? rankList(incident.ranks, 4) : "whole job";
  const cost = incident.impact_gpu_hours_per_hour;
  const hosts = incident.hosts.slice(0, 2).map((one, n) => [n > 0 && ", ", h("a", { href: `/hosts/${encodeURIComponent(one)}` }, one)]);
  fill(
    strip,
    tile("Where", where, [hosts.length ? hosts : incident.scope, incident.devices[0] && ` · ${incident.devices[0]}`]),
    tile(incident.state === "resolved" ? "Duration" : "Since", h("span", { "data-since": incident.onset_unix_ns, "data-until": incident.resolved_unix_ns }), h("span", { title: moment(incident.onset_unix_ns) }, `step ${number(incident.onset_step)} · ${clock(incident.onset_unix_ns)}`)),
    tile("Detected after", detectedAfter(), `at step ${number(incident.detected_step)}`),
    tile("Cost", cost > 0 ? [number(cost, 3), h("small", {}, " GPU-h / h")] : "–", job ? `of ${number(job.world_size)} GPUs` : ""),
    tile("Confidence", `${Math.round(incident.confidence * 100)}%`, typeof incident.score === "number" ? `score ${number(incident.score, 3)}` : "exact evidence"),
    tile("Acknowledged by", incident.acknowledged_by ?? "nobody yet", incident.cause ? `cause class: ${incident.cause}` : "cause unknown"),
  );
}

const showWhy = whenChanged((items) => why.show(items));

const showLeft = whenChanged((_, operate) => {
  const { compared, values, texts } = sorted(incident.evidence);
  const parts = [
    card("Evidence", h("div", { class: "body evidence" }, compared.map(comparison), values.length > 0 && facts(values), !compared.length && !values.length && h("p", { class: "muted" }, "See below."))),
    why.element,
    mapCard,
    incident.consequences.length > 0 && card("Consequences", h("div", { class: "body" }, h("ul", { class: "lines" }, incident.consequences.map(consequence))), { hint: "part of this incident, notified once" }),
    ...texts.map(({ name, text, hint }) => card(name, h("div", { class: "body" }, h("pre", { class: "dump", tabindex: "0" }, text)), { hint })),
    timeline(operate),
  ];
  const typed = left.querySelector("textarea")?.value;
  fill(left, parts);
  const box = left.querySelector("textarea");
  if (typed && box) box.value = typed;
});

function consequence(one) {
  return h("li", {}, h("b", {}, kindName(one.kind)), " ", rankList(one.ranks), one.step !== null && one.step !== undefined && ` at step ${number(one.step)}`, h("div", { class: "muted break" }, one.summary));
}

function timeline(operate) {
  const before = changesBefore();
  const recent = before.slice(-CHANGES_SHOWN);
  const earlier = before.slice(0, -CHANGES_SHOWN);
  const transitions = incident.history.map((one) => ({ at: one.at_unix_ns, what: words(one.what), who: one.actor, text: one.text, kind: one.what }));
  const say = h("form", { class: "say", onsubmit: comment }, h("textarea", { name: "text", required: true, maxLength: 2000, "aria-label": "Comment", placeholder: "Write a comment" }), h("button", {}, "Comment"));
  return card(
    "Timeline",
    h(
      "div",
      { class: "body" },
      earlier.length > 0 && h("details", {}, h("summary", {}, `${earlier.length} earlier changes`), h("ol", { class: "timeline" }, earlier.map(entry))),
      h("ol", { class: "timeline" }, [...recent, ...transitions].sort((a, b) => a.at - b.at).map(entry)),
      operate && say,
    ),
    { hint: `times in ${zone(incident.updated_unix_ns)}` },
  );
}

function entry(one) {
  return h("li", { class: one.kind }, h("time", { title: moment(one.at), datetime: new Date(one.at / 1e6).toISOString() }, hour(one.at)), h("div", {}, h("b", { class: "break" }, one.what), " ", h("span", { class: "muted" }, one.who), one.text && h("div", { class: "break" }, one.text)));
}

// Changes before the onset; the same change on several ranks at one step is one entry.
function changesBefore() {
  const changes = [];
  for (const { what, step, unix_ns: at } of incident.changes_before) {
    const last = changes.at(-1);
    if (last?.what === what && last.step === step) last.ranks += 1;
    else changes.push({ what, step, at, ranks: 1, kind: "change", text: "" });
  }
  for (const one of changes) one.who = ["before the onset", one.step !== null && `step ${number(one.step)}`, one.ranks > 1 && `${one.ranks} ranks`].filter(Boolean).join(", ");
  return changes;
}

const showRight = whenChanged((_, checkpoints, commands, command, _state, session, operate) => {
  const suggestion = incident.suggestion ?? {};
  const good = checkpoints.find((one) => one.id === (suggestion.checkpoint ?? incident.checkpoint));
  fill(
    right,
    card("What to do", h("div", { class: "body" }, incident.state === "resolved" ? h("p", { class: "muted" }, endedWithJob(incident) ? "The job ended before this was over. See to its cause, and to the checkpoint to go on from, before the next start." : "Nothing; the incident is resolved.") : [firstSteps(), advice(suggestion, checkpoints, command), abilities(), !incident.evidence.ended_by_itself && lastGood(good)])),
    feedbackCard(incident, session, operate, load),
    commands.length > 0 && card("Commands", h("div", { class: "body" }, h("ul", { class: "lines" }, commands.map(done)))),
    card("Notifications", h("div", { class: "body" }, notificationList(incident.notifications))),
  );
});

function firstSteps() {
  return incident.first_steps.length > 0 && h("ol", { class: "steps" }, incident.first_steps.map((text) => h("li", {}, withCode(text))));
}

// What the job supports: suggestions leave out the rest.
function abilities() {
  const can = incident.can.map((action) => (DIRECTIVES[action]?.name ?? words(action)).toLowerCase());
  const text = job?.state === "ended" ? "The job has ended." : can.length ? `This job supports: ${can.join(", ")}.` : "This job supports no commands: its script does not use watch.steps(), or its agent does not report.";
  return h("p", { class: "hint" }, text);
}

function advice(suggestion, checkpoints, command) {
  if (!suggestion.action || suggestion.action === "investigate") return null;
  const others = (suggestion.alternatives ?? []).filter((one) => one.action !== "investigate");
  const offer = (one, primary) => {
    const directive = DIRECTIVES[one.action];
    const able = command && directive && job && job.state !== "ended";
    return h(
      "li",
      { class: primary ? "best" : "" },
      h("div", { class: "way" }, h("b", {}, directive?.name ?? words(one.action)), h("span", { class: "cost" }, price(one))),
      h("div", { class: "muted" }, one.reason),
      able && h("button", { class: primary ? "primary" : "small", onclick: () => request(one.action, checkpoints, suggestion.checkpoint) }, icon(directive.icon), directive.name),
      primary && directive && h("code", { class: "copy", title: "Command for a terminal" }, `rankwatch ${one.action} ${shellWord(incident.job)} --wait`),
    );
  };
  const worth = suggestion.break_even_s > 0 && h("p", { class: "hint" }, `Pays off if the wait exceeds ${duration(suggestion.break_even_s)}.`);
  return [h("ul", { class: "ways" }, offer(suggestion, true)), worth, others.length > 0 && [h("h3", { class: "sub" }, "Alternatives"), h("ul", { class: "ways" }, others.map((one) => offer(one, false)))]];
}

function price(way) {
  if (way.cost_gpu_hours === null || way.cost_gpu_hours === undefined) return "cost unknown";
  return `${number(way.cost_gpu_hours, 2)} GPU-h${way.action === "wait" ? " per hour" : ""}`;
}

function shellWord(text) {
  return /^[\w.@%+=:,/-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function lastGood(checkpoint) {
  if (!checkpoint) return h("div", { class: "lastgood" }, h("h3", { class: "sub" }, "Last good checkpoint"), h("p", { class: "muted break" }, incident.checkpoint ?? "none"));
  const repeat = job && incident.state !== "resolved" ? job.step - checkpoint.step : null;
  return h(
    "div",
    { class: "lastgood" },
    h("h3", { class: "sub" }, "Last good checkpoint"),
    h("p", {}, h("b", {}, `step ${number(checkpoint.step)}`), ` · ${checkpoint.tier} `, statePill(checkpoint.verdict)),
    repeat > 0 && h("p", { class: "muted" }, `${number(repeat)} steps would be repeated (${duration(repeat * (job.step_time_s ?? NaN))}).`),
  );
}

function done(one) {
  const step = one.applied_step === null ? "" : ` at step ${number(one.applied_step)}`;
  return h("li", {}, h("b", {}, words(one.action)), " ", outcome(one), step, h("div", { class: "muted break" }, [people(one), one.result || one.reason].filter(Boolean).join(" · ")), traceFold(one));
}

function notificationList(notifications) {
  if (!notifications.length) return h("p", { class: "muted" }, "None: no receiver matches this incident.");
  const transitions = new Map(incident.history.map((one) => [one.number, one.what]));
  return h("ul", { class: "lines" }, notifications.map((one) => h("li", {}, h("b", { class: "break" }, one.receiver), " ", statePill(one.state), h("div", { class: "muted break" }, fate(one, one.command_id ? "command" : transitions.get(one.transition))))));
}

// The outcome of one notification, and why.
function fate(one, what = "") {
  if (one.state === "delivered") return `${what} · ${clock(one.delivered_unix_ns)}, ${duration((one.delivered_unix_ns - one.created_unix_ns) / 1e9)} after the transition`;
  if (one.state === "silenced") return `${what} · muted by a silence`;
  const tries = `${one.tries} ${one.tries === 1 ? "try" : "tries"}`;
  return [what, one.tries ? tries : "not sent yet", one.error].filter(Boolean).join(" · ");
}

async function request(action, checkpoints, chosen) {
  if (await direct(job, action, { checkpoints, chosen, incident: incident.id })) load();
}

async function act(action, body) {
  const changed = await guarded(() => post(path("incidents", id, action), body));
  if (changed) toast(`${words(action)}d`.replace("ee", "e"));
  load();
}

async function resolve() {
  const answer = await ask("Resolve this incident", "A new incident opens only if a detector finds a new episode.", [h("label", {}, "Reason", h("textarea", { name: "text", required: true, maxLength: 2000 }))], "Resolve");
  if (answer) act("resolve", { text: answer.text });
}

async function comment(event) {
  event.preventDefault();
  const text = new FormData(event.target).get("text");
  event.target.reset();
  await guarded(() => post(path("incidents", id, "comment"), { text }));
  load();
}

function showAges() {
  for (const cell of document.querySelectorAll("[data-since]")) {
    const until = Number(cell.dataset.until) || now() * 1e6;
    cell.textContent = age((until - Number(cell.dataset.since)) / 1e9);
  }
}
