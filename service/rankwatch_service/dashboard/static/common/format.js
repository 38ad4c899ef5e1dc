// Formats numbers, times and names. Units come from the suffix of names: _s, _bytes, _ratio, _celsius, _w, _hz.

import { now } from "./api.js";

export const MISSING = "–";

export function number(value, digits = 3) {
  if (value === null || value === undefined) return MISSING;
  if (typeof value === "string") return value.replace("-", "−").replace("Inf", "∞");
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e7) return grouped(value);
  if (size >= 1e7 || size < 1e-4) return value.toExponential(digits - 1).replace("-", "−").replace("e+", "e");
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toLocaleString("en-US", { maximumFractionDigits: Math.min(decimals, 6) }).replace("-", "−");
}

function grouped(value) {
  return value.toLocaleString("en-US").replace("-", "−");
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return MISSING;
  const size = Math.abs(seconds);
  if (size < 1e-3) return `${number(seconds * 1e6)} µs`;
  if (size < 1) return `${number(seconds * 1e3)} ms`;
  if (size < 60) return `${number(seconds, size < 10 ? 2 : 2)} s`;
  if (size < 3600) return `${Math.floor(size / 60)} min ${Math.floor(size % 60)} s`;
  if (size < 86400) return `${Math.floor(size / 3600)} h ${Math.floor((size % 3600) / 60)} min`;
  return `${Math.floor(size / 86400)} d ${Math.floor((size % 86400) / 3600)} h`;
}

// A duration that people have set: without a second part that is zero.
export function interval(seconds) {
  return duration(seconds).replace(/ 0 (s|min|h)$/, "");
}

// Coarser than duration, for ages that count up.
export function age(seconds) {
  const size = Math.max(0, Math.floor(seconds));
  if (size < 60) return `${size} s`;
  if (size < 3600) return `${Math.floor(size / 60)} min`;
  if (size < 86400) return `${Math.floor(size / 3600)} h ${Math.floor((size % 3600) / 60)} min`;
  return `${Math.floor(size / 86400)} d`;
}

export function bytes(value) {
  if (value === null || value === undefined) return MISSING;
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let power = 0;
  while (Math.abs(value) >= 1000 && power < units.length - 1) {
    value /= 1000;
    power += 1;
  }
  return `${number(value)} ${units[power]}`;
}

const two = (value) => String(value).padStart(2, "0");

// The offset of the local time zone at a time, such as UTC+5:30.
function zone(unixNs) {
  const minutes = -new Date(unixNs / 1e6).getTimezoneOffset();
  if (minutes === 0) return "UTC";
  const size = Math.abs(minutes);
  return `UTC${minutes < 0 ? "−" : "+"}${Math.floor(size / 60)}${size % 60 ? `:${two(size % 60)}` : ""}`;
}

// Local time, with the date if it is not today. Show `zone` next to it.
function hour(unixNs) {
  if (unixNs === null || unixNs === undefined) return MISSING;
  const date = new Date(unixNs / 1e6);
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  const day = `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())}`;
  return date.toDateString() === new Date().toDateString() ? time : `${day} ${time}`;
}

export function clock(unixNs) {
  return unixNs === null || unixNs === undefined ? MISSING : `${hour(unixNs)} ${zone(unixNs)}`;
}

// How long ago a time was, such as 12 min ago.
export function ago(unixNs) {
  return unixNs === null || unixNs === undefined ? MISSING : `${age((now() * 1e6 - unixNs) / 1e9)} ago`;
}

// UTC and local time, for a tooltip.
export function moment(unixNs) {
  if (unixNs === null || unixNs === undefined) return MISSING;
  const utc = new Date(unixNs / 1e6).toISOString();
  return `${utc.slice(0, 19)}Z, local ${clock(unixNs)}`;
}

// A step; -1 means before the first step of an attempt.
export function stepNumber(step) {
  return number(step < 0 ? null : step);
}

// A value of evidence, formatted by the unit in its name.
export function measured(name, value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return value === null ? MISSING : String(value);
  if (name === "link_up") return value ? "up" : "down";
  if (name.endsWith("_bytes_per_s")) return `${bytes(value)}/s`;
  if (name.endsWith("_bits_per_s")) return `${number(value / 1e9)} Gbit/s`;
  if (name.endsWith("_per_s")) return `${number(value)}/s`;
  if (name.endsWith("_s")) return duration(value);
  if (name.endsWith("_bytes")) return bytes(value);
  if (name.endsWith("_celsius")) return `${number(value)} °C`;
  if (name.endsWith("_w")) return `${number(value)} W`;
  if (name.endsWith("_hz")) return value >= 1e9 ? `${number(value / 1e9, 4)} GHz` : `${number(value / 1e6)} MHz`;
  return number(value);
}

const UNITS = [/_unix_ns$/, /_(bytes_|bits_)?per_s$/, /_s$/, /_bytes$/, /_ratio$/, /_celsius$/, /_w$/, /_hz$/];

const ACRONYMS = { cpu: "CPU", gpu: "GPU", id: "ID", io: "I/O", nan: "NaN", pci: "PCI", sm: "SM", url: "URL", uuid: "UUID", xid: "Xid" };

export function words(name) {
  const bare = UNITS.reduce((text, unit) => text.replace(unit, ""), name).replace(/[._]+/g, " ").trim();
  const spelt = bare.replace(/[a-z]+/gi, (word) => (Object.hasOwn(ACRONYMS, word) ? ACRONYMS[word] : word));
  return spelt.charAt(0).toUpperCase() + spelt.slice(1);
}

// Tables of the service, as far as pages need them: `policy.actions`; and `incidents.kinds`: {kind: {label, chart}}.
export const ACTIONS = JSON.parse(document.querySelector('meta[name="actions"]').content);
export const KINDS = JSON.parse(document.querySelector('meta[name="kinds"]').content);

export const KIND_NAMES = Object.fromEntries(Object.entries(KINDS).map(([kind, { label }]) => [kind, label]));

export function kindName(kind) {
  return KIND_NAMES[kind] ?? words(kind);
}

export function rankList(ranks, most = 6) {
  if (!ranks?.length) return "whole job";
  const shown = ranks.slice(0, most).join(", ");
  const more = ranks.length > most ? ` +${ranks.length - most}` : "";
  return `${ranks.length === 1 ? "rank" : "ranks"} ${shown}${more}`;
}

// The last step of an incident; null while it lasts. After a rollback it may be resolved at an earlier step than it
// began; its last step is then the step at which it was detected.
export function lastStep(incident) {
  if (incident.state !== "resolved") return null;
  return incident.resolved_step >= incident.onset_step ? incident.resolved_step : (incident.detected_step ?? incident.onset_step);
}
