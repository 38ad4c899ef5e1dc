// Hosts with incidents on their record, worst first.

import { get, now } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { age, moment, number } from "../common/format.js";
import { gathered, listen } from "../common/live.js";
import { keys } from "../components/keys.js";
import { empty, guarded, shell } from "../components/shell.js";
import { verdictPill, whose } from "../components/verdict.js";

const main = shell("Hosts");
const list = h("div", { class: "card list" });
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Hosts"), h("span", { class: "muted" }, "with incidents in the last 28 days; what the verdicts mean: docs/operations.md, Verdicts on hosts")), list);
keys(() => [...list.querySelectorAll("tr.link")]);
const refresh = gathered(load);
listen((topic) => ["incident", "reset"].includes(topic) && refresh());
load();

async function load() {
  await guarded(async () => {
    const { items } = await get("hosts");
    if (!items.length) {
      empty(list, "No host has an incident on its record.");
      return;
    }
    const headings = ["Host", "Verdict", "Incidents", "Critical", "Newest"];
    fill(list, h("table", {}, h("thead", {}, h("tr", {}, headings.map((name, n) => h("th", { class: n === 2 || n === 3 ? "right" : "" }, name)))), h("tbody", {}, items.map(row))));
  });
}

function row(one) {
  const where = `/hosts/${encodeURIComponent(one.host)}`;
  return h(
    "tr",
    { class: "link", onclick: (event) => !event.target.closest("a") && location.assign(where) },
    h("td", { class: "break" }, h("a", { class: "title", href: where }, one.host), h("span", { class: "muted" }, ` ${whose(one)}`)),
    h("td", {}, verdictPill(one.verdict)),
    h("td", { class: "right" }, number(one.incidents)),
    h("td", { class: "right" }, number(one.critical)),
    h("td", { class: "nowrap", title: moment(one.newest_unix_ns) }, `${age(now() / 1e3 - one.newest_unix_ns / 1e9)} ago`),
  );
}
