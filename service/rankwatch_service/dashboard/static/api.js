// Asks the REST API with the browser's session. Without one the reader is sent to log in.

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let aheadMs = 0;

// The service's clock, as its answers tell it (to a second): ages on the page must not depend on this machine's.
export function now() {
  return Date.now() + aheadMs;
}

export function get(path, query = {}) {
  const chosen = Object.entries(query).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(chosen).toString();
  return ask("GET", search ? `${path}?${search}` : path);
}

export function post(path, body) {
  return ask("POST", path, body);
}

export function remove(path) {
  return ask("DELETE", path);
}

async function ask(method, path, body) {
  const headers = { Accept: "application/json" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET") headers["Idempotency-Key"] = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  let answer;
  try {
    answer = await fetch(`/api/v1/${path}`, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    dispatchEvent(new CustomEvent("answered", { detail: false }));
    throw new Refused(0, "The service does not answer.");
  }
  dispatchEvent(new CustomEvent("answered", { detail: true }));
  const date = Date.parse(answer.headers.get("Date"));
  if (Number.isFinite(date) && Math.abs(date - now()) > 1500) aheadMs = date + 500 - Date.now();
  if (answer.status === 401 && location.pathname !== "/login") {
    location.replace(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    return new Promise(() => {}); // the page is about to be left
  }
  const content = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (!answer.ok) throw new Refused(answer.status, content?.detail ?? content?.title ?? `refused (${answer.status})`);
  return content;
}

export const path = (...parts) => parts.map(encodeURIComponent).join("/");
