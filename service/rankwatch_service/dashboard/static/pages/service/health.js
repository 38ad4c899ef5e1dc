// Health of rankwatch itself: what is wrong and what to do, then each part as it last reported.

import { now } from "../../common/api.js";
import { fill, h, icon, refill, withCode } from "../../common/dom.js";
import { age, ago, bytes, duration, moment, number, words } from "../../common/format.js";
import { everySecond } from "../../common/live.js";
import { card, empty, guarded, severityPill, shell, statePill, tile } from "../../components/shell.js";
import { readHealth, watchHealth } from "../../service/health_banner.js";
import { WaitingAlertsCard } from "../../service/waiting_alerts.js";

const READ_S = 5;
const SILENT_S = 30;

const main = shell("Health");
const head = h("div", { class: "pagehead" }, h("h1", {}, "Health of rankwatch"));
const parts = h("div", { class: "column" });
const waiting = new WaitingAlertsCard();
main.append(head, h("div", { class: "column" }, parts, waiting.element));
watchHealth(show);
const readWaiting = () => guarded(() => waiting.read());
readWaiting();
let seconds = 0;
everySecond(() => (seconds += 1) % READ_S === 0 && (readHealth(), readWaiting()));

function show(health) {
  fill(head, h("h1", {}, "Health of rankwatch"), h("span", { class: "muted" }, `version ${health.version} · read ${new Date(health.at_unix_ns / 1e6).toLocaleTimeString("en-GB")}`));
  const others = [streamCard(health), processesCard(health), receiversCard(health), agentsCard(health), droppedCard(health)];
  refill(parts, problems(health), tiles(health), others.filter(Boolean));
}

function problems({ problems: found }) {
  if (!found.length) return h("section", { class: "card works" }, h("span", { class: "seal" }, icon("good")), h("p", {}, h("b", {}, "All parts work."), " Telemetry is evaluated, and receivers are notified of incidents."));
  return card(found.length === 1 ? "1 problem" : `${found.length} problems`, h("ul", { class: "body problems" }, found.map((one) => h("li", {}, severityPill(one.severity), h("div", {}, h("p", { class: "break" }, h("b", {}, one.text)), h("p", { class: "muted break" }, withCode(one.advice)))))));
}

function tiles({ stream, notifier, receivers, agents_total: agents, agents_silent: silent, database, dead_letters_day: letters }) {
  const lag = stream.partitions.reduce((sum, one) => sum + one.lag, 0);
  const newest = Math.max(...stream.processes.map((one) => one.reported_unix_ns));
  const failing = receivers.filter((one) => !one.enabled || one.error).length;
  const room = database.free_bytes === null ? null : `${bytes(database.free_bytes)} free`;
  return h(
    "section",
    { class: "card tiles" },
    tile("Stream lag", `${number(lag)} records`, stream.processes.length ? `reported ${ago(newest)}` : null),
    tile("Notifications waiting", number(notifier.waiting), notifier.oldest_waiting_unix_ns === null ? "nothing is late" : `oldest for ${age(since(notifier.oldest_waiting_unix_ns))}`),
    tile("Notifier", notifier.reported_unix_ns === null ? "never ran" : since(notifier.reported_unix_ns) > SILENT_S ? "silent" : "runs", notifier.reported_unix_ns === null ? null : `reported ${ago(notifier.reported_unix_ns)}`),
    tile("Receivers", receivers.length ? `${receivers.length - failing} of ${receivers.length} work` : "none", receivers.length ? null : "nobody is notified"),
    tile("Agents", agents ? `${number(agents - silent)} of ${number(agents)}` : "none", agents ? "have reported" : "no job trains here"),
    tile("Database", bytes(database.size_bytes), [database.kind === "sqlite" ? "SQLite" : "PostgreSQL", database.telemetry_log === "kafka" && "Kafka", room].filter(Boolean).join(" · ")),
    tile("Dead letters, 24 h", number(letters), letters ? "records nobody can use" : null),
  );
}

const since = (unixNs) => now() / 1e3 - unixNs / 1e9;

const table = (headings, rows) => h("div", { class: "wide" }, h("table", { class: "compact" }, h("thead", {}, h("tr", {}, headings.map((name) => h("th", {}, name)))), h("tbody", {}, rows)));

const heard = (unixNs, silentS = SILENT_S) => h("td", { class: `nowrap ${since(unixNs) > silentS ? "late" : ""}`, title: moment(unixNs) }, ago(unixNs));

function streamCard({ stream: { partitions } }) {
  if (!partitions.length) return null;
  const row = (one) => h("tr", {}, h("td", {}, one.partition), h("td", { class: "break" }, one.owner || "nobody"), h("td", {}, number(one.lag)), h("td", { class: "nowrap" }, one.tick_unix_ns ? `${ago(one.tick_unix_ns)}` : "never"), h("td", {}, number(one.lost_records)), h("td", {}, number(one.epoch)), one.owner ? heard(one.reported_unix_ns) : h("td", {}, "never"));
  return card("Partitions of the log", table(["Partition", "Owner", "Lag", "Newest tick", "Lost", "Epoch", "Reported"], partitions.map(row)), { hint: "a tick stands still while all jobs of its partition are idle" });
}

function processesCard({ stream: { processes } }) {
  if (!processes.length) return null;
  const events = (counters) => Object.entries(counters).filter(([, count]) => count).map(([what, count]) => `${words(what).toLowerCase()} ${number(count)}`);
  const row = (one) => h("tr", {}, h("td", { class: "break" }, one.owner), h("td", { class: "nowrap" }, `for ${duration(since(one.started_unix_ns))}`), h("td", {}, events(one.counters).join(" · ") || "no failures"), heard(one.reported_unix_ns));
  return card("Stream processes", table(["Process", "Runs", "Events since its start", "Reported"], processes.map(row)), { hint: "of the last 24 hours" });
}

function receiverState(one) {
  if (!one.enabled) return statePill("switched off");
  if (one.error) return statePill("failing");
  return statePill(one.delivered_unix_ns === null ? "unused" : "works");
}

function receiversCard({ receivers }) {
  const box = h("div");
  const row = (one) => h("tr", {}, h("td", { class: "break" }, h("a", { href: `/notifications?receiver=${encodeURIComponent(one.name)}` }, one.name)), h("td", {}, receiverState(one)), h("td", {}, number(one.waiting)), h("td", {}, number(one.failed)), h("td", { class: "nowrap" }, one.delivered_unix_ns === null ? "none in 24 h" : ago(one.delivered_unix_ns)), h("td", { class: "break" }, one.disabled_reason || one.error));
  if (receivers.length) fill(box, table(["Receiver", "State", "Waiting", "Failed, 24 h", "Delivered", "Why"], receivers.map(row)));
  else empty(box, "None: incidents appear on these pages only.");
  return card("Receivers", box, { tools: h("a", { href: "/notifications" }, "Notifications") });
}

function agentsCard({ agents, agents_total: total }) {
  if (!agents.length) return null;
  const row = (one) => h("tr", {}, h("td", { class: "break" }, h("a", { href: `/hosts/${encodeURIComponent(one.host)}` }, one.host)), h("td", { class: "break" }, h("a", { href: `/jobs/${encodeURIComponent(one.job)}` }, one.job)), h("td", { class: "break" }, one.attempt), heard(one.reported_unix_ns));
  const hint = agents.length < total ? `${number(agents.length)} of ${number(total)}, silent ones first` : "silent ones first";
  return card("Agents", table(["Host", "Job", "Attempt", "Reported"], agents.map(row)), { hint });
}

function droppedCard({ dropped }) {
  if (!dropped.length) return null;
  const row = ({ job, reasons }) => h("tr", {}, h("td", { class: "break" }, h("a", { href: `/jobs/${encodeURIComponent(job)}` }, job)), h("td", { class: "break" }, Object.entries(reasons).map(([reason, count]) => `${words(reason).toLowerCase()} ${number(count)}`).join(" · ")));
  return card("Dropped telemetry", table(["Job", "Records by reason"], dropped.map(row)), { hint: "did not reach the detectors or the charts; docs/operations.md, States of a job" });
}
