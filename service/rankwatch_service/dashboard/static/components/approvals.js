// Commands that wait for an approval: who requested what, until when, and the buttons for those who may decide.

import { now, path, post } from "../common/api.js";
import { h } from "../common/dom.js";
import { age, clock, number, words } from "../common/format.js";
import { everySecond } from "../common/live.js";
import { ALL_JOBS, DIRECTIVES } from "./directives.js";
import { ask, card, said, toast } from "./shell.js";

// A card with these commands, or null if there are none. `session` is the viewer's; `decided` runs after a decision.
export function approvals(commands, session, decided) {
  if (!commands.length) return null;
  return card("Waits for approval", h("div", { class: "body" }, h("ul", { class: "lines" }, commands.map((one) => line(one, session, decided)))));
}

function line(command, session, decided) {
  const { name } = directive(command);
  const mine = command.requester === session.person;
  // Also after a refusal: the command may have been decided about by somebody else.
  const decide = (what) => async () => {
    await what(command);
    decided();
  };
  const may = session.scopes.includes("command") || session.scopes.includes("admin");
  return h(
    "li",
    { class: "approval" },
    h("div", {}, h("b", {}, name), ` ${on(command)}, requested by `, h("b", { class: "break" }, command.requested_by)),
    command.reason && h("div", { class: "muted break" }, command.reason),
    h("div", { class: "muted" }, "Expires in ", h("span", { "data-expires": command.expires_unix_ns, title: clock(command.expires_unix_ns) }, left(command.expires_unix_ns)), mine && ". You requested it: somebody else must approve it."),
    may && h("div", { class: "actions" }, mine ? h("button", { onclick: decide(cancel) }, "Cancel") : [h("button", { class: "primary", onclick: decide(approve) }, "Approve"), h("button", { onclick: decide(refuse) }, "Refuse")]),
  );
}

const directive = (command) => DIRECTIVES[command.action] ?? { name: words(command.action), does: "" };
const params = (command) => Object.entries(command.params).map(([name, value]) => `${words(name)} ${JSON.stringify(value)}`);
const ranks = (command) => (command.world_size ? `on ${number(command.world_size)} ranks` : "on all ranks");
const on = (command) => (command.job === ALL_JOBS ? `with ${params(command).join(", ")}` : ranks(command));
const whose = (command) => (command.job === ALL_JOBS ? "" : ` ${command.job}`);

async function approve(command) {
  const { name, does } = directive(command);
  const send = () => post(path("commands", command.id, "approve"), {});
  settled(command, await ask(`Approve: ${name}${whose(command)}`, `${does} It is carried out at once, ${on(command)}.`, [], "Approve", true, send));
}

async function refuse(command) {
  const reason = h("label", {}, "Reason", h("textarea", { name: "reason", required: true, maxLength: 1000 }));
  const send = (answer) => post(path("commands", command.id, "refuse"), { reason: answer.reason });
  settled(command, await ask(`Refuse: ${directive(command).name}${whose(command)}`, "", [reason], "Refuse", false, send));
}

async function cancel(command) {
  settled(command, await said(post(path("commands", command.id, "cancel"), {})));
}

// Says what became of a command; null: nothing.
function settled(command, reply) {
  if (reply) toast(`${directive(command).name}: ${reply.state}`);
}

const left = (expiresUnixNs) => age(expiresUnixNs / 1e9 - now() / 1e3);

everySecond(() => {
  for (const place of document.querySelectorAll("[data-expires]")) place.textContent = left(Number(place.dataset.expires));
});
