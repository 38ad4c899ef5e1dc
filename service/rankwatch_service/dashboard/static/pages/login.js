// Exchanges a token for a session. The link that `rankwatch up` prints has the token after the #, which browsers do not
// send to servers, so it is not logged.

import { post } from "../common/api.js";
import { h } from "../common/dom.js";

const assets = new URL("..", import.meta.url).href;

const fact = (name) => document.querySelector(`meta[name="${name}"]`)?.content ?? "";
const problem = h("div", { class: "problem", role: "alert", hidden: !fact("problem") }, fact("problem"));
const token = h("input", { name: "token", type: "password", autocomplete: "off", required: true, "aria-label": "Access token", placeholder: "rankwatch_…" });
const button = h("button", { class: "primary" }, "Log in");
const form = h(
  "form",
  { class: "card login" },
  h("img", { src: `${assets}mark.svg`, alt: "" }),
  h("h1", {}, "rankwatch"),
  problem,
  fact("provider") && h("a", { class: "button primary", href: `${fact("begin")}?${new URLSearchParams({ next: next() })}` }, `Log in with ${fact("provider")}`),
  h("label", {}, "Access token", token),
  button,
  h("p", { class: "hint" }, "Open the link that rankwatch up prints, get another with ", h("code", {}, "rankwatch token login"), ", or enter a token of ", h("code", {}, "rankwatch token create"), "."),
);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(token.value.trim());
});
document.body.append(h("main", {}, form));
if (location.pathname !== "/login") history.replaceState(null, "", "/login"); // without the code of the provider
addEventListener("hashchange", enterFromAddress);
if (!enterFromAddress()) token.focus();

// Logs in with the token in the address, if there is one, and removes it from the address and the history.
function enterFromAddress() {
  const secret = decodeURIComponent(location.hash.slice(1));
  if (!secret) return false;
  history.replaceState(null, "", location.pathname + location.search);
  enter(secret);
  return true;
}

async function enter(secret) {
  button.disabled = true;
  try {
    await post("session", { token: secret });
    location.replace(next());
  } catch (error) {
    problem.textContent = error.status === 401 ? `${error.message}.` : error.message;
    problem.hidden = false;
    button.disabled = false;
    token.focus();
  }
}

// The page that the user requested, if it belongs to this service.
function next() {
  const wanted = new URL(new URLSearchParams(location.search).get("next") ?? "/", location.origin);
  return wanted.origin === location.origin ? wanted.pathname + wanted.search : "/";
}
