// Access: people and tokens, what they may do and when they were last here; and the audit trail.

import { get, getList, now, path, post, remove } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { age, moment, number, words } from "../common/format.js";
import { ask, card, empty, guarded, shell, statePill, toast } from "../components/shell.js";

const PAGE = 50;
const DAY_S = 86_400;
const SCOPES = ["ingest", "alert", "read", "operate", "command", "admin"];

const main = shell("Access");
const people = h("div");
const tokens = h("div");
const trail = h("div");
const wanted = { tokens: PAGE, trail: PAGE };
main.append(
  h("div", { class: "pagehead" }, h("h1", {}, "Access")),
  h("div", { class: "column" }, card("People", people, { hint: "who has logged in with the OIDC provider and was here in the last 7 days" }), card("Tokens", tokens, { tools: h("button", { onclick: create }, "New token") }), card("Audit trail", trail, { tools: h("a", { class: "button", href: "/api/v1/audit/export", download: "audit.jsonl" }, "Export") })),
);
load();

async function load() {
  await guarded(async () => {
    const [persons, listed, rows] = await Promise.all([get("people"), getList("tokens", {}, wanted.tokens), getList("audit", {}, wanted.trail)]);
    if (persons.items.length) fill(people, table(["Who", "May", "Projects of their jobs", "Last here", "Logged in", "Sessions"], persons.items.map(personRow)));
    else empty(people, "Nobody has logged in with the provider; tokens were used.");
    fill(tokens, table(["Name", "May", "Jobs", "Last used", "Expires", "State", h("span", { class: "visually-hidden" }, "Actions")], listed.items.map(tokenRow)), more(listed.items.length, "tokens"));
    fill(trail, table(["When", "Who", "Did", "To", "From", "Outcome"], rows.items.map(auditRow)), more(rows.items.length, "trail"));
  });
}

const table = (headings, rows) => h("div", { class: "wide", tabindex: "0" }, h("table", {}, h("thead", {}, h("tr", {}, headings.map((name) => h("th", {}, name)))), h("tbody", {}, rows)));

// Lists do not count what they have not read; a full page may have a successor.
function more(shown, which) {
  if (shown < wanted[which]) return null;
  const grow = () => {
    wanted[which] += PAGE;
    load();
  };
  return h("div", { class: "rest" }, h("button", { onclick: grow }, "Show more"));
}

function personRow(one) {
  const may = one.permissions.map(({ scopes, jobs }) => h("div", {}, scopes.join(", "), h("span", { class: "muted" }, jobs.length ? ` in ${jobs.join(", ")}` : " in every job")));
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("b", {}, one.name), h("div", { class: "under" }, one.person)),
    h("td", { class: "break" }, may),
    h("td", { class: "break" }, one.projects.join(", ") || "–"),
    h("td", { class: "nowrap", title: moment(one.last_used_unix_ns) }, `${ago(one.last_used_unix_ns)} ago`),
    h("td", { class: "nowrap", title: moment(one.logged_in_unix_ns) }, `${ago(one.logged_in_unix_ns)} ago`),
    h("td", { class: "nowrap" }, one.sessions ? `${number(one.sessions)} open` : "none open"),
  );
}

function tokenRow(token) {
  const jobs = [token.job || (token.project ? `project ${token.project}` : "every job"), token.hosts_max && `${token.hosts_max} hosts`, token.loopback && "this machine only"];
  const usable = ["valid", "waiting"].includes(token.state);
  return h(
    "tr",
    {},
    h("td", { class: "break" }, h("b", {}, token.name), h("div", { class: "under" }, `${token.kind} · ${token.id}`)),
    h("td", {}, token.scopes.join(", ")),
    h("td", { class: "break" }, jobs.filter(Boolean).join(" · ")),
    h("td", { class: "nowrap", title: moment(token.last_used_unix_ns) }, token.last_used_unix_ns === null ? "never" : `${ago(token.last_used_unix_ns)} ago`),
    h("td", { class: "nowrap", title: moment(token.expires_unix_ns) }, expiry(token.expires_unix_ns)),
    h("td", {}, statePill(token.state)),
    h("td", { class: "right" }, usable && h("button", { onclick: () => revoke(token) }, "Revoke")),
  );
}

const ago = (unixNs) => age(Math.max(0, now() / 1e3 - unixNs / 1e9));

function expiry(unixNs) {
  if (unixNs === null) return "never";
  const left = unixNs / 1e9 - now() / 1e3;
  return left > 0 ? `in ${age(left)}` : `${age(-left)} ago`;
}

function auditRow(row) {
  const details = Object.entries(row.fields).map(([name, value]) => `${words(name)}: ${typeof value === "string" ? value : JSON.stringify(value)}`);
  return h(
    "tr",
    {},
    h("td", { class: "nowrap", title: moment(row.at_unix_ns) }, `${ago(row.at_unix_ns)} ago`),
    h("td", { class: "break" }, row.actor),
    h("td", {}, row.action),
    h("td", { class: "break" }, row.target, details.length > 0 && h("div", { class: "under" }, details.join(" · "))),
    h("td", {}, row.source),
    h("td", {}, row.outcome),
  );
}

async function create() {
  const scopes = h("select", { name: "scope" }, SCOPES.map((scope) => h("option", { value: scope, selected: scope === "read" }, scope)));
  const field = (label, name, properties = {}) => h("label", {}, label, h("input", { name, autocomplete: "off", maxlength: 200, ...properties }));
  const days = field("Days until it expires", "days", { type: "number", min: 1, max: 400, value: "90", required: true });
  const fields = [field("Name", "name", { required: true }), h("label", {}, "Scope", scopes), field("Only this job", "job"), field("Only this project", "project"), days];
  const send = ({ name, scope, job, project, days: until }) => post("tokens", { name: name.trim(), scopes: [scope], job: job.trim(), project: project.trim(), expires_s: Number(until) * DAY_S });
  const made = await ask("New token", "It is shown once.", fields, "Create", false, send);
  if (!made) return;
  await ask("Token", `Copy it now: it cannot be shown again.${made.approval ? " It can be used after another person has approved it." : ""}`, [h("textarea", { readOnly: true, rows: 3, "aria-label": "Token" }, made.token)], "Done");
  load();
}

async function revoke(token) {
  const text = "Requests with it are refused from now on, and sessions that it opened end.";
  if (await ask(`Revoke ${token.name}?`, text, [], "Revoke", true, () => remove(path("tokens", token.id)))) toast("Token revoked");
  load();
}
