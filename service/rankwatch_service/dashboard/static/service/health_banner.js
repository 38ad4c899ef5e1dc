// The health of rankwatch itself, read once for all that shows it on a page; and the banner that says what is wrong.

import { get } from "../common/api.js";
import { fill, h, icon } from "../common/dom.js";
import { listen } from "../common/live.js";

const watchers = new Set();
let newest = null;
let listening = false;
let reading = false;

// Calls `changed(health)` with the health now, and after each time that it was read again: as often as a page polls.
export function watchHealth(changed) {
  watchers.add(changed);
  if (newest) changed(newest);
  if (listening) return;
  listening = true;
  listen((topic) => topic === "reset" && readHealth());
  readHealth();
}

// Reads it now. A failure leaves what was read last: the page says by itself that the service does not answer.
export async function readHealth() {
  if (reading) return;
  reading = true;
  try {
    newest = (await get("health").catch(() => null)) ?? newest;
  } finally {
    reading = false;
  }
  if (newest) for (const changed of watchers) changed(newest);
}

// The worst problem in one line, above the page, and how many more there are. Hidden while all is well.
export function healthBanner() {
  const banner = h("aside", { class: "banner", "aria-label": "Health of rankwatch", hidden: true });
  watchHealth(({ problems }) => {
    const [first, ...others] = problems;
    banner.hidden = !first;
    if (!first) return;
    banner.className = `banner ${first.severity}`;
    const more = others.length ? `Health: ${others.length} more` : "Health";
    fill(banner, icon(first.severity), h("p", { class: "break" }, first.text), h("a", { href: "/health" }, more));
  });
  return banner;
}
