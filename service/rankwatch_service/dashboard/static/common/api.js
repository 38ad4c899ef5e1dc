// Requests to the REST API with the browser's session. Without a session the login page is opened.

const AWAY = [0, 502, 503, 504]; // no response, or that of a proxy or a service without its database

export class Refused extends Error {
  constructor(status, message, requestId = "") {
    super(message);
    this.status = status;
    this.requestId = requestId;
    this.away = AWAY.includes(status);
  }
}

let aheadMs = 0;
const tags = new Map(); // by path, the ETag of what was read: a write over what others have changed since is refused

// The clock of the service, from the Date header of its responses: ages must not depend on the clock of this machine.
export function now() {
  return Date.now() + aheadMs;
}

export function get(path, query = {}) {
  return ask("GET", asked(path, query));
}

const PAGE_MAX = 500;

// The first `count` items of a list, read page by page: {items, total}.
export async function getList(path, query, count) {
  const items = [];
  let [total, cursor] = [0, null];
  do {
    const page = await get(path, { ...query, cursor, limit: Math.min(PAGE_MAX, count - items.length) });
    items.push(...page.items);
    total = page.total ?? total;
    cursor = page.next_cursor;
  } while (cursor && items.length < count);
  return { items, total: Math.max(total, items.length) };
}

// A binary response, as an ArrayBuffer.
export function getBytes(path, query = {}) {
  return ask("GET", asked(path, query), undefined, (answer) => answer.arrayBuffer());
}

function asked(path, query) {
  const each = Object.entries(query).flatMap(([name, values]) => [values].flat().map((value) => [name, value]));
  const chosen = each.filter(([, value]) => value !== null && value !== undefined && value !== "");
  const search = new URLSearchParams(chosen).toString();
  return search ? `${path}?${search}` : path;
}

export function post(path, body) {
  return ask("POST", path, body);
}

export function put(path, body) {
  return ask("PUT", path, body);
}

export function patch(path, body) {
  return ask("PATCH", path, body);
}

export function remove(path) {
  return ask("DELETE", path);
}

async function ask(method, path, body, read = (answer) => answer.json().catch(() => null)) {
  const headers = { Accept: "*/*" };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  if (method !== "GET") headers["Idempotency-Key"] = crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`;
  if (method === "PUT" && tags.has(path)) headers["If-Match"] = tags.get(path);
  let answer;
  try {
    answer = await fetch(`/api/v1/${path}`, { method, headers, body: body && JSON.stringify(body) });
  } catch {
    dispatchEvent(new CustomEvent("answered", { detail: false }));
    throw new Refused(0, "The service does not answer; it may be restarting.");
  }
  dispatchEvent(new CustomEvent("answered", { detail: true }));
  const date = Date.parse(answer.headers.get("Date"));
  if (Number.isFinite(date) && Math.abs(date - now()) > 1500) aheadMs = date + 500 - Date.now();
  if (answer.status === 401 && location.pathname !== "/login") {
    location.replace(`/login?next=${encodeURIComponent(location.pathname + location.search)}`);
    return new Promise(() => {}); // the page is about to be left
  }
  if (!answer.ok) {
    const problem = await answer.json().catch(() => null);
    throw new Refused(answer.status, problem?.detail ?? problem?.title ?? `refused (${answer.status})`, problem?.request_id);
  }
  if (answer.headers.has("ETag")) tags.set(path, answer.headers.get("ETag"));
  return answer.status === 204 ? null : read(answer);
}

export const path = (...parts) => parts.map(encodeURIComponent).join("/");
