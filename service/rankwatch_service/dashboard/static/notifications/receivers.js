// Receivers: who is notified of what; add one, try one, switch one off or on, remove one.

import { getList, path, post, put, remove } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { interval, kindName, KIND_NAMES } from "../common/format.js";
import { ask, card, empty, REFUSAL_MS, said, SEVERITIES, statePill, toast, whenChanged } from "../components/shell.js";

const RECEIVERS_MAX = 100;

// By type: its label, a URL as it looks, and what its secret is (null: it has none), as the service declares them.
const TYPES = JSON.parse(document.querySelector('meta[name="receiver_types"]').content);

export class ReceiversCard {
  // `changed` runs after a receiver was changed, and `open` shows the messages to one.
  constructor(changed, open) {
    this.changed = changed;
    this.open = open;
    this.body = h("div");
    this.add = h("button", { hidden: true, onclick: () => newReceiver(changed) }, "New receiver");
    this.card = card("Receivers", this.body, { tools: this.add });
    this.draw = whenChanged((...all) => this.show(...all));
  }

  // `states` is the state of each receiver by name, as the health of rankwatch says it.
  async load(may, states) {
    this.add.hidden = !may;
    const { items } = await getList("receivers", {}, RECEIVERS_MAX);
    const told = Object.fromEntries(states.map(({ name, error, failed, waiting }) => [name, { error, failed, waiting }]));
    this.draw(items.toSorted((one, other) => (one.name < other.name ? -1 : 1)), told, may);
  }

  show(items, states, may) {
    if (!items.length) return void empty(this.body, "No receivers: incidents appear on this dashboard only.");
    const titles = ["Receiver", "Gets", "State", ""];
    fill(this.body, h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, titles.map((name) => h("th", {}, name)))), h("tbody", {}, items.map((one) => this.row(one, states[one.name], may))))));
  }

  row(one, state, may) {
    const gets = [one.severities.join(", ") || "every severity", one.kinds.map(kindName).join(", "), one.jobs.length && `jobs ${one.jobs.join(", ")}`, one.projects.length && `projects ${one.projects.join(", ")}`, ...one.matchers, one.after_s > 0 && `if nobody acknowledges within ${interval(one.after_s)}`].filter(Boolean);
    const pill = !one.enabled ? "switched off" : state?.error ? "failing" : "on";
    return h(
      "tr",
      {},
      h("td", { class: "break" }, h("button", { class: "textual", onclick: () => this.open(one.name) }, one.name), h("div", { class: "under" }, `${TYPES[one.type]?.[0] ?? one.type} · ${one.url}`)),
      h("td", { class: "break" }, gets.join(" · ")),
      h("td", {}, statePill(pill), h("div", { class: "under" }, one.disabled_reason || state?.error)),
      h("td", { class: "right nowrap" }, may && [one.enabled && h("button", { class: "small", onclick: (event) => this.test(one, event.target) }, "Test"), " ", h("button", { class: "small", onclick: () => this.turn(one) }, one.enabled ? "Switch off" : "Switch on"), " ", h("button", { class: "small", onclick: () => this.drop(one) }, "Remove")]),
    );
  }

  async test(one, button) {
    button.disabled = true; // the reply waits for the first try, up to 20 s
    const sent = await said(post(path("receivers", one.name, "test"), {}));
    button.disabled = false;
    if (sent) toast(sent.state === "delivered" ? `${one.name} has received the test message.` : `The test message to ${one.name} ${sent.state === "failed" ? "failed" : "is tried again"}: ${sent.error || "no answer yet"}`, REFUSAL_MS);
    this.changed();
  }

  async turn(one) {
    const { type, url, kinds, severities, jobs, projects, matchers, after_s, enabled } = one;
    await said(put(path("receivers", one.name), { type, url, kinds, severities, jobs, projects, matchers, after_s, enabled: !enabled }), enabled ? `${one.name} is switched off` : `${one.name} is switched on`);
    this.changed();
  }

  async drop(one) {
    const send = () => remove(path("receivers", one.name));
    if (await ask(`Remove ${one.name}?`, "Its undelivered messages are discarded.", [], "Remove", true, send)) toast(`${one.name} is removed`);
    this.changed();
  }
}

// Asks for a receiver; `changed` runs when there is one.
export async function newReceiver(changed) {
  const url = h("input", { name: "url", autocomplete: "off", required: true, maxlength: 2000 });
  const secret = h("input", { name: "secret", autocomplete: "off", maxlength: 500 });
  const secretField = h("label", {}, "Secret", secret);
  const type = h("select", { name: "type", onchange: () => fit() }, Object.entries(TYPES).map(([value, [name]]) => h("option", { value }, name)));
  const fit = () => {
    const [, example, of] = TYPES[type.value];
    url.placeholder = example;
    secret.placeholder = of ?? "";
    secretField.hidden = of === null;
  };
  fit();
  const severities = SEVERITIES.map((one) => h("label", { class: "check inline" }, h("input", { type: "checkbox", name: `severity_${one}`, checked: one !== "info" }), one));
  const fields = [
    h("label", {}, "Name", h("input", { name: "name", autocomplete: "off", required: true, maxlength: 64, pattern: "[A-Za-z0-9][A-Za-z0-9_.\\-]*" })),
    h("label", {}, "Type", type),
    h("label", {}, "URL or address", url),
    secretField,
    h("div", { class: "checks" }, severities),
    h("label", {}, "Kind", h("select", { name: "kind" }, h("option", { value: "" }, "every kind"), Object.entries(KIND_NAMES).map(([value, text]) => h("option", { value }, text)))),
    h("label", {}, "Jobs (names, by commas)", h("input", { name: "jobs", autocomplete: "off", placeholder: "all" })),
    h("label", {}, "Labels", h("input", { name: "matchers", autocomplete: "off", maxlength: 2000, placeholder: 'host=~"node-.*", owner="ann"' })),
    h("label", {}, "Only if nobody acknowledges within (min)", h("input", { name: "after", type: "number", min: 0, max: 1440, value: 0 })),
  ];
  const made = await ask("New receiver", "It is notified of incidents from now on. Test it next.", fields, "Add", false, (answer) => post("receivers", settings(answer)));
  if (!made) return;
  if (made.secret) await ask(`Secret of ${made.name}`, "Copy it into the receiving program now: it cannot be shown again.", [h("textarea", { readOnly: true, rows: 2, "aria-label": "Secret" }, made.secret)], "Done");
  changed();
}

// A receiver as REST takes it, from what was typed in the dialog.
function settings(answer) {
  const jobs = answer.jobs.split(",").map((one) => one.trim()).filter(Boolean);
  const body = { name: answer.name.trim(), type: answer.type, url: answer.url.trim(), severities: SEVERITIES.filter((one) => answer[`severity_${one}`]), kinds: answer.kind ? [answer.kind] : [], jobs, matchers: answer.matchers.trim() ? [answer.matchers.trim()] : [], after_s: 60 * Number(answer.after) };
  if (answer.secret && TYPES[answer.type][2] !== null) body.secret = answer.secret.trim();
  return body;
}
