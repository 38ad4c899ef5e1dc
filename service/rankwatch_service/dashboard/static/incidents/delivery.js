// Who was notified of an incident: a summary, why each receiver was or was not, and each notification below a fold.

import { h } from "../common/dom.js";
import { ago, clock, duration, number } from "../common/format.js";
import { card, statePill } from "../components/shell.js";
import { newReceiver } from "../notifications/receivers.js";
import { readHealth } from "../service/health_banner.js";
import { showWhy } from "../notifications/why.js";

// `receivers` says how many there are.
export function deliveryCard(incident, receivers) {
  const { notifications } = incident;
  if (!notifications.length) return card("Notifications", h("div", { class: "body" }, h("p", { class: "muted" }, receivers ? "Nobody was notified: no receiver gets such incidents. " : "Nobody was notified: there is no receiver. ", h("button", { class: "small", onclick: () => newReceiver(readHealth) }, "Add one"), " ", receivers && why(incident))));
  const counts = Object.groupBy(notifications, (one) => one.state);
  const reached = new Set(notifications.map((one) => one.receiver));
  const last = Math.max(...notifications.map((one) => one.delivered_unix_ns ?? 0));
  const transitions = new Map(incident.history.map((one) => [one.number, one.what]));
  return card(
    "Notifications",
    h(
      "div",
      { class: "body" },
      h("div", { class: "counts" }, Object.entries(counts).map(([state, all]) => [statePill(state), h("span", {}, number(all.length))])),
      h("p", { class: "muted" }, `${number(reached.size)} ${reached.size === 1 ? "receiver" : "receivers"}`, last > 0 && `, the last at ${clock(last)} (${ago(last)})`, " ", why(incident)),
      h("details", { "data-fold": "deliveries" }, h("summary", {}, "Each notification"), h("ul", { class: "lines" }, notifications.map((one) => h("li", {}, h("a", { class: "break", href: `/notifications?receiver=${encodeURIComponent(one.receiver)}` }, one.receiver), " ", statePill(one.state), h("div", { class: "muted break" }, fate(one, one.command_id ? "command" : transitions.get(one.transition))))))),
    ),
  );
}

function why(incident) {
  return h("button", { class: "small", onclick: () => showWhy(incident.id) }, "Why, and why not");
}

// The outcome of one notification, and why.
function fate(one, what = "") {
  if (one.state === "delivered") return `${what} · ${clock(one.delivered_unix_ns)}, ${duration((one.delivered_unix_ns - one.created_unix_ns) / 1e9)} after the transition`;
  if (one.state === "silenced") return `${what} · muted by a silence`;
  if (one.state === "held") return `${what} · held back: there were enough like it within an hour`;
  if (one.state === "unneeded") return `${what} · acknowledged or over before it was due`;
  const tries = `${one.tries} ${one.tries === 1 ? "try" : "tries"}`;
  return [what, one.tries ? tries : "not sent yet", one.error].filter(Boolean).join(" · ");
}
