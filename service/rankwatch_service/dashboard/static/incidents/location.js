// Where the ranks of an incident run: rank, host and its switch, GPU and place in the parallel groups, each linked to its page.

import { h } from "../common/dom.js";
import { number } from "../common/format.js";
import { card } from "../components/shell.js";

const SHOWN = 4;
const GROUPS = ["dp", "tp", "pp", "cp", "ep"];

// The ranks of an incident in the topology of its attempt; empty if that is not known.
export function placedRanks(incident, job, attempts) {
  const topology = attempts.find((one) => one.attempt === incident.attempt)?.topology ?? (job?.attempt === incident.attempt ? job.topology : {});
  const of = new Map((topology.ranks ?? []).map((one) => [one.rank, one]));
  return incident.ranks.map((rank) => of.get(rank)).filter(Boolean);
}

// A card, or null for an incident of no single rank.
export function locationCard(incident, placed) {
  if (!placed.length) return null;
  const heads = ["Rank", "Host", "GPU", "Parallel group"].map((text) => h("th", { scope: "col" }, text));
  const left = placed.length - SHOWN;
  return card(
    "Location",
    h("table", { class: "compact location" }, h("thead", {}, h("tr", {}, heads)), h("tbody", {}, placed.slice(0, SHOWN).map((one) => row(incident, one)))),
    { hint: left > 0 ? `${number(left)} more ranks` : null },
  );
}

function row(incident, one) {
  const host = `/hosts/${encodeURIComponent(one.host)}`;
  const groups = GROUPS.filter((group) => Number.isInteger(one[group])).map((group) => `${group} ${one[group]}`);
  return h(
    "tr",
    {},
    h("td", {}, h("a", { href: `/ranks/${encodeURIComponent(incident.job)}/${one.rank}` }, `rank ${one.rank}`)),
    h("td", { class: "break" }, h("a", { href: host }, one.host), one.switch && h("span", { class: "muted" }, ` switch ${one.switch}`)),
    h("td", { class: "break" }, one.device_uuid ? h("a", { href: host }, one.device_uuid) : h("span", { class: "muted" }, "none"), h("span", { class: "muted" }, ` local rank ${one.local_rank}`)),
    h("td", {}, groups.join(" · ")),
  );
}
