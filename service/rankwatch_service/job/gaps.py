"""Gap tracking: which messages of each sender have arrived, which are repeated and which are missing. Pure.

A sender is one boot of one host's agent; it numbers its messages from 0. A message on another connection may overtake
the missing one, so a gap is reported only after `GAP_WAIT_S`. A message that arrives even later is still used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from rankwatch import wire

GAP_WAIT_S: Final = 5.0
"""Stream time until a missing message is reported as lost. An agent retries after about a second."""

INTERVALS_MAX: Final = 64
"""Separate gaps kept for each sender. Beyond that the oldest is reported and dropped."""

BOOTS_MAX: Final = 3
"""Boots kept for each host: the current one, the one before, and one of another process on the host."""


HOSTS_MIN: Final = 64
"""A job's hosts that are followed: so many, or two for each of its ranks if that is more, since a job may move to other
hosts. Beyond that the host that was followed first is forgotten; if it sends again, nothing of it counts as missing."""


class Arrival(Enum):
    """How a message relates to those before it, by its number."""

    NEW = "new"
    LATE = "late"
    """It fills a gap: a message with a higher number arrived before it."""
    REPEATED = "repeated"


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages of one sender that did not arrive in time."""

    host: str
    boot: str
    missing: int


@dataclass(slots=True)
class _Interval:
    first: int
    last: int
    since_s: float
    reported: bool


@dataclass(slots=True)
class _Sender:
    newest: int
    intervals: list[_Interval] = field(default_factory=list)


class GapTracker:
    """Tracks sequence numbers by host and boot. Memory: BOOTS_MAX x INTERVALS_MAX x 100 bytes for each host at most."""

    def __init__(self) -> None:
        self._hosts: dict[str, dict[str, _Sender]] = {}

    def are_new(self, batches: Iterable[wire.Batch]) -> bool:
        """Whether each message has a higher number than every earlier one of its sender. Changes nothing."""
        newest: dict[tuple[str, str], int] = {}
        for batch in batches:
            sender = batch.host, batch.boot
            before = newest.get(sender)
            if before is None:
                known = self._hosts.get(batch.host, {}).get(batch.boot)
                before = -1 if known is None else known.newest
            if batch.seq <= before:
                return False
            newest[sender] = batch.seq
        return True

    def arrive(self, host: str, boot: str, seq: int, now_s: float, ranks: int = 0) -> Arrival:
        """Record the arrival of a message of a job with so many ranks."""
        if host not in self._hosts and len(self._hosts) >= max(HOSTS_MIN, 2 * ranks):
            del self._hosts[next(iter(self._hosts))]
        boots = self._hosts.setdefault(host, {})
        sender = boots.get(boot)
        if sender is None:
            if len(boots) >= BOOTS_MAX:
                del boots[next(iter(boots))]
            sender = boots[boot] = _Sender(seq)
            if seq > 0:
                # The stream may begin in the middle of a sender's messages: earlier ones are not lost, and are used if
                # they come.
                sender.intervals.append(_Interval(0, seq - 1, now_s, reported=True))
            return Arrival.NEW
        if seq > sender.newest:
            if seq > sender.newest + 1:
                sender.intervals.append(_Interval(sender.newest + 1, seq - 1, now_s, reported=False))
            sender.newest = seq
            return Arrival.NEW
        return Arrival.LATE if _fill(sender, seq) else Arrival.REPEATED

    def gaps(self, now_s: float) -> list[Gap]:
        """The gaps that are due to be reported; each is returned once."""
        found = []
        for host, boots in self._hosts.items():
            for boot, sender in boots.items():
                missing = 0
                surplus = len(sender.intervals) - INTERVALS_MAX
                for index, interval in enumerate(sender.intervals):
                    if not interval.reported and (index < surplus or now_s - interval.since_s >= GAP_WAIT_S):
                        interval.reported = True
                        missing += interval.last - interval.first + 1
                if surplus > 0:
                    del sender.intervals[:surplus]
                if missing:
                    found.append(Gap(host, boot, missing))
        return found

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            host: {
                boot: [sender.newest, [[i.first, i.last, i.since_s, i.reported] for i in sender.intervals]]
                for boot, sender in boots.items()
            }
            for host, boots in self._hosts.items()
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` gave."""
        self._hosts = {
            host: {
                boot: _Sender(newest, [_Interval(*interval) for interval in intervals])
                for boot, (newest, intervals) in boots.items()
            }
            for host, boots in state.items()
        }


def _fill(sender: _Sender, seq: int) -> bool:
    for index, interval in enumerate(sender.intervals):
        if interval.first <= seq <= interval.last:
            rest = [
                _Interval(interval.first, seq - 1, interval.since_s, interval.reported),
                _Interval(seq + 1, interval.last, interval.since_s, interval.reported),
            ]
            sender.intervals[index : index + 1] = [part for part in rest if part.first <= part.last]
            return True
    return False
