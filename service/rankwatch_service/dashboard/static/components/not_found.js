// A page about something that does not exist: what was not found, why that may be, and a way home.

import { fill, h } from "../common/dom.js";

export function notFound(main, what, why, back, backName) {
  document.title = `${what} · rankwatch`;
  fill(main, h("div", { class: "quiet missing" }, h("p", { class: "code", "aria-hidden": "true" }, "404"), h("h1", { class: "break" }, what), h("p", { class: "muted" }, why), h("div", { class: "buttons" }, h("a", { class: "button primary", href: back }, backName), back !== "/incidents" && h("a", { class: "button", href: "/incidents" }, "All incidents"))));
}
