// Keys of a page: j and k move the focus through a list, / goes to the search, ? lists all keys.

import { h } from "../common/dom.js";

const TYPING = "input, textarea, select, dialog";

// `rows` gives the rows of the list, each with a link to focus. `more` adds keys: {key: {does, run}}, where `run` gets the
// row that has the focus. `search` is an input. A key that the page does not have is not listed.
export function keys(rows, more = {}, search = null) {
  const focused = () => document.activeElement?.closest("tr.link") ?? null;
  const move = (by) => {
    const list = rows();
    const next = list[Math.max(0, Math.min(list.length - 1, list.indexOf(focused()) + by))];
    next?.querySelector("a").focus();
    next?.scrollIntoView({ block: "nearest" });
  };
  const all = {
    ...(rows && { j: { does: "next row", run: () => move(1) }, k: { does: "row before", run: () => move(-1) } }),
    ...(search && { "/": { does: "search", run: () => search.focus() } }),
    ...more,
    "?": { does: "this list", run: () => help(all) },
  };
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target.closest?.(TYPING)) {
      if (event.key === "Escape" && event.target === search) search.blur();
      return;
    }
    const known = all[event.key];
    if (!known) return;
    event.preventDefault();
    known.run(focused());
  });
}

function help(all) {
  const lines = Object.entries(all).map(([key, { does }]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, does)]);
  const dialog = h("dialog", { "aria-label": "Keys", onclose: () => dialog.remove() }, h("form", { method: "dialog" }, h("h2", {}, "Keys"), h("dl", { class: "facts" }, lines, h("dt", {}, h("kbd", {}, "Enter")), h("dd", {}, "open what has the focus")), h("div", { class: "buttons" }, h("button", {}, "Close"))));
  document.body.append(dialog);
  dialog.showModal();
}
