"""Takes the Python stacks of a rank, which its own faulthandler writes on a real-time signal.

No debugger and no privilege is needed, and it works while the rank is blocked in C++ or loops in Python. The signal is
sent only to a process that is provably our rank and has a handler for it. A stopped process runs no handler; then its
state, its kernel function and its last phase are reported alone.

All ranks of a host may be asked at once. Those that stand at the same place send its text once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rankwatch import layout, wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.hang.stack_text import place_of
from rankwatch.agent.procfs import catches, read_stat, wait_channel
from rankwatch.agent.ranks import LocalRank
from rankwatch.reader import ProgressBlock

STACK_WAIT_S: Final = 2.0
"""A handler runs within milliseconds unless the process is stopped or in the kernel; this allows for swapping."""
STACK_SETTLE_S: Final = 0.1
"""A stack counts as complete when its file has not grown for this long."""
STACK_BYTES_MAX: Final = 64 * 1024
"""faulthandler writes at most 100 frames of 100 threads; the first 64 KiB are enough to see where a rank waits."""
REQUESTS_REMEMBERED: Final = 4_096
"""Answered (request, rank) pairs: eight requests to the 512 ranks that one agent reads. Also the (request, place) pairs
whose text was sent."""

STOPPED_STATES: Final = ("T", "t")
STOPPED: Final = "stopped by a signal"


@dataclass(slots=True)
class _Waiting:
    rank: LocalRank
    attempt: str
    fields: dict[str, Any]
    step: int
    path: Path
    before: int
    until_s: float
    size: int
    grown_s: float


class Stacks:
    """Takes stacks of local ranks; no call blocks until a stack is written."""

    def __init__(self, clock: AgentClock) -> None:
        self._clock = clock
        self._answered: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._sent: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._waiting: list[_Waiting] = []

    @property
    def pending(self) -> bool:
        """True while a stack is outstanding."""
        return bool(self._waiting)

    def begin(self, request: str, rank: LocalRank) -> None:
        """Ask a rank for its stack, once for each request."""
        if not _is_new(self._answered, (request, rank.path)):
            return
        now_s = self._clock.monotonic_s()
        block = rank.reader.progress()
        fields = _evidence(rank, block, now_s)
        fields["order"] = request
        path = Path(layout.stack_path(rank.path))
        size = _size(path)
        waiting = _Waiting(
            rank, rank.attempt(block.k), fields, block.step, path, size, now_s + STACK_WAIT_S, size, now_s
        )
        number = int(rank.identity.get("stack_signal") or 0)
        fields["reason"] = _obstacle(rank, fields["os_state"], number)
        if fields["reason"] or rank.process is None or not rank.process.send(number):
            waiting.until_s = now_s
        self._waiting.append(waiting)

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with `stack_dump` events: complete stacks, and those that failed, with the reason."""
        now_s = self._clock.monotonic_s()
        ready = []
        for waiting in list(self._waiting):
            size = _size(waiting.path)
            if size != waiting.size:
                waiting.size, waiting.grown_s = size, now_s
            whole = waiting.size > waiting.before and now_s - waiting.grown_s >= STACK_SETTLE_S
            if whole or now_s >= waiting.until_s:
                self._waiting.remove(waiting)
                stack = _read(waiting.path, waiting.before)
                if not stack and not waiting.fields["reason"]:
                    _explain(waiting)
                waiting.fields |= self._told(waiting, stack)
                event = wire.Event("stack_dump", self._clock.unix_ns(), waiting.rank.rank, waiting.step, waiting.fields)
                ready.append((waiting.attempt, event))
        return ready

    def _told(self, waiting: _Waiting, stack: str) -> dict[str, Any]:
        """The fields of a stack. Its text stands for all ranks of this host that stand at the same place."""
        place = place_of(stack, int(waiting.rank.identity.get("stack_thread") or 0))
        if place is None:
            return {"stack": stack, "place": "", "where": ""}
        new = _is_new(self._sent, (waiting.fields["order"], place.digest))
        return {"stack": stack if new else "", "place": place.digest, "where": place.text}


def _is_new(known: OrderedDict[tuple[str, str], None], key: tuple[str, str]) -> bool:
    """Add a key, of which the oldest are forgotten; whether it was not there."""
    if key in known:
        return False
    known[key] = None
    if len(known) > REQUESTS_REMEMBERED:
        known.popitem(last=False)
    return True


def _evidence(rank: LocalRank, block: ProgressBlock, now_s: float) -> dict[str, Any]:
    stat = None if rank.is_followed else read_stat(rank.header.pid)
    if stat is not None and stat.start_ticks != rank.header.start_ticks:
        stat = None
    return {
        "os_state": "?" if rank.is_followed else "X" if stat is None else stat.state,
        "cpu_ticks": 0 if stat is None else stat.cpu_ticks,
        "wchan": "" if stat is None else wait_channel(rank.header.pid),
        "phase": block.phase,
        "phase_age_s": max(0.0, now_s - block.phase_since_ns / 1e9),
    }


def _explain(waiting: _Waiting) -> None:
    """Set the reason why no stack came although the signal was sent: the process may have been stopped since."""
    stat = read_stat(waiting.rank.header.pid)
    if stat is not None and stat.state in STOPPED_STATES:
        waiting.fields |= {"os_state": stat.state, "reason": STOPPED}
    else:
        waiting.fields["reason"] = "the handler did not run"


def _obstacle(rank: LocalRank, os_state: str, number: int) -> str:
    """Why the signal must not be sent; empty if it may."""
    if rank.is_followed:
        return "only its log is known"
    if rank.gone_since_s is not None or rank.process is None or not rank.reader.owner_alive():
        return "its process is gone"
    if os_state in STOPPED_STATES:
        return STOPPED
    # Only a rank that has declared the signal writes stacks on it; any other handler could do anything.
    if not number or not catches(rank.process.pid, number):
        return "no handler for the stack signal"
    return ""


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path, offset: int) -> str:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(STACK_BYTES_MAX).decode("utf-8", "replace")
    except OSError:
        return ""
