// Commands to all jobs: those that wait for an approval, then all of them, newest first.

import { get, getList } from "../../common/api.js";
import { fill, h } from "../../common/dom.js";
import { ago, moment, number, words } from "../../common/format.js";
import { everySecond, gathered, listen } from "../../common/live.js";
import { approvals } from "../../components/approvals.js";
import { ALL_JOBS, outcome, people } from "../../components/directives.js";
import { keys } from "../../components/keys.js";
import { empty, guarded, shell, viewer, whenChanged } from "../../components/shell.js";

const PAGE = 50;
const VIEWS = { "": "All", open: "Open", done: "Applied", not: "Not carried out" };
const STATES = { open: ["requested", "approved", "sent", "accepted"], done: ["applied"], not: ["refused", "failed", "expired", "cancelled"] };

const query = new URLSearchParams(location.search);
const main = shell("Commands");
const views = h("div", { class: "views", role: "group", "aria-label": "State" });
const ofJob = h("p", { class: "muted" });
const waiting = h("div", { class: "approvals" });
const list = h("div", { class: "card list" });
let wanted = PAGE;
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Commands"), ofJob, views), waiting, list);
keys(() => [...list.querySelectorAll("tr.link")]);
const refresh = gathered(load);
listen((topic) => ["command", "reset"].includes(topic) && refresh());
everySecond(() => {
  for (const place of list.querySelectorAll("[data-at]")) place.textContent = ago(Number(place.dataset.at));
});
load();

async function load() {
  await guarded(async () => {
    const [view, job] = [query.get("state") ?? "", query.get("job")];
    const [found, undecided, session] = await Promise.all([getList("commands", { state: STATES[view] ?? [], job }, wanted), get("commands", { waiting: true, job, limit: 50 }), viewer()]);
    showHead(view, job);
    showWaiting(undecided.items, session);
    show(found.items, view);
  });
}

const showHead = whenChanged((view, job) => {
  fill(views, Object.entries(VIEWS).map(([name, label]) => h("button", { class: "view", "aria-pressed": String(name === view), onclick: () => set("state", name) }, label)));
  fill(ofJob, job && ["of ", h("a", { class: "break", href: `/jobs/${encodeURIComponent(job)}` }, job), " ", h("button", { class: "small", onclick: () => set("job", "") }, "Of all jobs")]);
});

function set(name, value) {
  if (value) query.set(name, value);
  else query.delete(name);
  history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
  wanted = PAGE;
  load();
}

const showWaiting = whenChanged((commands, session) => fill(waiting, approvals(commands, session, load)));

const show = whenChanged((items, view) => {
  if (!items.length) return void empty(list, view ? "None." : "No command has been requested yet. Request one on the page of a job or an incident, or by a command such as `rankwatch pause`; the policy requests them too.");
  const titles = ["Requested", "Command", "Job", "State", "Who and why", "Result"];
  const more = () => {
    wanted += PAGE;
    load();
  };
  fill(list, h("table", { class: "stack" }, h("thead", {}, h("tr", {}, titles.map((name) => h("th", {}, name)))), h("tbody", {}, items.map(row))), items.length >= wanted && h("div", { class: "rest" }, h("button", { onclick: more }, "Show more")));
});

function row(one) {
  const where = `/commands/${encodeURIComponent(one.id)}`;
  return h(
    "tr",
    { class: "link", onclick: (event) => !event.target.closest("a") && location.assign(where) },
    h("td", { class: "nowrap", title: moment(one.requested_unix_ns) }, h("span", { "data-at": one.requested_unix_ns }, ago(one.requested_unix_ns))),
    h("td", {}, h("a", { class: "title", href: where }, words(one.action)), one.applied_step !== null && h("div", { class: "under" }, `at step ${number(one.applied_step)}`)),
    h("td", { class: "break" }, one.job === ALL_JOBS ? "all jobs" : h("a", { href: `/jobs/${encodeURIComponent(one.job)}` }, one.job), one.incident_id && h("div", { class: "under" }, h("a", { href: `/incidents/${encodeURIComponent(one.incident_id)}` }, "incident"))),
    h("td", {}, outcome(one)),
    h("td", { class: "break" }, people(one), one.reason && h("div", { class: "under" }, one.reason)),
    h("td", { class: "break" }, one.result),
  );
}
