// What a job has lost to incidents, by kind, and its goodput.

import { get, now, path } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { kindName, number } from "../common/format.js";
import { unit } from "./impact.js";
import { card, empty, whenChanged } from "../components/shell.js";

const PERIODS = { "1h": ["last hour", 3600], "24h": ["last 24 hours", 86_400], "7d": ["last 7 days", 604_800], "": ["all time", null] };

export class LostTimeCard {
  constructor(name, changed) {
    this.name = name;
    this.body = h("div");
    this.period = h("select", { class: "small", "aria-label": "Period", onchange: changed }, Object.entries(PERIODS).map(([value, [text]]) => h("option", { value, selected: value === "24h" }, text)));
    this.card = card("Goodput and lost time", this.body, { tools: this.period });
    this.draw = whenChanged((...found) => this.show(...found));
  }

  async load(job) {
    const period = this.period.value;
    const seconds = PERIODS[period][1];
    const found = await get(path("jobs", this.name, "lost-time"), seconds ? { from_unix_ns: Math.max(0, Math.round((now() - seconds * 1e3) * 1e6)) } : {});
    // Rounded as shown, so that the card is drawn again only when a figure has changed.
    const items = found.items.map((one) => [one.kind, number(one.incidents), number(one.gpu_hours, 2)]);
    this.draw(items, number(found.gpu_hours, 2), percent(found.goodput), percent(found.goodput_now), job.state, period, unit(job.accelerated).hours);
  }

  show(items, lost, goodput, goodputNow, state, period, hours) {
    const within = PERIODS[period][0];
    const figures = h("p", { class: "figures" }, h("b", {}, goodputNow ? `${goodputNow} of usual` : `– (${state})`), " now · ", h("b", {}, goodput || "–"), ` of the ${hours}, ${within}`);
    if (!items.length) return void fill(this.body, figures, empty(h("div"), `No incident has cost this job time: ${within}.`));
    const title = (text, where) => h("th", { class: where }, text);
    const head = h("tr", {}, title("Cause"), title("Incidents", "right"), title(`${hours} lost`, "right"));
    const rows = items.map(([kind, count, cost]) => h("tr", {}, h("td", {}, h("a", { href: this.listed(kind, period) }, kindName(kind))), h("td", { class: "right" }, count), h("td", { class: "right" }, cost)));
    const sum = h("tr", {}, h("td", { colspan: 2, class: "muted" }, "in all"), h("td", { class: "right" }, h("b", {}, lost)));
    fill(this.body, figures, h("table", { class: "compact" }, h("thead", {}, head), h("tbody", {}, rows, sum)));
  }

  listed(kind, period) {
    return `/incidents?${new URLSearchParams({ state: "all", job: this.name, kind, ...(period && { period }) })}`;
  }
}

const percent = (share) => (share === null ? "" : `${number(100 * share, 3)} %`);
