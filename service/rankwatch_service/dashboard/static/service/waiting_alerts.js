// Alerts of a Prometheus that wait: they fire, no incident has them, and why.

import { getList } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { ago, moment, number } from "../common/format.js";
import { card, severityPill, whenChanged } from "../components/shell.js";

const SHOWN = 50;
const LABELS_MAX = 8;

export class WaitingAlertsCard {
  constructor() {
    this.element = h("div");
    this.show = whenChanged((items, total) => fill(this.element, total ? this.card(items, total) : null));
  }

  async read() {
    const { items, total } = await getList("alerts/waiting", {}, SHOWN);
    this.show(items, total);
  }

  card(items, total) {
    const head = ["Alert", "Labels", "Why it waits", "Since"].map((title) => h("th", {}, title));
    const table = h("div", { class: "wide", tabindex: "0" }, h("table", { class: "stack" }, h("thead", {}, h("tr", {}, head)), h("tbody", {}, items.map(row))));
    const hint = items.length < total ? `${number(items.length)} of ${number(total)}, newest first` : "they fire, and no incident has them";
    return card(total === 1 ? "1 alert waits" : `${number(total)} alerts wait`, table, { hint });
  }
}

function row(alert) {
  const labels = Object.entries(alert.labels).filter(([name]) => name !== "alertname");
  const left = labels.length > LABELS_MAX ? ` and ${labels.length - LABELS_MAX} more` : "";
  return h(
    "tr",
    {},
    h("td", { class: "break" }, severityPill(alert.severity), " ", alert.url ? h("a", { href: alert.url }, alert.name) : h("b", {}, alert.name), h("div", { class: "under" }, alert.summary)),
    h("td", { class: "break" }, labels.slice(0, LABELS_MAX).map(([name, value]) => h("div", {}, h("span", { class: "muted" }, `${name} = `), value)), left && h("div", { class: "muted" }, left)),
    h("td", { class: "break" }, alert.why),
    h("td", { class: "nowrap", title: moment(alert.starts_unix_ns) }, ago(alert.starts_unix_ns)),
  );
}
