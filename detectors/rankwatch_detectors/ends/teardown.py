"""How the processes of an attempt end: which ended first, whether on request, and what the others report about it.

An end is a plain dict, as in snapshots and evidence. It begins with the exception that ends the process, if one is
reported, and otherwise when the process was seen to be gone: what happens in between (the rest of Python's shutdown, a
SIGKILL from the launcher) is not the cause.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.state import Stateful

End = dict[str, Any]

LOST_PEER: Final = ("connection closed by peer", "connection reset by peer", "gloo", "nccl", "c10d", "tcpstore")
"""Words in the errors of ranks that have lost a peer, wherever these are raised ..."""
LOST_CONNECTION: Final = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "timeout", "socket",
    "remote process", "peer", "store",
)  # fmt: skip
"""... and words that mean the same only where torch communicates: object stores and services have time-outs too."""
PEER_TYPES: Final = ("RuntimeError", "Connection", "BrokenPipe", "EOFError", "AcceleratorError")
"""Beginnings of the types of such errors, beside torch's own ..."""
TORCH_TYPES: Final = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""... which mean nothing else."""
COMMUNICATES: Final = ("torch/distributed/", "torch/autograd/", "torch/nn/parallel/", "torch/_")
"""Places in torch that raise them."""

ENDS: Final = ("exception", "process_exit")
"""Events that report an end."""

INTERRUPTED: Final = "KeyboardInterrupt"
RECORDING: Final = "recording"
"""`how` of an end in a replayed recording, which has only rows: they stop."""
REQUESTS: Final = (signals.SIGINT, signals.SIGTERM, signals.SIGHUP)
ASKED: Final = tuple(128 + number for number in REQUESTS)
"""Exit statuses of handlers of these."""

CLOCKS_S: Final = 1.0
"""Clocks of two hosts nearly always agree within this; closer ends are simultaneous, and the plainer cause is first."""

DYING_S: Final = 15.0
"""A dying process closes its connections before Python's shutdown is over and its memory and devices are freed. On an
overloaded host its peers may report broken connections this long before it counts as gone."""

_MEANT: Final = {signals.SIGHUP: " (its terminal was closed)"}
ALIKE_S: Final = 2.0
"""Two ranks that end in the same way within this time have one cause, such as memory that two of a host ran out of."""

_SAID_BY: Final = {"exception": "excepthook", "rank_left": "left"}
_LISTED: Final = ("rank", "host", "code", "signal", "how", "error", "where")


def end_of(occurrence: Occurrence, now_s: float) -> End:
    """The end that an event `exception` or `process_exit` reports, or that begins with `rank_left`."""
    fields = occurrence.fields
    exited = occurrence.kind == "process_exit"
    said = f"{fields.get('type')}: {fields.get('message', '')}" if occurrence.kind == "exception" else ""
    error = fields.get("error") if exited else said
    return {
        "rank": occurrence.rank,
        "host": occurrence.host,
        "step": occurrence.step,
        "code": fields.get("code"),
        "signal": fields.get("signal"),
        "how": str(fields.get("how", "unknown")) if exited else _SAID_BY[occurrence.kind],
        "error": str(error or "")[:500],
        "where": str(fields.get("where") or "")[:200],
        "exited": exited,
        "order": fields.get("exit_order") if exited else None,
        "unix_ns": occurrence.unix_ns,
        "heard_s": now_s,
        "time_s": occurrence.time_s,
        "grace_s": fields.get("grace_s"),
        "abrupt": fields.get("abrupt") is True,
    }


def evidence_of(end: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an end that go into evidence."""
    return {name: end[name] for name in _LISTED}


def is_request(end: Mapping[str, Any]) -> bool:
    """Whether this process was asked to end: SIGINT, SIGTERM, or the exit status of their handlers."""
    kind, _, status = end["error"].partition(": ")
    if kind and kind != "SystemExit":
        return bool(kind.startswith(INTERRUPTED))
    if kind and status not in ("", "None", "0", *map(str, ASKED)):
        return False  # of its own accord, by a number or a text; a signal after that was the launcher's
    if end["signal"] is not None:
        return end["signal"] in REQUESTS
    return end["code"] in ASKED


def is_closed_terminal(end: Mapping[str, Any]) -> bool:
    """Whether it was asked to end by SIGHUP, which nobody may have meant."""
    return is_request(end) and (end["signal"] == signals.SIGHUP or end["code"] == 128 + signals.SIGHUP)


def is_broken_connection(end: Mapping[str, Any]) -> bool:
    """Whether its error is one that the loss of a peer causes, by its type, its words and where it was raised."""
    return not is_request(end) and tells_of_lost_peer(end["error"], end["where"])


def tells_of_lost_peer(error: str, where: str) -> bool:
    """Whether an error, "Type: message", is one that the loss of a peer causes; `where` may be unknown ("")."""
    kind, _, message = error.partition(": ")
    if kind in TORCH_TYPES:
        return True
    raised_in = where.rpartition(", in ")[2]
    communicates = not where or any(place in raised_in for place in COMMUNICATES)
    words = (*LOST_PEER, *LOST_CONNECTION) if communicates else LOST_PEER
    return kind.startswith(PEER_TYPES) and any(word in message.lower() for word in words)


def is_aborted(end: Mapping[str, Any]) -> bool:
    """Whether it was ended by SIGABRT without an error of its own, as NCCL's watchdog ends ranks that lost a peer."""
    return end["signal"] == signals.SIGABRT and not end["error"]


def precedes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` came first, so that `other` may be its consequence; if times do not decide, the plainer one."""
    if not (one["unix_ns"] and other["unix_ns"]):
        return _plainness(one) > _plainness(other)
    before_s = float(other["unix_ns"] - one["unix_ns"]) * 1e-9
    if _victimhood(other) > _victimhood(one) >= 0:
        return before_s > -DYING_S
    if _victimhood(one) > _victimhood(other) >= 0:
        return before_s > DYING_S
    if one["host"] == other["host"]:
        # A process that a signal ends writes no note. It was first if it was gone before the others, even if these
        # have reported an exception earlier.
        if is_broken_connection(other) and is_request(one) and one["order"] is not None:
            return not _gone_before(other, one)
        if is_broken_connection(one) and is_request(other) and other["order"] is not None:
            return _gone_before(one, other)
    elif abs(before_s) <= CLOCKS_S:
        return _plainness(one) > _plainness(other)
    return before_s > 0


def _gone_before(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["order"] is not None and bool(one["order"] < other["order"])


def _victimhood(end: Mapping[str, Any]) -> int:
    """How likely others caused it: 0 for an end of its own, 1 for an abort, 2 for a lost connection; -1 if asked to."""
    return -1 if is_request(end) else 2 if is_broken_connection(end) else int(is_aborted(end))


def _way(end: Mapping[str, Any]) -> str:
    """In which way it ended: an exception, else a signal; "" for an exit status alone, which says nothing."""
    kind = end["error"].partition(": ")[0]
    return kind if kind != "SystemExit" and kind else signal_name(end["signal"]) if end["signal"] is not None else ""


def _plainness(end: Mapping[str, Any]) -> int:
    """How plainly a process ended by itself and not because of others: highest for a crash, 0 for a lost connection."""
    if is_broken_connection(end):
        return 0
    if is_request(end) or is_aborted(end):
        return 1
    if end["error"]:
        return 2
    return 3 if end["signal"] is not None else 2 if end["code"] is not None else 1


def _first_line(end: Mapping[str, Any]) -> str:
    return str(end["error"]).splitlines()[0].rstrip(" .")


def told(end: Mapping[str, Any]) -> str:
    """How it ended, as the predicate of a sentence whose subject is the rank."""
    if end["how"] == RECORDING:
        return f"has no row after step {end['step'] - 1}, and its peers went on"
    if end["error"].startswith(INTERRUPTED):
        then = _first_line(end).removeprefix(INTERRUPTED).lstrip(": ")
        return f"was interrupted (SIGINT, {INTERRUPTED}{then and ', '}{then})"
    if is_request(end) and end["code"] is not None:
        return f"was asked to end and did so with exit code {end['code']}"
    where = f" at {end['where']}" if end["where"] else ""
    reason = f": {_first_line(end)}" if end["error"] else ""
    if end["signal"] is not None and not reason:
        return f"was ended by {signal_name(end['signal'])}{_MEANT.get(end['signal'], '')}"
    if end["how"] == "left":
        return f"left its loop in step {end['step']}{where}, before the others were done"
    if not end["exited"]:
        return f"ends{where}{reason}"
    if end["signal"] is not None:
        return f"ended{where}{reason}; then {signal_name(end['signal'])}"
    if end["code"] is not None:
        return f"ended with exit code {end['code']}{where}{reason}"
    if end["abrupt"]:
        return "ended without Python's shutdown: by a signal such as SIGKILL, or by os._exit"
    return f"ended{where}{reason} (exit status unknown)"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Teardown(Stateful):
    """Ends that belong together: the first one and its consequences. Memory: one entry for each rank that ended."""

    STATE: ClassVar[str] = "first also count _noted _firsts"

    def __init__(self) -> None:
        self.first: End = {}
        """The first mover; empty before the first end."""
        self.also: list[End] = []
        """Other ends, up to the number that is listed."""
        self.count = 0
        """Number of all other ends."""
        self._noted: dict[str, End] = {}
        """Ranks whose exception was reported and whose exit was not yet."""
        self._firsts: dict[str, End] = {}
        """By host, the first end: the order on one host is certain, across hosts it may not be."""

    def hear(self, end: End) -> None:
        """Add the end of a rank; its exit completes the end that its exception began."""
        noted = self._noted.pop(str(end["rank"]), None)
        if noted is not None:
            said = {name: noted[name] or end[name] for name in ("error", "where")}
            self._complete(
                noted
                | {name: end[name] for name in ("code", "signal", "how", "exited", "order", "grace_s", "abrupt")}
                | said
            )
            return
        if not end["exited"]:
            self._noted[str(end["rank"])] = end
        if not self.first:
            self.first = self._firsts[end["host"]] = end
            return
        self.count += 1
        here = self._firsts.get(end["host"])
        if here is None or precedes(end, here):
            self._firsts[end["host"]] = end
            if precedes(end, self.first):
                end, self.first = self.first, end
        if len(self.also) < EPISODES_MAX:
            self.also.append(end)

    @property
    def alike(self) -> list[int]:
        """Ranks that ended of their own accord within `ALIKE_S` of the first one and in the same way: by the same
        signal, or by an exception of the same type. Neither is the other's consequence.
        """
        if _victimhood(self.first) or not (way := _way(self.first)):
            return []
        return [
            end["rank"]
            for end in self.also
            if _way(end) == way and not _victimhood(end) and abs(end["time_s"] - self.first["time_s"]) <= ALIKE_S
        ]

    def has_noted(self, rank: int) -> bool:
        """Whether this rank's exception was reported, and its exit was not."""
        return str(rank) in self._noted

    def _complete(self, end: End) -> None:
        # These may be the same object, or after a restore equal copies, so all are updated.
        for known in (self.first, self._firsts[end["host"]], *self.also):
            if known["rank"] == end["rank"]:
                known.update(end)
