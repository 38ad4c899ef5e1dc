// One stream of server-sent events for a page. It only says that something changed; pages then ask for what they show,
// so that a missed or repeated event does no harm. Streams can die without a word, so pages also ask now and then.

const TOPICS = ["incident", "command", "job", "checkpoint", "silence", "reset"];
const GATHER_MS = 150;
const ASK_ANYWAY_MS = 15_000;
const AGAIN_MS = 3000;

const listeners = new Set();
let source = null;
let streaming = null; // not known yet
let answering = true; // whether the newest request was answered
let connected = null;

// Calls `changed(topic, job, change)` for each change, soon but not for each of a burst, and `state(connected)`.
export function listen(changed, state = () => {}) {
  listeners.add({ changed, state });
  if (source === null) open();
  if (connected !== null) state(connected);
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
  setTimeout(open, AGAIN_MS);
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
  if (connected && before === false) changedAll(); // whatever happened meanwhile
}

function changedAll() {
  for (const { changed } of listeners) changed("reset", null, {});
}

setInterval(() => document.visibilityState === "visible" && changedAll(), ASK_ANYWAY_MS);
addEventListener("answered", ({ detail }) => {
  answering = detail;
  judge();
});
addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => event.persisted && source && open());
