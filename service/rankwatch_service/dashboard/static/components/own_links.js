// Links into the installation's own tools, whose URLs are templates of its settings.

import { h } from "../common/dom.js";
import { viewer } from "./shell.js";

// A link for each tool whose URL needs nothing but what is known, of {job, rank, host}, and needs `of`.
export async function ownLinks(of, known) {
  const { links } = await viewer();
  const places = (url) => [...url.matchAll(/{(\w+)}/g)].map(([, name]) => name);
  const fitting = Object.entries(links ?? {}).filter(([, url]) => places(url).includes(of) && places(url).every((name) => known[name] !== undefined));
  if (!fitting.length) return null;
  const filled = (url) => url.replace(/{(\w+)}/g, (_, name) => encodeURIComponent(known[name]));
  return h("div", { class: "under" }, fitting.map(([name, url]) => h("a", { href: filled(url), rel: "noreferrer", target: "_blank" }, `${name} ↗`)));
}
