"""Replays what a partition processed between two places: the same records, ticks and control records, in that order.

Effects are discarded, because they were committed the first time. Frames go to the charts again: series are written
beside the deciding transaction, so a crash may have lost some.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from rankwatch_service.job.effects import Effects
from rankwatch_service.log.base import Control, Record
from rankwatch_service.stream.partition import Partition, together
from rankwatch_service.stream.place import StoredTick

_POSITION: Final = attrgetter("position")


@dataclass(frozen=True, slots=True)
class Past:
    """What is replayed: everything that was processed between two places."""

    records: Iterable[Sequence[Record]]
    """In order, in chunks as they were read."""
    ticks: deque[StoredTick]
    controls: deque[Control]
    """Control records that concern the partition; each comes with the first tick with a higher control position."""
    begin_unix_ns: int
    """The time before the first tick; 0 if it is not known."""
    end: int
    """Position of the first record that is not replayed."""


class Replay:
    """One replay of a partition. `run` it once."""

    def __init__(self, partition: Partition, past: Past, chart: Callable[[Effects], None]) -> None:
        self.records = 0
        """Replayed so far."""
        self.ticks = 0
        self._partition = partition
        self._past = past
        self._chart = chart

    def run(self) -> None:
        """Replay everything; frames go to the charts after each part of the records."""
        past = self._past
        self._partition.now_ns = past.begin_unix_ns or self._partition.now_ns
        for records in past.records:
            self._chunk(records)
        effects = Effects()
        while past.ticks:
            self._tick(effects)
        self._chart(effects)

    def _chunk(self, records: Sequence[Record]) -> None:
        ticks, done = self._past.ticks, 0
        while done < len(records):
            effects = Effects()
            while ticks and ticks[0].position <= records[done].position:
                self._tick(effects)
            end = ticks[0].position if ticks else self._past.end
            part = together(records[: bisect_left(records, end, key=_POSITION)], done)
            self._partition.records(part, effects)
            self._chart(effects)
            done += len(part)
        self.records += len(records)

    def _tick(self, effects: Effects) -> None:
        tick, controls = self._past.ticks.popleft(), self._past.controls
        taken = []
        while controls and controls[0].position < tick.control_position:
            taken.append(controls.popleft())
        self._partition.tick(tick, taken, effects)
        self.ticks += 1
