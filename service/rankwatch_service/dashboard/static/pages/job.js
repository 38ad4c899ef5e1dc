// One job: metrics, ranks over steps, recent incidents, checkpoints, commands and attempts.

import { get, now, path } from "../common/api.js";
import { editButton, whose } from "../components/job_project.js";
import { removal } from "../components/job_removal.js";
import { Chart } from "../charts/line_chart.js";
import { approvals } from "../components/approvals.js";
import { DevicesCard } from "../components/devices.js";
import { able, direct, DIRECTIVES, outcome, people } from "../components/directives.js";
import { fill, h, icon } from "../common/dom.js";
import { age, bytes, clock, duration, kindName, lastStep, moment, number, rankList, stepNumber, words } from "../common/format.js";
import { troublesNow } from "../incidents/troubles.js";
import { MetricsCard } from "../components/metrics_card.js";
import { LostTimeCard } from "../incidents/lost_time.js";
import { RankMap } from "../charts/rank_map.js";
import { everySecond, gathered, listen } from "../common/live.js";
import { fan, mean } from "../charts/series.js";
import { ownLinks } from "../components/own_links.js";
import { notFound } from "../components/error_page.js";
import { traceFold } from "../components/traces.js";
import { card, empty, guarded, incidentPill, mayDo, severityPill, shell, statePill, tile, viewer, whenChanged } from "../components/shell.js";

const STALE_S = 15;
const POLL_S = 2;
const LISTED = 8;
const RANGES = [500, 2000, 10_000];
const VALUES_SHOWN = 2_000_000; // ranks × steps in the first view, which shows every step
const NOT_MOVING = ["stalled", "paused", "lost"]; // rates are the last ones before that
const IDLE_SHARE = 4; // drawing takes at most a fifth of the time ...
const IDLE_MAX_MS = 5000; // ... but the page is redrawn at least this often

const name = decodeURIComponent(location.pathname.slice("/jobs/".length));
const main = shell("Jobs");
document.title = `${name} · rankwatch`;

const head = h("div", { class: "job-head" });
const waiting = h("div", { class: "approvals" });
const troubles = h("div", { class: "troubles" });
const links = h("div");
ownLinks("job", { job: name }).then((found) => fill(links, found));
const strip = h("div", { class: "card tiles strip" });
const body = (kind) => h("div", { class: `body ${kind}` });
const [lossBox, normBox, fanBox] = [body("plot"), body("plot"), body("plot")];
const map = new RankMap(name, () => guarded(drawMap));
const rangePick = h("select", { class: "small", "aria-label": "Steps shown", onchange: () => draw() }, RANGES.map((steps) => h("option", { value: steps }, `last ${number(steps)} steps`)), h("option", { value: "" }, "all steps"));
const attemptPick = h("select", { class: "small", "aria-label": "Attempt shown", hidden: true, onchange: () => draw() });
const query = new URLSearchParams(location.search);
const axisPick = h("select", { class: "small", "aria-label": "Axis", onchange: pickAxis }, h("option", { value: "" }, "over steps"), h("option", { value: "time", selected: query.get("axis") === "time" }, "over time"));
const free = new MetricsCard(name, query, keepAddress);
const lists = h("div", { class: "lists" });
const lostTime = new LostTimeCard(name, () => guarded(() => lostTime.load(job)));
const devices = ["gpu", "port", "host"].map((kind) => new DevicesCard(name, kind));
main.append(
  h("div", { class: "crumbs" }, h("a", { href: "/jobs" }, "‹ Jobs"), h("a", { href: `/topology/${encodeURIComponent(name)}` }, "Topology"), h("span", { class: "range" }, attemptPick, " ", axisPick, " ", rangePick)),
  head,
  links,
  waiting,
  troubles,
  strip,
  h("div", { class: "charts" }, card("Loss", lossBox), card("Gradient norm", normBox), card("Step time", fanBox, { tools: h("span", { class: "legend" }, h("i", { class: "median" }), "median", h("i", { class: "band" }), "5–95 %", h("i", { class: "max" }), "slowest") })),
  free.card,
  map.card,
  h("div", { class: "lost-time" }, lostTime.card),
  lists,
  ...devices.map((one) => one.card),
);

const loss = new Chart(lossBox, { metric: "loss", label: "Loss" });
const norm = new Chart(normBox, { metric: "grad_norm", label: "Gradient norm" });
const stepTime = new Chart(fanBox, { metric: "step_time_s", label: "Step time, median, 5th to 95th percentile and slowest rank," });
let job = null;
let incidents = [];
let attempts = [];
let checkpoints = [];
let commands = [];
let drawing = false;
let timeOf = null; // of a step, on the axis of times
let drawAgainMs = 0;
let ranged = false;
let missing = false;

const refresh = gathered(load);
listen((topic, ofJob) => (topic === "reset" || ofJob === name || ofJob === null) && refresh());
let seconds = 0;
everySecond(() => {
  if (missing) return;
  if (seconds++ % POLL_S === 0) load();
  showAges();
});

async function load() {
  await guarded(async () => {
    const answers = await Promise.all([
      get(path("jobs", name)),
      get("incidents", { job: name, limit: 50 }),
      get(path("jobs", name, "attempts"), { limit: 50, topology: false }),
      get(path("jobs", name, "checkpoints"), { limit: 50 }),
      get("commands", { job: name, limit: LISTED + 1 }),
      get("commands", { job: name, waiting: true, limit: 50 }),
      viewer(),
      mayDo("command"),
      mayDo("operate"),
      mayDo("admin"),
    ]).catch(unknown);
    if (answers === null) return;
    const [found, troubles, tries, saves, asked, undecided, session, command, operate, admin] = answers;
    [job, incidents, attempts, checkpoints, commands] = [found, troubles.items, tries.items, saves.items, asked.items];
    showHead(job.state, job.can, job.orders, command, job.launches_at_once, job.topology.watched, operate, admin, whose(job.project, job.owner));
    showWaiting(undecided.items, session);
    free.begin(job.project);
    showTroubles(incidents.filter((one) => one.state !== "resolved"), job.accelerated, operate);
    showStrip();
    showLists(incidents, troubles.total, checkpoints, commands, attempts, saveEvery(job));
    showAges();
    offerAttempts(attempts.map(({ attempt, number, first_step }) => ({ attempt, number, first_step })));
    chooseRange();
    await Promise.all([lostTime.load(job), performance.now() >= drawAgainMs && draw()]);
  });
}

// Nobody has reported this job, or it was deleted: there is nothing to follow.
function unknown(error) {
  if (error.status !== 404) throw error;
  missing = true;
  notFound(main, `There is no job ${name}`, "It has never reported under this name, was deleted, or you may not see it.", "/jobs", "All jobs");
  return null;
}

const showHead = whenChanged((state, can, orders, command, launches, watched, operate, admin, belongs) => {
  const fits = { pause: state === "running", resume: state === "paused" };
  const possible = Object.keys(DIRECTIVES).filter((action) => (fits[action] ?? true) && (able(can, action) || action === "resume"));
  fill(
    head,
    h(
      "div",
      { class: "line" },
      h("h1", { class: "break" }, name),
      statePill(state),
      launches.length > 1 && h("span", { class: "pill warning", title: `${launches.join(" and ")} run under the same name; give each its own job name` }, `${launches.length} launches with this name`),
      orders.map((order) => h("span", { class: "pill warning", title: order.detail }, `${order.action}: ${order.phase}${order.step >= 0 ? ` at step ${number(order.step)}` : ""}`)),
      command && state !== "ended" && h("div", { class: "actions" }, possible.map(button)),
      operate && h("div", { class: "actions" }, editButton(() => job, load)),
      admin && removal(() => job),
    ),
    belongs && h("div", { class: "under break" }, belongs),
    watched && h("div", { class: "under", title: "What the torch probe measures in this job, and what it does not" }, watched),
  );
});

const showTroubles = whenChanged((open, accelerated, operate) => fill(troubles, troublesNow(open, accelerated, operate, load)));
const showWaiting = whenChanged((commands, session) => fill(waiting, approvals(commands, session, load)));

function button(action) {
  const { icon: sign, name: label, is_costly: danger } = DIRECTIVES[action];
  const good = checkpoints.filter((one) => one.verdict === "good" || one.verdict === "unproven");
  return h("button", { class: danger ? "danger" : action === "resume" ? "primary" : "", onclick: async () => (await direct(job, action, { checkpoints: good })) && load() }, icon(sign), label);
}

function showStrip() {
  const saved = checkpoints.find((one) => one.id === job.checkpoints.rollback_to);
  fill(
    strip,
    tile("Step", stepNumber(job.step), job.last_progress_unix_ns === null ? `attempt ${job.attempt}` : h("span", { "data-progress": job.last_progress_unix_ns, title: `attempt ${job.attempt}` })),
    tile("Step time", rate(duration(job.step_time_s)), NOT_MOVING.includes(job.state) ? `before the job was ${job.state}` : job.step_time_s > 0 ? `${number(1 / job.step_time_s, 3)} steps / s` : ""),
    tile("Loss", rate(number(job.loss, 4)), "mean over ranks"),
    tile("Ranks reporting", [number(job.ranks_reporting), h("small", {}, ` of ${number(job.world_size)}`)], h("span", { "data-seen": job.last_seen_unix_ns })),
    tile("Last good checkpoint", saved ? `step ${number(saved.step)}` : "none yet", saved ? h("span", { "data-saved": saved.saved_unix_ns, "data-tier": saved.tier }) : `${checkpoints.length} in the ledger`),
    tile("Incidents", job.incidents ? h("a", { href: `/incidents?job=${encodeURIComponent(name)}` }, number(job.incidents)) : "0", job.incidents ? severityPill(job.worst_severity) : "none unresolved"),
  );
}

// The rates of a job that makes no progress are out of date.
function rate(text) {
  return NOT_MOVING.includes(job.state) ? h("span", { class: "then" }, text) : text;
}

function showAges() {
  const ageOf = (unixNs) => now() / 1e3 - Number(unixNs) / 1e9;
  for (const place of strip.querySelectorAll("[data-seen]")) {
    const quietFor = ageOf(place.dataset.seen);
    place.textContent = `seen ${age(quietFor)} ago`;
    document.body.classList.toggle("stale", quietFor > STALE_S && job.state !== "ended");
  }
  for (const place of strip.querySelectorAll("[data-progress]")) place.textContent = `last step ${age(ageOf(place.dataset.progress))} ago`;
  for (const place of strip.querySelectorAll("[data-saved]")) place.textContent = `${place.dataset.tier} · ${age(ageOf(place.dataset.saved))} ago`;
}

// The longest range that loads fast, unless the user chose one.
function chooseRange() {
  if (ranged) return;
  ranged = true;
  rangePick.value = RANGES.findLast((steps) => steps * job.world_size <= VALUES_SHOWN) ?? RANGES[0];
}

// Lines are drawn for all attempts, or for one: after a rollback they overlap.
const offerAttempts = whenChanged((tries) => {
  const chosen = attemptPick.value;
  const steps = (one) => (one.first_step === null ? "no steps" : `from step ${number(one.first_step)}`);
  attemptPick.hidden = tries.length < 2;
  fill(attemptPick, h("option", { value: "" }, "all attempts"), tries.map((one) => h("option", { value: one.attempt, selected: one.attempt === chosen }, `attempt ${one.number}: ${one.attempt}, ${steps(one)}`)));
});

// An earlier attempt is shown from its own first step: the newest steps are not its.
function firstStep() {
  const chosen = attempts.find((one) => one.attempt === attemptPick.value);
  if (chosen && chosen !== attempts[0]) return chosen.first_step ?? 0;
  return rangePick.value ? Math.max(0, job.step - Number(rangePick.value)) : null;
}

const overTime = () => axisPick.value === "time";

function pickAxis() {
  if (overTime()) query.set("axis", "time");
  else query.delete("axis");
  keepAddress();
}

// Axis and metrics stay in the address.
function keepAddress() {
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
  draw();
}

async function draw() {
  if (drawing) return;
  drawing = true;
  const began = performance.now();
  try {
    const from = firstStep();
    const chosen = { attempt: attemptPick.value, times: overTime() };
    if (!chosen.times) timeOf = null;
    const lines = Promise.all([mean(name, "loss", from, chosen), mean(name, "grad_norm", from, chosen), fan(name, "step_time_s", from, chosen)]);
    const [measured] = await Promise.all([lines, !chosen.times && drawMap()]); // on an axis of times it needs theirs
    timeOf = measured.find((one) => one.lines.length)?.timeOf ?? null;
    const troubled = chosen.times ? troubledTimes() : outlines();
    const show = (chart, { lines, marks }) => chart.show(lines, marks, troubled, { events: noted(chosen.times, lines), times: chosen.times, label: `${chart.label} over ${chosen.times ? "time" : "steps"}` });
    await Promise.all([chosen.times && drawMap(), ...devices.map((one) => one.draw()), ...[loss, norm, stepTime].map((chart, n) => show(chart, measured[n])), free.draw(from, { ...chosen, numbers: new Map(attempts.map((one) => [one.attempt, one.number])) }, troubled, (lines) => noted(chosen.times, lines))]);
  } finally {
    drawing = false;
    drawAgainMs = performance.now() + Math.min(IDLE_MAX_MS, IDLE_SHARE * (performance.now() - began));
  }
}

// Attempts, checkpoints, commands and changes of the configuration within what lines show.
function noted(times, lines) {
  const event = (step, unixNs, text, begins = false) => ({ step: times ? unixNs / 1e6 : step, text, begins, known: step !== null || times });
  const events = [
    ...attempts.slice(0, -1).map((one) => event(one.first_step, one.started_unix_ns, `attempt ${one.number}`, true)),
    ...checkpoints.map((one) => event(one.step, one.saved_unix_ns, one.tier === "memory" ? "captured" : "saved")),
    ...commands.filter((one) => one.applied_unix_ns !== null).map((one) => event(one.applied_step, one.applied_unix_ns, words(one.action).toLowerCase())),
    ...job.configuration.map((one) => event(one.step, one.unix_ns, one.what)),
  ];
  const places = lines.flatMap((one) => one.steps);
  const [first, last] = [Math.min(...places), Math.max(...places)];
  return events.filter((one) => one.known && one.step >= first && one.step <= last).toSorted((a, b) => a.step - b.step);
}

const troubledTimes = () => incidents.map((one) => ({ from: one.onset_unix_ns / 1e6, to: one.resolved_unix_ns ? one.resolved_unix_ns / 1e6 : now(), severity: one.severity }));

function outlines() {
  const end = (one) => lastStep(one) ?? job.step;
  return incidents
    .filter((one) => one.onset_step !== null && end(one) >= firstStep())
    .map((one) => ({ from: Math.max(one.onset_step, firstStep()), to: end(one), ranks: one.ranks, severity: one.severity, resolved: one.state === "resolved" }));
}

const drawMap = () => map.draw(job, { from: firstStep(), outlines: outlines(), timeOf });

// The advised interval between checkpoints, in steps to two digits: one that follows each reading would never stand still.
function saveEvery(job) {
  if (!job.checkpoints.interval_s || !job.step_time_s) return null;
  return number(Math.max(1, Number((job.checkpoints.interval_s / job.step_time_s).toPrecision(2))));
}

const showLists = whenChanged((incidents, incidentsInAll, checkpoints, commands, attempts, advised) => {
  const listed = (title, items, none, row, hint) => {
    const table = h("table", { class: "compact" }, h("tbody", {}, items.slice(0, LISTED).map(row)));
    const hints = [items.length > LISTED && `the newest ${LISTED}`, hint].filter(Boolean);
    return card(title, items.length ? table : empty(h("div"), none), { hint: hints.length ? hints.map((one, n) => [n > 0 && " · ", one]) : null });
  };
  fill(
    lists,
    listed("Recent incidents", incidents, "None.", (one) =>
      h("tr", { class: "link", onclick: () => location.assign(`/incidents/${encodeURIComponent(one.id)}`) }, h("td", {}, severityPill(one.severity)), h("td", { class: "break" }, h("a", { href: `/incidents/${encodeURIComponent(one.id)}` }, kindName(one.kind)), " ", h("span", { class: "muted" }, `${rankList(one.ranks, 3)}, step ${number(one.onset_step)}`)), h("td", { class: "right" }, incidentPill(one))),
      incidentsInAll > LISTED ? h("a", { href: `/incidents?state=all&job=${encodeURIComponent(name)}` }, `all ${number(incidentsInAll)}`) : null,
    ),
    listed("Checkpoints", checkpoints, "None.", (one) =>
      h("tr", {}, h("td", { class: "nowrap" }, h("b", {}, `step ${number(one.step)}`)), h("td", { class: "muted", title: one.location }, [one.tier, one.bytes > 0 && bytes(one.bytes), one.seconds > 0 && duration(one.seconds)].filter(Boolean).join(" · ")), h("td", { class: "right", title: one.verdict_reason }, statePill(one.verdict))),
      advised ? `advice: save every ${advised} steps` : null,
    ),
    listed("Commands", commands, "None.", (one) =>
      h("tr", {}, h("td", { class: "nowrap" }, h("a", { class: "title", href: `/commands/${encodeURIComponent(one.id)}` }, words(one.action)), one.applied_step !== null && h("span", { class: "muted" }, ` at ${number(one.applied_step)}`)), h("td", { class: "muted break", title: moment(one.requested_unix_ns) }, [people(one), one.result || one.reason].filter(Boolean).join(" · "), traceFold(one)), h("td", { class: "right" }, outcome(one))),
    ),
    listed("Attempts", attempts, "None.", (one) =>
      h("tr", {}, h("td", { class: "break" }, h("b", {}, `${one.number}: ${one.attempt}`)), h("td", { class: "muted nowrap" }, one.first_step === null ? "no steps" : `steps ${number(one.first_step)} to ${number(one.last_step)}`), h("td", { class: "right muted", title: moment(one.started_unix_ns) }, one.ended_unix_ns ? `lasted ${age((one.ended_unix_ns - one.started_unix_ns) / 1e9)}` : `since ${clock(one.started_unix_ns)}`)),
    ),
  );
});
