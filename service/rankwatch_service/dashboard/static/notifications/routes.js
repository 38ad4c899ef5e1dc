// Routes: the tree by which incidents are grouped and sent, where it comes from, and whom an incident would go to.

import { get, post, put } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { interval, kindName, KIND_NAMES } from "../common/format.js";
import { card, empty, said, SEVERITIES, whenChanged } from "../components/shell.js";

const TEXTS = ["job", "project", "owner", "host", "rank"]; // labels that are typed
const TIMES = { group_wait_s: "waits", group_interval_s: "then every", repeat_interval_s: "repeats after" };
const EXAMPLE = '[route]\nreceiver = "on-call"\ngroup_by = ["job"]\n\n[[route.routes]]\nmatchers = [\'severity="info"\']\nreceiver = ""\n';

export class RoutesCard {
  // `changed` runs after the routes were changed.
  constructor(changed) {
    this.changed = changed;
    this.tree = h("div");
    this.written = h("textarea", { class: "mono", rows: 14, spellcheck: false, "aria-label": "Routes in TOML", placeholder: EXAMPLE });
    this.editor = h("form", { class: "edit-routes", hidden: true, onsubmit: (event) => this.save(event) }, this.written, h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => this.edit(false) }, "Cancel"), h("button", { class: "primary" }, "Put in force")));
    this.found = h("div", { role: "status" });
    this.trial = this.form();
    this.change = h("button", { hidden: true, onclick: () => this.edit(true) }, "Edit");
    this.card = card("Routes", h("div", { class: "body column" }, this.tree, this.editor, this.trial, this.found), { tools: this.change, hint: "the first that matches takes an incident" });
    this.draw = whenChanged((routes, may) => this.show(routes, may));
  }

  // Whether there are routes. While they are edited they are not read again: whoever saves must have seen what is replaced.
  async load(may) {
    if (this.editor.hidden) this.draw(await get("routes"), may);
    return this.routes.text.trim() !== "";
  }

  show(routes, may) {
    this.routes = routes;
    this.may = may && !routes.is_read_only;
    this.change.hidden = !this.may || !this.editor.hidden;
    const { tree, text, error } = routes;
    const wrong = error && h("p", { class: "problem" }, `Newer routes are not in force: ${error}`);
    if (!text.trim()) empty(this.tree, "None: each receiver gets what it subscribes to, one message for one incident.");
    else fill(this.tree, h("p", { class: "muted" }, source(routes)), wrong, tree && h("ul", { class: "routes" }, node(tree, null)), h("details", {}, h("summary", {}, "As written"), h("pre", { class: "dump", tabindex: "0" }, text)));
    this.tryable();
  }

  // Without routes there is nothing to try, unless some are being written.
  tryable() {
    this.trial.hidden = !this.routes.tree && this.editor.hidden;
    this.tried(null);
  }

  edit(on) {
    this.editor.hidden = !on;
    this.change.hidden = on || !this.may;
    if (on) this.written.value = this.routes.text;
    this.tryable();
    if (on) this.written.focus();
  }

  async save(event) {
    event.preventDefault();
    const routes = await said(put("routes", { text: this.written.value }), "The routes are in force within 5 s");
    if (!routes) return;
    this.edit(false);
    this.changed();
  }

  form() {
    const choice = (name, options) => h("label", {}, name, h("select", { name }, h("option", { value: "" }, "any"), options.map(([value, text]) => h("option", { value }, text))));
    return h(
      "form",
      { class: "rule", "aria-label": "Whom an incident would go to", onsubmit: (event) => this.test(event) },
      choice("kind", Object.keys(KIND_NAMES).map((kind) => [kind, kindName(kind)])),
      choice("severity", SEVERITIES.map((one) => [one, one])),
      TEXTS.map((name) => h("label", {}, name, h("input", { name, autocomplete: "off", maxlength: 300 }))),
      h("div", { class: "buttons" }, h("button", {}, "Who is notified?")),
    );
  }

  async test(event) {
    event.preventDefault();
    const labels = Object.fromEntries([...new FormData(event.target)].map(([name, value]) => [name, value.trim()]).filter(([, value]) => value));
    const body = this.editor.hidden ? { labels } : { labels, text: this.written.value };
    const answer = await said(post("routes/test", body));
    if (answer) this.tried(answer.items);
  }

  // Says who would be notified, and marks the routes that decide it.
  tried(items) {
    const taken = new Set((this.editor.hidden && items ? items : []).map((one) => one.route));
    for (const one of this.tree.querySelectorAll("[data-route]")) one.classList.toggle("taken", taken.has(one.dataset.route));
    if (items) fill(this.found, items.length ? h("ul", { class: "lines" }, items.map(outcome)) : h("p", {}, "No routes: each receiver gets what it subscribes to."));
    else fill(this.found);
  }
}

function source({ is_read_only: isFile, updated_by: by }) {
  return isFile ? "From the file that RANKWATCH_ROUTES names, which alone can change them." : `Set by ${by}.`;
}

function node(route, parent) {
  const who = h("b", { class: "break" }, route.receiver || "nobody");
  const when = route.matchers.length ? route.matchers.map((one) => h("code", {}, one)).flatMap((one, n) => (n ? [" and ", one] : [one])) : parent ? "every incident" : "every other incident";
  const own = differing(route, parent);
  return h(
    "li",
    {},
    h("div", { class: "route", "data-route": route.route }, h("div", { class: "break" }, when, " → ", who, route.continues && h("span", { class: "muted" }, ", and on to the next")), own.length > 0 && h("div", { class: "under" }, own.join(" · "))),
    route.routes.length > 0 && h("ul", {}, route.routes.map((child) => node(child, route))),
  );
}

// What a route does not have from its parent.
function differing(route, parent) {
  const differs = (name) => JSON.stringify(route[name]) !== JSON.stringify(parent?.[name]);
  return [
    differs("group_by") && `one message for what agrees in ${grouped(route.group_by)}`,
    ...Object.entries(TIMES).map(([name, does]) => differs(name) && `${does} ${interval(route[name])}`),
    differs("escalations") && (route.escalations.length || parent) && (route.escalations.map(later).join(", ") || "no escalation"),
    route.mute_time_intervals.length && `muted in ${route.mute_time_intervals.join(", ")}`,
    route.active_time_intervals.length && `only in ${route.active_time_intervals.join(", ")}`,
  ].filter(Boolean);
}

const grouped = (labels) => (labels.includes("...") ? "every label" : labels.join(", ") || "its route");
const later = ({ after_s: after, receiver }) => `not acknowledged in ${interval(after)}: ${receiver} too`;

function outcome(one) {
  const next = [one.receiver && `after ${interval(one.group_wait_s)}, with what is in group ${one.group}`, ...one.escalations.map(later), one.mute_time_intervals.length && `muted in ${one.mute_time_intervals.join(", ")}`, one.active_time_intervals.length && `only in ${one.active_time_intervals.join(", ")}`];
  return h("li", {}, h("b", { class: "break" }, one.receiver || "nobody"), h("div", { class: "muted break" }, next.filter(Boolean).join(" · ")));
}
