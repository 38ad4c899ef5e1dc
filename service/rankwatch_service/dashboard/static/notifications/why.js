// For each receiver, why it was sent what it was about an incident, or why not.

import { get, path } from "../common/api.js";
import { h } from "../common/dom.js";
import { said, statePill } from "../components/shell.js";

// Opens a dialog with an answer for each receiver.
export async function showWhy(incidentId) {
  const told = await said(get(path("incidents", incidentId, "receivers")));
  if (!told) return;
  const lines = told.items.map((reason) => h("li", {}, h("b", { class: "break" }, reason.receiver), " ", statePill(reason.state === "none" ? "not sent" : reason.state), h("div", { class: "muted break" }, reason.why)));
  const dialog = h("dialog", { "aria-label": "Why", onclose: () => dialog.remove() }, h("form", { method: "dialog" }, h("h2", {}, "Who was notified of this incident, and why"), lines.length ? h("ul", { class: "lines" }, lines) : h("p", { class: "muted" }, "Nobody: there are no receivers."), h("div", { class: "buttons" }, h("button", {}, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}
