// The frame of every page: navigation, connection state, theme, logout; and the parts that pages share.

import { get, remove } from "../common/api.js";
import { fill, h, icon, withCode } from "../common/dom.js";
import { number } from "../common/format.js";
import { listen } from "../common/live.js";
import { toggleTheme } from "../common/theme.js";
import { watchTotals } from "../common/totals.js";
import { sentence, unreadable } from "./error_page.js";
import { healthBanner, watchHealth } from "../service/health_banner.js";

export const REFUSAL_MS = 15_000; // long enough to read two lines
const RETRY_MS = 3000; // of a page that could not read its data yet
const assets = new URL("..", import.meta.url).href;

let problemLine = null;
let read = false; // whether the page has read its data once
let retrying = null;
let session = null;

// Builds the frame and returns the page's <main>. `section` is the entry of the navigation that is current.
export function shell(section) {
  const count = h("span", { class: "count", hidden: true });
  const live = h("span", { class: "live", role: "status" }, "Connecting");
  const entry = (name, path, ...more) =>
    h("a", { href: path, "aria-current": section === name ? "page" : null }, name, ...more);
  const access = entry("Access", "/access");
  access.hidden = true;
  mayDo("admin").then((may) => (access.hidden = !may));
  const dot = h("span", { class: "dot", hidden: true });
  const health = entry("Health", "/health", dot);
  watchHealth(({ state, problems }) => {
    dot.hidden = state === "ok";
    dot.className = `dot ${state}`;
    dot.title = `${problems.length} ${problems.length === 1 ? "problem" : "problems"}`;
  });
  problemLine = h("div", { class: "problem", role: "alert", hidden: true });
  const main = h("main");
  document.body.append(
    h(
      "header",
      { class: "top" },
      h("a", { class: "brand", href: "/incidents", "aria-label": "rankwatch" }, h("img", { src: `${assets}mark.svg`, alt: "" }), h("span", {}, "rankwatch")),
      h("nav", { "aria-label": "Pages" }, entry("Incidents", "/incidents", count), entry("Jobs", "/jobs"), entry("Hosts", "/hosts"), entry("Commands", "/commands"), entry("Policy", "/policy"), entry("Rules", "/rules"), entry("Notifications", "/notifications"), health, access),
      h(
        "div",
        { class: "tools" },
        live,
        h("button", { class: "quiet icon", title: "Light or dark", "aria-label": "Light or dark", onclick: toggleTheme }, icon("moon")),
        h("button", { class: "quiet icon", title: "Log out", "aria-label": "Log out", onclick: leave }, icon("leave")),
      ),
    ),
    section === "Health" ? "" : healthBanner(),
    main,
  );
  main.append(problemLine);
  document.querySelector("nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" }); // on a phone
  listen(
    () => {},
    (on) => {
      live.className = `live ${on ? "on" : "off"}`;
      live.textContent = on ? "Live" : "Not connected";
      live.title = on ? "Changes are shown as they happen" : "The page may be out of date; reconnecting";
    },
  );
  watchTotals((totals) => countOpen(totals, count));
  return main;
}

// Number of open incidents; if there are none, of acknowledged ones.
function countOpen(totals, count) {
  const [open, acknowledged] = [sum(totals.open), sum(totals.acknowledged)];
  count.hidden = open + acknowledged === 0;
  count.textContent = few(open || acknowledged);
  count.title = `${open} open, ${acknowledged} acknowledged`;
  count.className = totals.open.critical ? "count alarm" : "count";
  const title = document.title.replace(/^\(\d+\+?\) /, "");
  document.title = open ? `(${few(open)}) ${title}` : title;
}

const few = (count) => (count > 99 ? "99+" : count);

// Number of incidents of all severities.
export function sum(bySeverity) {
  return SEVERITIES.reduce((count, severity) => count + bySeverity[severity], 0);
}

// Runs one refresh of the page. Shows an error in the error line, and hides it when a refresh succeeds. Until one has
// succeeded there is nothing to show beside the error, which has the page to itself, and the refresh is tried again.
export async function guarded(work) {
  try {
    const result = await work();
    read = true;
    problemLine.hidden = true;
    showUnread(null);
    return result;
  } catch (error) {
    if (!read && isUnreadable(error)) {
      showUnread(error);
      if (error.status !== 403) retrying ??= setTimeout(() => again(work), RETRY_MS);
      return undefined;
    }
    problemLine.textContent = error.away ? `${sentence(error.message)} This page goes on by itself.` : error.message;
    problemLine.hidden = false;
    if (error.status === undefined) throw error; // an error of this page, not of the service: show it in the console
    return undefined;
  }
}

const isUnreadable = (error) => error.away || error.status === 403 || error.status >= 500;

function again(work) {
  retrying = null;
  if (!read) guarded(work);
}

function showUnread(error) {
  const main = problemLine.parentElement;
  if (!main) return; // the page shows that something does not exist
  main.classList.toggle("unread", error !== null);
  main.querySelector(":scope > .error-page")?.remove();
  if (error) main.append(unreadable(error, leave));
}

export function toast(text, shown_ms = 5000) {
  document.querySelector(".toast")?.remove();
  const note = h("div", { class: "toast", role: "status" }, text);
  document.body.append(note);
  setTimeout(() => note.remove(), shown_ms);
}

// The reply of a request; null after a refusal, which is shown.
export async function said(request, done = "") {
  try {
    const reply = await request;
    if (done) toast(done);
    return reply;
  } catch (error) {
    if (error.status === undefined) throw error; // an error of this page, not of the service
    toast(error.message, REFUSAL_MS);
    return null;
  }
}

// Shows a dialog with form controls; resolves with their values by name, or null if it was cancelled. With `send`, a
// request that is made of the values, it resolves with the reply; a refusal is shown in the dialog, which keeps what was
// typed.
export function ask(title, text, fields, does, danger = false, send = null) {
  return new Promise((resolve) => {
    const refusal = h("p", { class: "refusal break", role: "alert", hidden: true });
    const values = () => Object.fromEntries(new FormData(form));
    let reply = null;
    const form = h(
      "form",
      { method: "dialog" },
      h("h2", {}, title),
      text && h("p", { class: "muted" }, text),
      fields,
      refusal,
      h(
        "div",
        { class: "buttons" },
        h("button", { value: "no", type: "button", onclick: () => dialog.close("no") }, "Cancel"),
        h("button", { value: "yes", class: danger ? "danger" : "primary" }, does),
      ),
    );
    const dialog = h("dialog", { "aria-label": title }, form);
    form.addEventListener("submit", async (event) => {
      if (!send) return;
      event.preventDefault();
      const button = event.submitter ?? form.querySelector("button[value=yes]");
      button.disabled = true;
      try {
        reply = (await send(values())) ?? {};
        dialog.close("yes");
      } catch (error) {
        refusal.textContent = error.message;
        refusal.hidden = false;
        if (error.status === undefined) throw error; // an error of this page, not of the service
      } finally {
        button.disabled = false;
      }
    });
    dialog.addEventListener("close", () => {
      if (dialog.returnValue !== "yes") resolve(null);
      else resolve(send ? reply : values());
      dialog.remove();
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

// Whether this session has a scope, so that only permitted buttons are shown. The service checks again.
export async function mayDo(scope) {
  const { scopes } = await viewer();
  return scopes.includes(scope) || scopes.includes("admin");
}

// Whether this session may see what is of no single job, as hosts are.
export async function seesEveryJob() {
  const { job, jobs } = await viewer();
  return !job && !jobs?.length;
}

// The session of whoever looks at the page.
export async function viewer() {
  session ??= get("session").catch(() => (session = null)); // one request, however many ask at once
  return (await session) ?? { person: null, scopes: [] };
}

async function leave() {
  await remove("session").catch(() => {});
  location.assign("/login");
}

export const SEVERITIES = ["critical", "warning", "info"];

export function severityPill(severity) {
  const known = SEVERITIES.includes(severity) ? severity : "info";
  return h("span", { class: `pill ${known}` }, icon(known), severity);
}

const STATES = {
  open: "critical",
  acknowledged: "warning",
  resolved: "good",
  running: "good",
  stalled: "critical",
  log_not_understood: "critical",
  paused: "warning",
  lost: "critical",
  ended: "",
  "job ended": "",
  applied: "good",
  refused: "critical",
  failed: "critical",
  expired: "warning",
  valid: "good",
  revoked: "",
  cancelled: "",
  good: "good",
  unproven: "",
  suspect: "critical",
  incomplete: "warning",
  gone: "",
  delivered: "good",
  waiting: "warning",
  silenced: "",
  held: "",
  unneeded: "",
  works: "good",
  failing: "critical",
  on: "good",
  "not sent": "",
  "no open incident": "good",
  unused: "",
  "switched off": "warning",
};

export function statePill(state) {
  return h("span", { class: `pill ${STATES[state] ?? "info"}` }, state.replaceAll("_", " "));
}

// The state of an incident; "job ended" where its trouble lasted until then.
export function incidentPill(incident) {
  return statePill(endedWithJob(incident) ? "job ended" : incident.state);
}

export function endedWithJob(incident) {
  return incident.state === "resolved" && incident.evidence?.ended_with_job === true;
}

export function card(title, body, { tools = null, hint = null } = {}) {
  const tail = tools && h("span", { class: "tools" }, tools);
  return h(
    "section",
    { class: "card" },
    h("header", {}, h("h2", {}, title), hint && h("span", { class: "hint" }, typeof hint === "string" ? withCode(hint) : hint), tail),
    body,
  );
}

export function tile(label, value, detail) {
  return h("div", { class: "tile" }, h("div", { class: "label" }, label), h("div", { class: "value" }, value), h("div", { class: "detail" }, detail ?? " "));
}

// Below a list that has more items: how many are shown, and a button for more.
export function rest(shown, total, more) {
  if (shown >= total) return null;
  return h("div", { class: "rest" }, h("span", {}, `${number(shown)} of ${number(total)} shown`), h("button", { onclick: more }, "Show more"));
}

// Wraps a drawing function so that it runs only when its arguments have changed: focus, selections and typed text
// survive refreshes of the page.
export function whenChanged(draw) {
  let last = null;
  return (...inputs) => {
    const text = JSON.stringify(inputs);
    if (text === last) return;
    last = text;
    draw(...inputs);
  };
}

export function empty(element, text) {
  return fill(element, h("div", { class: "empty" }, text));
}
