// Silences: what is muted until when and why; add one, end one.

import { getList, now, path, post, remove } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { age, clock, KIND_NAMES, kindName, moment } from "../common/format.js";
import { ask, card, empty, toast, whenChanged } from "../components/shell.js";

const SHOWN = 200;
const HOUR_NS = 3600e9;
const HOURS = { 1: "1 hour", 4: "4 hours", 8: "8 hours", 24: "1 day", 72: "3 days", 168: "7 days", 720: "30 days" };

export class SilencesCard {
  // `changed` runs after a silence was added or ended.
  constructor(changed) {
    this.changed = changed;
    this.body = h("div");
    this.ended = h("input", { type: "checkbox", onchange: changed });
    this.add = h("button", { hidden: true, onclick: () => this.make() }, "New silence");
    this.card = card("Silences", this.body, { tools: [h("label", { class: "check inline" }, this.ended, "ended too"), this.add] });
    this.draw = whenChanged((items, may) => this.show(items, may));
  }

  async load(may) {
    this.add.hidden = !may;
    const { items } = await getList("silences", this.ended.checked ? {} : { active: true }, SHOWN);
    const endedCount = items.filter((one) => !lasts(one)).length;
    this.draw(items, may, endedCount);
  }

  show(items, may) {
    if (!items.length) return void empty(this.body, "None: all receivers are notified.");
    const titles = ["Muted", "Why", "By", "Until", ""];
    fill(this.body, h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, titles.map((name) => h("th", {}, name)))), h("tbody", {}, items.map((one) => this.row(one, may))))));
  }

  row(one, may) {
    const left = one.ends_unix_ns / 1e9 - now() / 1e3;
    const until = left <= 0 ? `ended ${age(-left)} ago` : `${clock(one.ends_unix_ns)}, in ${age(left)}`;
    const job = one.job ? h("a", { href: `/jobs/${encodeURIComponent(one.job)}` }, one.job) : "every job";
    return h(
      "tr",
      { class: left <= 0 ? "stale" : null },
      h("td", { class: "break" }, job, h("div", { class: "under" }, [one.kind ? kindName(one.kind) : "every kind", one.scope, ...(one.matchers ?? [])].filter(Boolean).join(" · "))),
      h("td", { class: "break" }, one.comment),
      h("td", { class: "break" }, one.created_by, h("div", { class: "under mono" }, one.short_id)),
      h("td", { title: moment(one.ends_unix_ns) }, until),
      h("td", { class: "right nowrap" }, may && left > 0 && h("button", { class: "small", onclick: () => this.end(one) }, "Expire")),
    );
  }

  async make() {
    const options = (texts, chosen) => Object.entries(texts).map(([value, text]) => h("option", { value, selected: value === chosen }, text));
    const fields = [
      h("label", {}, "Job", h("input", { name: "job", autocomplete: "off", maxlength: 200, placeholder: "every job" })),
      h("label", {}, "Kind", h("select", { name: "kind" }, options({ "": "every kind", ...KIND_NAMES }, ""))),
      h("label", {}, "Matchers", h("input", { name: "matchers", autocomplete: "off", maxlength: 2000, placeholder: 'host="node-a", severity!="critical"' })),
      h("label", {}, "For", h("select", { name: "hours" }, options(HOURS, "4"))),
      h("label", {}, "Comment", h("textarea", { name: "comment", required: true, maxLength: 1000, placeholder: "Why, and who is on it" })),
    ];
    const send = ({ job, kind, matchers, hours, comment }) => post("silences", { job: job.trim(), kind, matchers: matchers.trim() ? [matchers.trim()] : [], ends_unix_ns: Math.round(now() * 1e6 + hours * HOUR_NS), comment });
    const made = await ask("New silence", "Incidents still open, but nobody is notified of them.", fields, "Silence", false, send);
    if (!made) return;
    toast(`Silenced until ${clock(made.ends_unix_ns)}`);
    this.changed();
  }

  async end(one) {
    const text = `Muted until ${clock(one.ends_unix_ns)}: ${one.comment}. From now on people are notified again.`;
    if (await ask("Expire this silence?", text, [], "Expire", false, () => remove(path("silences", one.id)))) toast("Silence expired");
    this.changed();
  }
}

const lasts = (one) => one.ends_unix_ns / 1e6 > now();
