"""How the processes of an attempt end: which went first, whether that was on request, what the others say of it.

An end is a plain dict, as it lies in snapshots and evidence. It begins with the exception that ends the process, where
one is told, and else when the process was seen to be gone: what follows in between (the rest of Python's shutdown, a
launcher that loses patience) is not how it ended.
"""

from __future__ import annotations

import signal as signals
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.episodes import EPISODES_MAX
from rankwatch_detectors.state import Stateful

End = dict[str, Any]

# What the ranks left behind say, with gloo, NCCL, sockets and the process group's store.
CONNECTION_ERRORS: Final = (
    "connection closed", "connection reset", "connection refused", "broken pipe", "disterror", "distnetworkerror",
    "distbackenderror", "nccl", "gloo", "timed out", "timeout", "socket", "remote process", "peer", "store",
)  # fmt: skip

ENDS: Final = ("exception", "process_exit")
"""Events that tell of an end."""

INTERRUPTED: Final = "KeyboardInterrupt"
RECORDING: Final = "recording"
"""How an end is known where all that there is are rows: they stop."""
REQUESTS: Final = (signals.SIGINT, signals.SIGTERM)

CLOCKS_S: Final = 1.0
"""Clocks of two hosts agree within this, nearly always: closer ends are the same moment, and the plainer one counts."""

DYING_S: Final = 15.0
"""A process that dies closes its connections before Python's shutdown is over, its memory and devices are given back
and it counts as gone: so its peers may complain so long before, where the host is overloaded."""

_SAID_BY: Final = {"exception": "excepthook", "rank_left": "left"}
_LISTED: Final = ("rank", "host", "code", "signal", "how", "error", "where")


def end_of(occurrence: Occurrence, now_s: float) -> End:
    """The end that an event `exception` or `process_exit` tells, or one that begins with `rank_left`."""
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
    """What evidence shows of an end."""
    return {name: end[name] for name in _LISTED}


def is_request(end: Mapping[str, Any]) -> bool:
    """Whether somebody asked this process to end: SIGINT, SIGTERM, or the status with which their handlers exit."""
    if end["error"] and not end["error"].startswith("SystemExit"):
        return bool(end["error"].startswith(INTERRUPTED))
    if end["signal"] is not None:
        return end["signal"] in REQUESTS
    return end["code"] in [128 + number for number in REQUESTS]


def is_broken_connection(end: Mapping[str, Any]) -> bool:
    """Whether its error is what a rank says that others have left."""
    error = end["error"].lower()
    return not is_request(end) and any(words in error for words in CONNECTION_ERRORS)


def precedes(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` came first, and `other` can be its consequence. Where times do not tell, the plainer cause did."""
    if not (one["unix_ns"] and other["unix_ns"]):
        return _plainness(one) > _plainness(other)
    before_s = float(other["unix_ns"] - one["unix_ns"]) * 1e-9
    if is_broken_connection(other) and _is_its_own(one):
        return before_s > -DYING_S
    if is_broken_connection(one) and _is_its_own(other):
        return before_s > DYING_S
    if one["host"] == other["host"]:
        # A signal leaves no note: its victim was first if it was gone before the others, whatever they said by then.
        if is_broken_connection(other) and is_request(one) and one["order"] is not None:
            return not _gone_before(other, one)
        if is_broken_connection(one) and is_request(other) and other["order"] is not None:
            return _gone_before(one, other)
    elif abs(before_s) <= CLOCKS_S:
        return _plainness(one) > _plainness(other)
    return before_s > 0


def _gone_before(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one["order"] is not None and bool(one["order"] < other["order"])


def _is_its_own(end: Mapping[str, Any]) -> bool:
    return not (is_request(end) or is_broken_connection(end))


def _plainness(end: Mapping[str, Any]) -> int:
    """How plainly a process ended by itself and not because of others: a crash most, a broken connection least."""
    if is_broken_connection(end):
        return 0
    if is_request(end):
        return 1
    if end["error"]:
        return 2
    return 3 if end["signal"] is not None else 2 if end["code"] is not None else 1


def told(end: Mapping[str, Any]) -> str:
    """How it ended, as the rest of a sentence that begins with the rank."""
    if end["how"] == RECORDING:
        return f"has no row after step {end['step'] - 1}, and its peers went on"
    if end["error"].startswith(INTERRUPTED):
        then = end["error"].splitlines()[0].removeprefix(f"{INTERRUPTED}: ")
        return f"was interrupted (SIGINT, {INTERRUPTED}{then and ', '}{then})"
    if is_request(end) and end["code"] is not None:
        return f"was asked to end and did so with exit code {end['code']}"
    where = f" at {end['where']}" if end["where"] else ""
    reason = f": {end['error'].splitlines()[0]}" if end["error"] else ""
    if end["signal"] is not None and not reason:
        return f"was ended by {signal_name(end['signal'])}"
    if end["how"] == "left":
        return f"left its loop in step {end['step']}{where}, before the others were done"
    if not end["exited"]:
        return f"ends{where}{reason}"
    if end["signal"] is not None:
        return f"ended{where}{reason}; then {signal_name(end['signal'])}"
    if end["code"] is not None:
        return f"ended with exit code {end['code']}{where}{reason}"
    if end["abrupt"]:
        return "ended without Python's shutdown, by a signal such as SIGKILL or by os._exit; which one is not known"
    return f"ended{where}{reason}; how is not known"


def signal_name(number: int) -> str:
    """SIGKILL for 9."""
    try:
        return signals.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Teardown(Stateful):
    """Ends that belong together: the first one, and what it brought. Memory: one entry for each rank that ended."""

    STATE: ClassVar[tuple[str, ...]] = ("first", "also", "count", "_noted", "_firsts")

    def __init__(self) -> None:
        self.first: End = {}
        """The first mover; empty before any end was heard."""
        self.also: list[End] = []
        """Other ends, at most as many as are listed."""
        self.count = 0
        """Other ends in all."""
        self._noted: dict[str, End] = {}
        """Ranks whose exception was told and whose exit was not yet."""
        self._firsts: dict[str, End] = {}
        """By host, what ended there first: of one host the order is known, of several it may not be."""

    def hear(self, end: End) -> None:
        """Take up the end of a rank; its exit completes what its exception said."""
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

    def has_noted(self, rank: int) -> bool:
        """Whether this rank's exception was told, and its exit was not."""
        return str(rank) in self._noted

    def _complete(self, end: End) -> None:
        # They are one and the same, or after a restart from a snapshot copies of each other.
        for known in (self.first, self._firsts[end["host"]], *self.also):
            if known["rank"] == end["rank"]:
                known.update(end)
