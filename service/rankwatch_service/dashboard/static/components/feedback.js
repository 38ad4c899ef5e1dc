// What people say of an incident: useful, noise or duplicate; one answer of each person, by a button or its key.

import { path, put, remove } from "../common/api.js";
import { h } from "../common/dom.js";
import { moment } from "../common/format.js";
import { lessNoise } from "../incidents/noise.js";
import { card, guarded, toast } from "./shell.js";

const ANSWERS = {
  useful: { name: "Useful", key: "u", does: "It was right to report it." },
  noise: { name: "Noise", key: "n", does: "Nothing was wrong, or it was not worth an incident." },
  duplicate: { name: "Duplicate", key: "d", does: "Another incident reports the same fault." },
};

// A card with everybody's answers, and the buttons for those who `may` answer. `session` is the viewer's; `given` runs
// after an answer.
export function feedbackCard(incident, session, may, given) {
  const mine = ownAnswer(incident, session);
  const button = ([answer, { name, key, does }]) => h("button", { class: "view", title: does, "aria-pressed": answer === mine ? "true" : "false", onclick: () => say(incident, session, answer, given) }, name, " ", h("kbd", {}, key));
  const line = (one) => h("li", {}, h("b", {}, ANSWERS[one.answer].name), " ", h("span", { class: "muted break", title: moment(one.at_unix_ns) }, one.name));
  return card(
    "Feedback",
    h(
      "div",
      { class: "body column" },
      may && h("div", { class: "views", role: "group", "aria-label": "Feedback" }, Object.entries(ANSWERS).map(button)),
      incident.feedback.length ? h("ul", { class: "lines" }, incident.feedback.map(line)) : h("p", { class: "muted" }, "Nobody has answered yet."),
    ),
  );
}

// The keys of the answers, as `keys` takes them. `current` returns what `feedbackCard` is given, or null.
export function feedbackKeys(current) {
  return Object.fromEntries(
    Object.entries(ANSWERS).map(([answer, { name, key }]) => {
      const run = () => {
        const shown = current();
        if (shown?.may) say(shown.incident, shown.session, answer, shown.given);
      };
      return [key, { does: `answer: ${name.toLowerCase()}`, run }];
    }),
  );
}

function ownAnswer(incident, session) {
  return incident.feedback.find((one) => one.person === session.person)?.answer ?? null;
}

// Gives an answer; the one that stands already is withdrawn.
async function say(incident, session, answer, given) {
  const place = path("incidents", incident.id, "feedback");
  const withdraws = ownAnswer(incident, session) === answer;
  const done = await guarded(async () => {
    await (withdraws ? remove(place) : put(place, { answer }));
    return true;
  });
  if (done) toast(withdraws ? "Answer withdrawn" : ANSWERS[answer].name);
  given();
  if (done && answer === "noise" && !withdraws) await guarded(() => lessNoise(incident));
}
