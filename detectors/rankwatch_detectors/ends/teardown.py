"""How the processes of an attempt end: which ended first, whether on request, and what the others report about it.

An end is a plain dict, as in snapshots and evidence. It begins with the exception that ends the process, if one is
reported, and otherwise when the process was seen to be gone: what happens in between (the rest of Python's shutdown, a
SIGKILL from the launcher) is not the cause.
"""

from __future__ import annotations

import itertools
import math
import signal as signals
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final

from rankwatch_detectors.base import Occurrence
from rankwatch_detectors.episodes import DATED_FROM_S, EPISODES_MAX, time_of_day
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
ASKED_STATUSES: Final = tuple(128 + number for number in REQUESTS)
"""Exit statuses of handlers of these."""

CLOCKS_S: Final = 1.0
"""Clocks of two hosts nearly always agree within this; closer ends are simultaneous, and the plainer cause is first."""

DYING_S: Final = 15.0
"""A dying process closes its connections before Python's shutdown is over and its memory and devices are freed. On an
overloaded host its peers may report broken connections this long before it counts as gone."""

OWN: Final = "own"
"""What an end says of its cause: that it was the process itself ..."""
ABORTED: Final = "aborted"
"""... that NCCL's watchdog may have ended it, which waits for a peer in vain ..."""
BROKEN: Final = "broken"
"""... that it has lost a peer ..."""
ASKED: Final = "asked"
"""... that it was asked to, by whoever ends the job or by a launcher that ends it after a peer ..."""
LEAVING: Final = "leaving"
"""... or that it was asked to when it had left its loop already, by `break` or an exit that Python had not finished."""

CANDIDATES_MAX: Final = 16
"""Hosts whose ends are compared, of each blame the earliest: later ones are not the first, and each may have several
thousand companions."""

_MEANT: Final = {signals.SIGHUP: " (its terminal was closed)"}
ALIKE_S: Final = 2.0
"""Two ranks that end in the same way within this time have one cause, such as memory that two of a host ran out of."""

UNREAD: Final = "unread"
"""`how` of an end of which only the progress block tells ..."""
LEFT: Final = "left"
"""... and of one that begins with a loop that was left by `break`."""
_SAID_BY: Final = {"exception": "excepthook", "rank_left": LEFT}
_SAID: Final = ("error", "where")
OUTPUT_LINES_MAX: Final = 20
OUTPUT_FILES_MAX: Final = 3
OUTPUT_CHARACTERS_MAX: Final = 300
ROOT: Final = "root"
"""Role of a line of output that says what went wrong in its own process ..."""
CASCADE: Final = "cascade"
"""... and of one that says that a peer was lost."""
PRINTED_S: Final = 600.0
"""What was printed longer before the end than this is not when it began."""
_OF_EXIT: Final = ("code", "signal", "how", "exited", "order", "grace_s", "abrupt", "broken_off_unix_ns")
_LISTED: Final = ("rank", "host", "code", "signal", "how", "error", "where")


def end_of(occurrence: Occurrence, now_s: float) -> End:
    """The end that an event `exception` or `process_exit` reports, or that begins with `rank_left`."""
    fields = occurrence.fields
    exited = occurrence.kind == "process_exit"
    said = f"{fields.get('type')}: {fields.get('message', '')}" if occurrence.kind == "exception" else ""
    error = fields.get("error") if exited else said
    end: End = {
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
        "received_s": now_s,
        "time_s": occurrence.time_s,
        "grace_s": fields.get("grace_s"),
        "abrupt": fields.get("abrupt") is True,
        "broken_off_unix_ns": _time_of(fields.get("broken_off_unix_ns")),
        "by_launcher": False,
        "output": _output_of(fields.get("output")) if exited else {},
        "is_printed": False,  # its error is what it has printed, and no exception that was noted
    }
    return _judged(end)


def _output_of(reported: object) -> dict[str, Any]:
    """What a rank has printed of its end, as its agent has chosen it; {} if that is nothing. Where no line says why it
    ended, `line` is empty.
    """
    if not isinstance(reported, dict):
        return {}
    return {
        "line": str(reported.get("line") or "")[:OUTPUT_CHARACTERS_MAX],
        "role": str(reported.get("role", ""))[:20],
        "certain": reported.get("certain") is True,
        "where": str(reported.get("where") or "")[:200],
        "unix_ns": _time_of(reported.get("unix_ns")),
        "lines": _texts(reported.get("lines"), OUTPUT_LINES_MAX),
        "files": _texts(reported.get("files"), OUTPUT_FILES_MAX),
    }


def _texts(reported: object, most: int) -> list[str]:
    return [str(one)[:OUTPUT_CHARACTERS_MAX] for one in reported[:most]] if isinstance(reported, list) else []


def _judged(end: End) -> End:
    """The end with who is to blame. What it has printed counts where its own exception is not known, and where that
    says that a peer was lost, but the output what no lost peer brings.
    """
    printed = end["output"]
    is_root = printed.get("role") == ROOT
    counts = not end["error"] or (is_root and printed["certain"] and is_broken_connection(end))
    if printed and counts and printed["line"] and printed["role"] in (ROOT, CASCADE):
        end |= {"error": printed["line"], "where": printed["where"], "is_printed": True}
        if is_root and 0 <= end["unix_ns"] - printed["unix_ns"] <= PRINTED_S * 1e9:
            end["unix_ns"] = printed["unix_ns"]
    return end | {"blame": _blame_of(end)}


def _time_of(reported: object) -> int:
    return reported if isinstance(reported, int) and 0 < reported < 2**63 else 0


def evidence_of(end: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an end that go into evidence."""
    return {name: end[name] for name in _LISTED}


def first_error(end: Mapping[str, Any]) -> str:
    """Which rank had the first error, when and what it was; "" if that is not known."""
    unknown = not end["error"] or end["error"] in (f"SystemExit: {end['code']}", "SystemExit: None")
    if unknown or is_request(end) or is_broken_connection(end):
        return ""
    host = f" on {end['host']}" if end["host"] else ""
    at_s = _when_s(end)
    at = f", {time_of_day(at_s)} UTC" if at_s >= DATED_FROM_S else ""
    return f"rank {end['rank']}{host}{at}: {_first_line(end)}"


def is_request(end: Mapping[str, Any]) -> bool:
    """Whether this process was asked to end: SIGINT, SIGTERM, or the exit status of their handlers."""
    if end["by_launcher"]:
        return False
    kind, _, status = end["error"].partition(": ")
    if kind and kind != "SystemExit":
        return bool(kind.startswith(INTERRUPTED))
    if kind and status not in ("", "None", "0", *map(str, ASKED_STATUSES)):
        return False  # of its own accord, by a number or a text; a signal after that was the launcher's
    if end["signal"] is not None:
        return end["signal"] in REQUESTS
    return end["code"] in ASKED_STATUSES


def is_closed_terminal(end: Mapping[str, Any]) -> bool:
    """Whether it was asked to end by SIGHUP, which nobody may have meant."""
    return is_request(end) and (end["signal"] == signals.SIGHUP or end["code"] == 128 + signals.SIGHUP)


def is_broken_connection(end: Mapping[str, Any]) -> bool:
    """Whether its error is one that the loss of a peer causes, by its type, its words and where it was raised."""
    if is_request(end):
        return False
    if end["is_printed"]:
        return bool(end["output"]["role"] == CASCADE)
    return tells_of_lost_peer(end["error"], end["where"])


def tells_of_lost_peer(error: str, where: str) -> bool:
    """Whether an error, "Type: message", is one that the loss of a peer causes; `where` may be unknown ("")."""
    kind, _, message = error.partition(": ")
    if kind in TORCH_TYPES:
        return True
    raised_in = where.rpartition(", in ")[2]
    communicates = not where or any(place in raised_in for place in COMMUNICATES)
    words = (*LOST_PEER, *LOST_CONNECTION) if communicates else LOST_PEER
    return kind.startswith(PEER_TYPES) and any(word in message.lower() for word in words)


def is_near(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether one of two ends may have brought the other, by their times."""
    return abs(_when_s(one) - _when_s(other)) <= DYING_S


def is_aborted(end: Mapping[str, Any]) -> bool:
    """Whether it was ended by SIGABRT without an error of its own, as NCCL's watchdog ends ranks that lost a peer."""
    return end["signal"] == signals.SIGABRT and not end["error"]


def _when_s(end: Mapping[str, Any]) -> float:
    """When it began to end by its host's clock; without one, when it was heard."""
    if end["by_launcher"]:
        return float(end["broken_off_unix_ns"]) * 1e-9
    return float(end["unix_ns"]) * 1e-9 if end["unix_ns"] else float(end["time_s"])


def _blame_of(end: Mapping[str, Any]) -> str:
    """What the end of a process by itself says of who caused it."""
    if is_request(end):
        leaving = end["broken_off_unix_ns"] and end["signal"] == signals.SIGTERM and not end["error"]
        return LEAVING if leaving else ASKED
    return BROKEN if is_broken_connection(end) else ABORTED if is_aborted(end) else OWN


def _is_asked(end: Mapping[str, Any]) -> bool:
    return end["blame"] in (ASKED, LEAVING) and not end["by_launcher"]


def _on_host(end: Mapping[str, Any]) -> tuple[float, ...]:
    """What orders the ends of one host that are equally to blame."""
    at_s = float(end["broken_off_unix_ns"]) * 1e-9 or _when_s(end)
    return (at_s, math.inf if end["order"] is None else end["order"], end["rank"])


def _first_of(ends: Iterable[End]) -> End:
    """The first of ends of different hosts that are equally to blame; of simultaneous ones the plainest; {} of none."""
    known = sorted(ends, key=_on_host)
    return max(
        (end for end in known if _when_s(end) - _when_s(known[0]) <= CLOCKS_S), key=_plainness, default={}
    )  # of equals the first


def _gone_before(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether `one` was gone before `other` began to end; both are of one host."""
    if other["error"] or one["order"] is None or other["order"] is None:
        return _when_s(one) < _when_s(other)
    return bool(one["order"] < other["order"])


def _is_launchers(request: Mapping[str, Any], others: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a request came from the launcher, since one of these ends of its host was before it.

    A process that a signal ends writes no note. It was first if it was gone before a peer that lost its connection,
    even if that has reported its exception earlier.
    """
    return any(
        _gone_before(end, request) if end["blame"] == BROKEN else _when_s(end) < _when_s(request) for end in others
    )


def _brought(leaving: Mapping[str, Any], victim: Mapping[str, Any]) -> bool:
    """Whether a rank that had left its loop before a signal ended it is what this victim has lost.

    Then the victim's launcher sent that signal. Where there is none, the signal may be why it left: a handler can let
    the loop end and then the process.
    """
    left_s = float(leaving["broken_off_unix_ns"]) * 1e-9
    apart = leaving["host"] != victim["host"]
    if not -CLOCKS_S * apart <= _when_s(victim) - left_s <= DYING_S:
        return False
    return bool(victim["exited"]) and (_when_s(victim) <= _when_s(leaving) if apart else _gone_before(victim, leaving))


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
    return 3 if end["signal"] is not None and not end["by_launcher"] else 2 if end["code"] is not None else 1


def _first_line(end: Mapping[str, Any]) -> str:
    return str(end["error"]).splitlines()[0].rstrip(" .")


def how_ended(end: Mapping[str, Any]) -> str:
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
    if end["by_launcher"]:
        return f"left its loop in step {end['step']}{where}, before the others were done; its launcher then ended it"
    if end["signal"] is not None and not reason:
        return f"was ended by {signal_name(end['signal'])}{_MEANT.get(end['signal'], '')}"
    if end["how"] == LEFT:
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
    """Ends that belong together: the first one and its consequences, the same in whatever order they are heard.

    Memory: the ends that are listed, those that lead on their host, and one for each rank that was heard of before its
    exit.
    """

    STATE: ClassVar[str] = "count last_s _ends _leading _candidates _first"

    def __init__(self) -> None:
        self.count = 0
        """Number of ends besides the first one."""
        self.last_s = 0.0
        """When the last of all began to end, by its host's clock."""
        self._ends: dict[str, End] = {}
        """By rank, in the order in which they were heard."""
        self._leading: dict[str, dict[str, str]] = {}
        """By host and blame, the rank that ended first: the order on one host is certain, across hosts it may not be.
        """
        self._candidates: dict[str, list[str]] = {}
        """The earliest of those: ranks of `CANDIDATES_MAX` hosts, by blame."""
        self._first = ""
        """Rank of the first mover; "" before the first end."""

    @property
    def first(self) -> End:
        """The first mover; empty before the first end."""
        return self._ends.get(self._first, {})

    @property
    def also(self) -> list[End]:
        """Other ends, up to the number that is listed."""
        first = self.first
        return list(itertools.islice((end for end in self._ends.values() if end is not first), EPISODES_MAX))

    @property
    def followed(self) -> str:
        """How many ended after the first one whose error is known, and how soon, as the end of a sentence."""
        others = self.count - len(self.alike)
        if not others or not first_error(self.first):
            return ""
        within_s = max(math.ceil(self.last_s - _when_s(self.first)), 1)
        return f"; {others} other{'s' * (others > 1)} followed within {within_s} s"

    @property
    def victim(self) -> End:
        """The first end of those that say that a peer was lost; empty without one."""
        return next((self._ends[rank] for rank in self._candidates.get(BROKEN, ())), {})

    @property
    def alike(self) -> list[int]:
        """Ranks that ended of their own accord within `ALIKE_S` of the first one and in the same way: by the same
        signal, or by an exception of the same type. Neither is the other's consequence.
        """
        if self.first["blame"] != OWN or not (way := _way(self.first)):
            return []
        return [
            end["rank"]
            for end in self.also
            if end["blame"] == OWN and _way(end) == way and abs(end["time_s"] - self.first["time_s"]) <= ALIKE_S
        ]

    def has_noted(self, rank: int) -> bool:
        """Whether an end of this rank was heard that its exit completes."""
        noted = self._ends.get(str(rank))
        return noted is not None and (not noted["exited"] or noted["how"] == UNREAD)

    def hear(self, end: End) -> None:
        """Add the end of a rank; its exit completes the end that began with its exception, or with its absence."""
        rank = str(end["rank"])
        noted = self._ends.get(rank)
        if noted is not None:
            self._complete(rank, noted, end)
            return
        self.count += bool(self._ends)
        self.last_s = max(self.last_s, _when_s(end))
        leads = self._leads(end)
        if leads or not end["exited"] or len(self._ends) <= EPISODES_MAX:
            self._ends[rank] = end
        if leads:
            self._leading.setdefault(end["host"], {})[end["blame"]] = rank
            before = self._candidates.get(end["blame"], [])
            others = [other for other in before if self._ends[other]["host"] != end["host"]]
            earliest = self._candidates[end["blame"]] = self._earliest([*others, rank])
            if earliest != before:
                self._decide()

    def _complete(self, rank: str, noted: End, exited: End) -> None:
        end = self._ends[rank] = _completed(noted, exited)
        if all(end[name] == noted[name] for name in ("blame", "unix_ns", "host")):
            if self._leading[end["host"]].get(end["blame"]) == rank:
                self._decide()
            return
        for host in {noted["host"], end["host"]}:
            self._leading[host] = {}
            for known in self._ends.values():
                if known["host"] == host and self._leads(known):
                    self._leading[host][known["blame"]] = str(known["rank"])
        self._candidates = {
            blame: self._earliest(leading[blame] for leading in self._leading.values() if blame in leading)
            for blame in (OWN, ABORTED, BROKEN, ASKED, LEAVING)
        }
        self._decide()

    def _leads(self, end: End) -> bool:
        leader = self._leading.get(end["host"], {}).get(end["blame"])
        return leader is None or _on_host(end) < _on_host(self._ends[leader])

    def _earliest(self, ranks: Iterable[str]) -> list[str]:
        return sorted(ranks, key=lambda rank: _on_host(self._ends[rank]))[:CANDIDATES_MAX]

    def _decide(self) -> None:
        """Find the end that all others may follow from.

        Of those that nobody asked for, it is the one that says most plainly that it was the process itself, unless it
        is `DYING_S` younger than another. A request was before it if it was before all others of its host, and before
        it by the clocks too, as far as these agree.
        """
        hosts = dict.fromkeys(self._ends[rank]["host"] for ranks in self._candidates.values() for rank in ranks)
        by_host = [{blame: self._ends[rank] for blame, rank in self._leading[host].items()} for host in hosts]
        self._find_launchers(by_host)
        cause: End = {}
        for blame in (OWN, LEAVING, ABORTED, BROKEN):
            end = _first_of(ends[blame] for ends in by_host if blame in ends and not _is_asked(ends[blame]))
            if end and (not cause or _when_s(cause) - _when_s(end) > DYING_S):
                cause = end
        requests = []
        for ends in by_host:
            others = [end for end in ends.values() if not _is_asked(end)]
            asked = sorted(filter(_is_asked, ends.values()), key=_when_s)
            requests += [end for end in asked[:1] if not _is_launchers(end, others)]
        request: End = min(requests, key=lambda end: (_when_s(end), end["rank"]), default={})
        self._first = str((_before_all(cause, request) if cause and request else cause or request)["rank"])

    def _find_launchers(self, by_host: Sequence[Mapping[str, End]]) -> None:
        """Find the ranks that their launcher ended while they were ending by themselves: nobody asked these to end."""
        earliest = [self._ends[rank] for blame in (ABORTED, BROKEN) for rank in self._candidates.get(blame, ())]
        interrupted = any(ends[ASKED]["error"].startswith(INTERRUPTED) for ends in by_host if ASKED in ends)
        for ends in by_host:
            if (leaving := ends.get(LEAVING)) is not None:
                leaving["by_launcher"] = False
                victims = [*(ends[blame] for blame in (ABORTED, BROKEN) if blame in ends), *earliest]
                leaving["by_launcher"] = not interrupted and any(_brought(leaving, victim) for victim in victims)


def _before_all(cause: End, request: End) -> End:
    """Which of the two was first, one that nobody asked for or one that was asked to end."""
    if request["host"] == cause["host"]:
        return request
    apart_s = _when_s(cause) - _when_s(request)
    if abs(apart_s) <= CLOCKS_S and _plainness(cause) != _plainness(request):
        return max(cause, request, key=_plainness)
    return cause if apart_s < 0 else request


def _completed(noted: End, exited: End) -> End:
    """An end with what the exit of its process says of it."""
    end = (
        noted
        | {name: exited[name] for name in (*_OF_EXIT, "output")}
        | {name: noted[name] or exited[name] for name in _SAID}
        | {"is_printed": exited["is_printed"] and not noted["error"]}
    )
    if noted["how"] in (LEFT, UNREAD):  # not of an exception: when it began to end is known only now
        end["unix_ns"], end["host"] = exited["unix_ns"], exited["host"]
    return _judged(end)
