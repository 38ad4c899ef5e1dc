// Exchanges a token for a session. The link that `rankwatch up` prints carries the token behind the #, which no server
// and no log ever sees.

import { post } from "../common/api.js";
import { h } from "../common/dom.js";

const assets = new URL("..", import.meta.url).href;

const problem = h("div", { class: "problem", role: "alert", hidden: true });
const token = h("input", { name: "token", type: "password", autocomplete: "off", required: true, "aria-label": "Access token", placeholder: "rankwatch_…" });
const button = h("button", { class: "primary" }, "Log in");
const form = h(
  "form",
  { class: "card login" },
  h("img", { src: `${assets}mark.svg`, alt: "" }),
  h("h1", {}, "rankwatch"),
  problem,
  h("label", {}, "Access token", token),
  button,
  h("p", { class: "hint" }, "rankwatch up prints a link that logs you in. ", h("code", {}, "rankwatch token create"), " makes more tokens."),
);
form.addEventListener("submit", (event) => {
  event.preventDefault();
  enter(token.value.trim());
});
document.body.append(form);
addEventListener("hashchange", enterCarried);
if (!enterCarried()) token.focus();

// The token that the address carries, if one does; it is taken out of it, and so out of the history.
function enterCarried() {
  const carried = decodeURIComponent(location.hash.slice(1));
  if (!carried) return false;
  history.replaceState(null, "", location.pathname + location.search);
  enter(carried);
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

// Where the reader wanted to go, if that is one of our own pages.
function next() {
  const wanted = new URL(new URLSearchParams(location.search).get("next") ?? "/", location.origin);
  return wanted.origin === location.origin ? wanted.pathname + wanted.search : "/";
}
