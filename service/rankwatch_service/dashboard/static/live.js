// One stream of server-sent events for a page. It only says that something changed; pages then ask for what they show,
// so that a missed or repeated event does no harm.

const TOPICS = ["incident", "command", "job", "checkpoint", "silence", "reset"];
const GATHER_MS = 150;

const listeners = new Set();
let source = null;
let connected = false;

// Calls `changed(topic, job, change)` for each change, soon but not for each of a burst, and `state(connected)`.
export function listen(changed, state = () => {}) {
  listeners.add({ changed, state });
  if (source === null) open();
  state(connected);
}

export function everySecond(call) {
  call();
  setInterval(() => document.visibilityState === "visible" && call(), 1000);
}

// Collects calls for a moment; then calls once.
export function gathered(call, ms = GATHER_MS) {
  let timer = null;
  return () => {
    timer ??= setTimeout(() => {
      timer = null;
      call();
    }, ms);
  };
}

function open() {
  source = new EventSource("/api/v1/events");
  source.onopen = () => set(true);
  source.onerror = () => {
    set(false);
    if (source.readyState === EventSource.CLOSED) retry();
  };
  for (const topic of TOPICS) source.addEventListener(topic, (event) => heard(topic, event));
}

function retry() {
  source.close();
  setTimeout(open, 3000);
}

function heard(topic, event) {
  let change = {};
  try {
    change = JSON.parse(event.data);
  } catch {
    // An event without readable data still says that something changed.
  }
  for (const listener of listeners) listener.changed(topic, change.job ?? null, change);
}

function set(value) {
  if (value === connected) return;
  connected = value;
  for (const listener of listeners) {
    listener.state(connected);
    if (connected) listener.changed("reset", null, {}); // whatever happened meanwhile
  }
}

addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => event.persisted && source && open());
