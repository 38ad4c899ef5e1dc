// Notifications that were sent, wait, failed or were muted; why each receiver got one of an incident or not; send again.

import { getList, now, path, post } from "../common/api.js";
import { fill, h } from "../common/dom.js";
import { ago, clock, moment, number } from "../common/format.js";
import { card, empty, REFUSAL_MS, rest, said, statePill, toast, whenChanged } from "../components/shell.js";
import { showWhy } from "./why.js";

const PAGE = 50;
const VIEWS = { failed: "Failed", waiting: "Waiting", delivered: "Delivered", silenced: "Silenced", held: "Held back", unneeded: "Unneeded", "": "All" };

export class MessagesCard {
  // `receiver` and `state` are what the address asks for; null: failed ones if there are any, else all.
  // `refresh` runs after each choice of the user.
  constructor(receiver, state, refresh) {
    this.refresh = refresh;
    this.receiver = receiver;
    this.state = state;
    this.wanted = PAGE;
    this.body = h("div");
    this.views = h("div", { class: "views", role: "group", "aria-label": "State of notifications" });
    this.card = card("Messages", this.body, { tools: this.views });
    this.draw = whenChanged((items, total, may) => this.show(items, total, may));
  }

  async load(may) {
    if (this.state === null) this.state = (await this.list("failed", 1)).items.length ? "failed" : "";
    const { items, total } = await this.list(this.state, this.wanted);
    this.draw(items, total, may, this.state, this.receiver);
  }

  list(state, count) {
    return getList("notifications", { state, receiver: this.receiver }, count);
  }

  // Shows the messages to one receiver alone, or those of one state; the address says so.
  choose(changes) {
    Object.assign(this, changes, { wanted: PAGE });
    const query = new URLSearchParams(Object.entries({ receiver: this.receiver, state: this.state }).filter(([, value]) => value));
    history.replaceState(null, "", `${location.pathname}${query.size ? `?${query}` : ""}`);
    this.refresh();
  }

  show(items, total, may) {
    fill(this.views, Object.entries(VIEWS).map(([state, name]) => h("button", { class: "view", "aria-pressed": String(state === this.state), onclick: () => this.choose({ state }) }, name)));
    const alone = this.receiver && h("div", { class: "body" }, h("span", { class: "muted" }, "To ", h("b", { class: "break" }, this.receiver), " alone. "), h("button", { class: "small", onclick: () => this.choose({ receiver: "" }) }, "All receivers"));
    const list = h("div");
    if (items.length) fill(list, h("div", { class: "wide" }, h("table", { class: "compact stack" }, h("thead", {}, h("tr", {}, ["When", "Receiver", "State", "About", "Tries", ""].map((name) => h("th", {}, name)))), h("tbody", {}, items.map((one) => this.row(one, may))))));
    else empty(list, this.state ? `None is ${VIEWS[this.state].toLowerCase()}.` : "None was sent yet.");
    const more = () => {
      this.wanted += PAGE;
      this.refresh();
    };
    fill(this.body, alone, list, rest(items.length, total, more), items.length === this.wanted && total <= items.length && h("div", { class: "rest" }, h("button", { onclick: more }, "Show more")));
  }

  row(one, may) {
    const when = one.delivered_unix_ns ?? one.created_unix_ns;
    const about = one.incident_id ? h("a", { href: `/incidents/${encodeURIComponent(one.incident_id)}` }, "incident") : one.command_id.startsWith("cmd_") ? h("a", { href: `/commands/${encodeURIComponent(one.command_id)}` }, "command") : "test";
    return h(
      "tr",
      {},
      h("td", { class: "nowrap", title: moment(when) }, when / 1e6 > now() ? clock(when) : ago(when)),
      h("td", { class: "break" }, h("button", { class: "textual", onclick: () => this.choose({ receiver: one.receiver }) }, one.receiver)),
      h("td", {}, statePill(one.state), one.error && h("div", { class: "under" }, one.error)),
      h("td", {}, about, one.transition > 0 && h("span", { class: "muted" }, ` message ${one.transition}`)),
      h("td", { class: "nowrap" }, number(one.tries), one.state === "waiting" && one.tries > 0 && h("div", { class: "under" }, `next at ${clock(one.next_try_unix_ns)}`)),
      h("td", { class: "right nowrap" }, one.incident_id && h("button", { class: "small", onclick: () => showWhy(one.incident_id) }, "Why"), " ", may && one.state === "failed" && h("button", { class: "small", onclick: (event) => this.resend(one, event.target) }, "Send again")),
    );
  }

  async resend(one, button) {
    button.disabled = true; // a try takes up to 20 s
    const sent = await said(post(path("notifications", one.id, "resend"), {}));
    if (sent) toast(`To ${one.receiver}: ${sent.state}${sent.error ? `, ${sent.error}` : ""}`, REFUSAL_MS);
    button.disabled = false;
    this.refresh();
  }
}
