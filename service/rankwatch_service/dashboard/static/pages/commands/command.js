// One command: what was asked of which ranks, by whom, each try, what each rank answered, and the audit trail of it.

import { get, path, post } from "../../common/api.js";
import { fill, h } from "../../common/dom.js";
import { ago, clock, duration, moment, number, words } from "../../common/format.js";
import { everySecond, gathered, listen } from "../../common/live.js";
import { approvals } from "../../components/approvals.js";
import { ALL_JOBS, DIRECTIVES, outcome, people } from "../../components/directives.js";
import { notFound } from "../../components/error_page.js";
import { card, guarded, mayDo, said, shell, viewer, whenChanged } from "../../components/shell.js";
import { traceFold } from "../../components/traces.js";

const ENDED = ["applied", "refused", "failed", "expired", "cancelled"];
const ANSWERS = { "": "has not answered", held: "holds at the step", done: "has done it", failed: "failed", passed: "was past the step", released: "goes on, nothing was done", went: "has done it and goes on" };
const COLOURS = { held: "warning", done: "good", went: "good", failed: "critical", passed: "warning", released: "" };
const NAMED = 12; // ranks that a line names

const id = decodeURIComponent(location.pathname.slice("/commands/".length));
const main = shell("Commands");
const head = h("div", { class: "job-head" });
const waiting = h("div", { class: "approvals" });
const parts = h("div", { class: "column" });
main.append(h("div", { class: "crumbs" }, h("a", { href: "/commands" }, "‹ Commands")), head, waiting, parts);
let ended = false;
let missing = false;
const refresh = gathered(load);
listen((topic) => ["command", "reset"].includes(topic) && refresh());
everySecond(() => !ended && load());

async function load() {
  if (missing) return;
  await guarded(async () => {
    const answers = await Promise.all([get(path("commands", id)), get(path("commands", id, "ranks")), viewer(), mayDo("admin"), mayDo("command")]).catch(unknown);
    if (answers === null) return;
    const [command, ranks, session, admin, may] = answers;
    ended = ENDED.includes(command.state);
    const trail = admin ? await get("audit", { target: command.id, limit: 50 }).catch(() => ({ items: [] })) : { items: [] };
    showHead(command, may && !ended);
    showWaiting(command, session);
    show(command, ranks, trail.items);
  });
}

function unknown(error) {
  if (error.status !== 404) throw error;
  missing = true;
  notFound(main, `There is no command ${id}`, "It is older than 90 days, its job was deleted, or you may not see it.", "/commands", "All commands");
  return null;
}

const showHead = whenChanged((command, may) => {
  const name = DIRECTIVES[command.action]?.name ?? words(command.action);
  document.title = `${name} ${command.job === ALL_JOBS ? "" : command.job} · rankwatch`;
  const cancel = async () => (await said(post(path("commands", command.id, "cancel"), {}), `${name} is cancelled`)) && load();
  fill(head, h("div", { class: "line" }, h("h1", { class: "break" }, `${name} `, command.job !== ALL_JOBS && h("a", { href: `/jobs/${encodeURIComponent(command.job)}` }, command.job)), outcome(command), may && h("div", { class: "actions" }, h("button", { onclick: cancel }, "Cancel"))), command.result && h("p", { class: "under break" }, command.result));
});

const showWaiting = whenChanged((command, session) => {
  const undecided = command.approval_required && command.state === "requested";
  fill(waiting, undecided && approvals([command], session, load));
});

const show = whenChanged((command, ranks, trail) => {
  fill(parts, asked(command), progress(command, ranks), tries(command.orders), command.action === "trace" && card("What the ranks recorded", h("div", { class: "body" }, traceFold(command))), audit(trail));
});

function asked(command) {
  const params = Object.entries(command.params).map(([name, value]) => `${words(name).toLowerCase()} ${typeof value === "string" ? value : JSON.stringify(value)}`);
  const facts = [
    ["Requested", h("span", { title: moment(command.requested_unix_ns) }, `${clock(command.requested_unix_ns)} by ${people(command)}`)],
    ["Why", command.reason || "no reason given"],
    ["Ranks", command.world_size ? number(command.world_size) : "all"],
    ["Attempt", command.attempt],
    params.length > 0 && ["With", params.join(" · ")],
    command.incident_id && ["For", h("a", { href: `/incidents/${encodeURIComponent(command.incident_id)}` }, "an incident")],
    ["Expires", command.finished_unix_ns === null ? clock(command.expires_unix_ns) : "it is over"],
    command.applied_unix_ns !== null && ["Applied", `${clock(command.applied_unix_ns)}${command.applied_step === null ? "" : ` at step ${number(command.applied_step)}`}, ${duration((command.applied_unix_ns - command.requested_unix_ns) / 1e9)} after the request`],
  ];
  return card("What was asked", h("div", { class: "body" }, h("dl", { class: "facts" }, facts.filter(Boolean).map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]))));
}

// How many ranks have answered what, with the slow and the failed ones by name.
function progress(command, { order, items }) {
  if (!order || !items.length) return null;
  const total = Math.max(command.world_size, items.length);
  const by = Object.groupBy(items, (one) => one.answer);
  const done = items.filter((one) => one.answer !== "").length;
  const answered = ["failed", "", "passed", "held", "done", "went", "released"].filter((answer) => by[answer]);
  const lines = answered.map((answer) => {
    const ranks = by[answer];
    const few = ranks.slice(0, NAMED).map((one) => `${one.rank}`).join(", ");
    const details = [...new Set(ranks.map((one) => one.detail).filter(Boolean))].slice(0, 3);
    return h("li", {}, h("span", { class: `pill ${COLOURS[answer] ?? "info"}` }, number(ranks.length)), " ", ANSWERS[answer] ?? answer, h("span", { class: "muted" }, `: ${ranks.length === 1 ? "rank" : "ranks"} ${few}${ranks.length > NAMED ? ` and ${number(ranks.length - NAMED)} more` : ""}`), answer === "failed" && details.length > 0 && h("div", { class: "muted break" }, details.join(" · ")));
  });
  const cells = items.map((one) => h("i", { class: `cell ${COLOURS[one.answer] ?? "silent"}`, title: `rank ${one.rank} on ${one.host}: ${ANSWERS[one.answer] ?? one.answer}${one.step >= 0 ? ` at step ${number(one.step)}` : ""}, ${one.state}, reported ${ago(one.reported_unix_ns)}` }));
  return card("Ranks", h("div", { class: "body ranks" }, h("label", {}, `${number(done)} of ${number(total)} have answered`, h("progress", { max: total, value: done })), h("div", { class: "cells", "aria-hidden": "true" }, cells), h("ul", { class: "lines" }, lines)), { hint: "as their agents last reported" });
}

function tries(orders) {
  if (!orders.length) return null;
  const row = (one) => h("tr", {}, h("td", {}, number(one.try_number)), h("td", {}, one.phase), h("td", {}, one.step >= 0 ? number(one.step) : "not chosen yet"), h("td", { class: "break" }, one.checkpoint || "–"), h("td", { class: "break" }, one.detail), h("td", { class: "nowrap", title: moment(one.phase_unix_ns) }, clock(one.phase_unix_ns)));
  return card("Tries", h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, ["Try", "Phase", "Target step", "Checkpoint", "Detail", "Since"].map((name) => h("th", {}, name)))), h("tbody", {}, orders.map(row)))), { hint: "hold, do, go: on all ranks at the same step, or on none" });
}

function audit(rows) {
  if (!rows.length) return null;
  const row = (one) => h("tr", {}, h("td", { class: "nowrap", title: moment(one.at_unix_ns) }, clock(one.at_unix_ns)), h("td", { class: "break" }, one.actor), h("td", {}, one.action), h("td", {}, one.source), h("td", {}, one.outcome));
  return card("Audit trail", h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("tbody", {}, rows.map(row)))), { tools: h("a", { href: "/access" }, "All of it") });
}
