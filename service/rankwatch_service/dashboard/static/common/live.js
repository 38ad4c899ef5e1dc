// One stream of server-sent events for a page. Events only say that something changed; pages then read it again, so a
// missed or repeated event does no harm. Since a stream can break unnoticed, pages also poll slowly.

const TOPICS = ["incident", "command", "job", "checkpoint", "silence", "reset"];
const GATHER_MS = 150;
const POLL_MS = 15_000;
const RECONNECT_MS = 3000;

const listeners = new Set();
let source = null;
let streaming = null; // not known yet
let answering = true; // whether the newest request succeeded
let connected = null;

// Calls `changed(topic, job, change)` for each change, and `state(connected)` when the connection state changes. The topic
// "reset" says that events may have been missed; with `change.polled` there is no sign of that.
export function listen(changed, state = () => {}) {
  listeners.add({ changed, state });
  if (source === null) open();
  if (connected !== null) state(connected);
}

export function everySecond(call) {
  call();
  setInterval(() => document.visibilityState === "visible" && call(), 1000);
}

// Debounces: collects calls for a moment, then calls once.
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
  source.onopen = () => {
    streaming = true;
    judge();
  };
  source.onerror = () => {
    streaming = false;
    judge();
    if (source.readyState === EventSource.CLOSED) retry();
  };
  for (const topic of TOPICS) source.addEventListener(topic, (event) => heard(topic, event));
}

function retry() {
  source.close();
  setTimeout(open, RECONNECT_MS);
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

function judge() {
  const before = connected;
  if (streaming !== null) connected = streaming && answering;
  if (connected === before) return;
  for (const { state } of listeners) state(connected);
  if (before !== null) changedAll(); // what cannot be read any more is said; later, events may have been missed
}

function changedAll(polled = false) {
  for (const { changed } of listeners) changed("reset", null, { polled });
}

setInterval(() => document.visibilityState === "visible" && changedAll(true), POLL_MS);
addEventListener("answered", ({ detail }) => {
  answering = detail;
  judge();
});
addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => event.persisted && source && open());
