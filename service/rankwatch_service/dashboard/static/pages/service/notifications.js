// Notifications: messages with what failed first, silences and receivers.

import { h } from "../../common/dom.js";
import { gathered, listen } from "../../common/live.js";
import { guarded, mayDo, seesEveryJob, shell } from "../../components/shell.js";
import { MessagesCard } from "../../notifications/messages.js";
import { ReceiversCard } from "../../notifications/receivers.js";
import { SilencesCard } from "../../notifications/silences.js";
import { readHealth, watchHealth } from "../../service/health_banner.js";

const query = new URLSearchParams(location.search);
const main = shell("Notifications");
const refresh = gathered(load);
const messages = new MessagesCard(query.get("receiver") ?? "", query.has("receiver") ? (query.get("state") ?? "") : query.get("state"), refresh);
const silences = new SilencesCard(refresh);
const receivers = new ReceiversCard(() => [refresh(), readHealth()], (receiver) => messages.choose({ receiver, state: "" }));
const page = h("div", { class: "column" }, messages.card, silences.card, receivers.card);
let states = [];
main.append(h("div", { class: "pagehead" }, h("h1", {}, "Notifications"), h("span", { class: "muted" }, "who is notified of incidents, and who is not")), page);
watchHealth((health) => {
  states = health.receivers;
  refresh();
});
listen((topic) => ["incident", "command", "silence", "reset"].includes(topic) && refresh());
load();

async function load() {
  await guarded(async () => {
    const [operate, admin, all] = await Promise.all([mayDo("operate"), mayDo("admin"), seesEveryJob()]);
    for (const part of [messages, receivers]) part.card.hidden = !all;
    await Promise.all([silences.load(operate), all && messages.load(admin), all && receivers.load(admin, states)]);
  });
}
