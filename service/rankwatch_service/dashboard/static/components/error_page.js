// Pages for what cannot be shown: what is the matter, why that may be, and what to do next.

import { fill, h } from "../common/dom.js";

// A page about something that does not exist.
export function notFound(main, what, why, back, backName) {
  document.title = `${what} · rankwatch`;
  const others = back !== "/incidents" && h("a", { class: "button", href: "/incidents" }, "All incidents");
  fill(main, errorPage("404", what, why, h("a", { class: "button primary", href: back }, backName), others));
}

// A page whose data cannot be read. `error` is a refusal by the service, or the lack of a response.
export function unreadable(error, logIn) {
  const home = h("a", { class: "button", href: "/incidents" }, "All incidents");
  const alone = "This page shows its data by itself as soon as the service responds.";
  if (error.status === 403) return errorPage("403", "You may not see this page", sentence(error.message), h("button", { class: "primary", onclick: logIn }, "Log in as someone else"), home);
  if (error.away) return errorPage(error.status || "", "The service is not available", `It may be restarting. ${alone}`);
  const named = error.requestId ? `The log of the service has the details, under the request ${error.requestId}.` : sentence(error.message);
  return errorPage(error.status, "The service failed to read this page's data", `${named} ${alone}`, home);
}

function errorPage(code, what, why, ...buttons) {
  return h("div", { class: "quiet error-page", role: "alert" }, code && h("p", { class: "code", "aria-hidden": "true" }, code), h("h1", { class: "break" }, what), h("p", { class: "muted break" }, why), h("div", { class: "buttons" }, buttons));
}

export const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1).replace(/\.$/, "")}.`;
