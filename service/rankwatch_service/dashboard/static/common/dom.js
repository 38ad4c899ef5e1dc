// Builds elements. Text always becomes a text node, so names and comments are never parsed as markup.

export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.className = value;
    else if (name === "href") element.href = inside(value);
    else if (name in element && typeof value !== "string") element[name] = value;
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...flat(children));
  return element;
}

// A text in which `…` is code.
export const withCode = (text) => text.split("`").map((part, at) => (at % 2 ? h("code", {}, part) : part));

export function fill(element, ...children) {
  element.replaceChildren(...flat(children));
  return element;
}

// As `fill`; folds that are open stay open, by their data-fold, and a link keeps the focus, by its address.
export function refill(element, ...children) {
  const open = new Set([...element.querySelectorAll("details[data-fold][open]")].map((one) => one.dataset.fold));
  const focused = element.contains(document.activeElement) ? document.activeElement.href : undefined;
  fill(element, ...children);
  for (const one of element.querySelectorAll("details[data-fold]")) one.open = open.has(one.dataset.fold);
  if (focused) [...element.querySelectorAll("a")].find((link) => link.href === focused)?.focus({ preventScroll: true });
  return element;
}

function flat(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false);
}

// Links may lead to pages of this service or to http(s) addresses, never to a script.
function inside(address) {
  const url = new URL(address, location.origin);
  return url.protocol === "https:" || url.protocol === "http:" ? url.href : "#";
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const ICONS = {
  critical: ["M6 .6 11.4 6 6 11.4.6 6z"],
  warning: ["M6 .8 11.6 11H.4z"],
  info: ["M6 .8a5.2 5.2 0 1 0 0 10.4A5.2 5.2 0 0 0 6 .8z"],
  good: ["M4.6 10.3 .8 6.5l1.4-1.4 2.4 2.4 5.2-5.2 1.4 1.4z"],
  pause: ["M2.5 1.5h2.6v9H2.5z", "M6.9 1.5h2.6v9H6.9z"],
  play: ["M2.8 1.2 10.4 6l-7.6 4.8z"],
  save: ["M5 1h2v5h2.6L6 9.6 2.4 6H5z", "M1.4 10h9.2v1.4H1.4z"],
  back: ["M5.4 1.6v2.2h1.4a3.9 3.9 0 0 1 0 7.8H3V9.9h3.8a2.2 2.2 0 0 0 0-4.4H5.4v2.2L1.6 4.7z"],
  stop: ["M2 2h8v8H2z"],
  moon: ["M9.9 7.6A4.6 4.6 0 0 1 4.4 2.1 4.6 4.6 0 1 0 9.9 7.6z"],
  leave: ["M1.5 1.5h5v1.6H3.1v5.8h3.4v1.6h-5z", "M7.3 3.2 10.8 6 7.3 8.8V6.8H4.6V5.2h2.7z"],
};

export function icon(name) {
  const paths = ICONS[name].map((d) => svg("path", { d, fill: "currentColor" }));
  return svg("svg", { viewBox: "0 0 12 12", width: 12, height: 12, "aria-hidden": "true" }, ...paths);
}
