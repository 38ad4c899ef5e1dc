"""When a partition ticks, and which control records come with each tick. Reads no clock: times are arguments."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Final

from rankwatch_service.job.effects import Effects
from rankwatch_service.log.base import Control, Controls, Record
from rankwatch_service.stream.partition import TICK_S, Partition
from rankwatch_service.stream.place import StoredTick

CONTROLS_MAX: Final = 1_000
"""Control records read at once. People and orders make few; a start may find those of a day."""


class Ticker:
    """Ticks a partition between its records. New ticks are appended to the caller's lists; the caller stores them."""

    def __init__(self, partition: Partition, controls: Controls, concerns: Callable[[Control], bool]) -> None:
        """Read nothing yet. `concerns`: whether a control record is applied in this partition."""
        self._partition = partition
        self._controls = controls
        self._concerns = concerns
        self._waiting: list[Control] = []
        """Control records that are read and not applied yet."""
        self._read_to = 0

    def go_on_at(self, control_position: int) -> None:
        """Read control records from this position on."""
        self._waiting, self._read_to = [], control_position

    def read_controls(self) -> None:
        """Read the control records that were appended since the last call."""
        found = self._controls.read(self._read_to, CONTROLS_MAX)
        if found:
            self._read_to = found[-1].position + 1
            self._waiting += [control for control in found if self._concerns(control)]

    def tick_before(self, record: Record, ticks: list[StoredTick], effects: Effects) -> None:
        """Tick up to a record: with each control record that was appended before it, and once a second."""
        at = record.appended_unix_ns
        while self._waiting and self._waiting[0].appended_unix_ns <= at:
            self._tick(self._waiting[0].appended_unix_ns, record.position, ticks, effects)
        if at - self._partition.now_ns >= TICK_S * 1e9:
            self._tick(at, record.position, ticks, effects)

    def next_unix_ns(self) -> int:
        """The time of the next tick: `tick_before` has nothing to do for a record that was appended before it."""
        due = self._partition.now_ns + int(TICK_S * 1e9)
        return min(due, self._waiting[0].appended_unix_ns) if self._waiting else due

    def tick_now(self, now_unix_ns: int, ticks: list[StoredTick], effects: Effects) -> None:
        """Tick while no record waits: control records are applied at once, whatever time they carry."""
        needs_ticks = self._partition.has_active_jobs or not self._partition.now_ns
        due = needs_ticks and now_unix_ns - self._partition.now_ns >= TICK_S * 1e9
        if self._waiting or due:
            # The api that appended them may run on a host whose clock is ahead of this one's.
            latest = max((control.appended_unix_ns for control in self._waiting), default=now_unix_ns)
            self._tick(max(now_unix_ns, latest), self._partition.place.position, ticks, effects)

    def _tick(self, time_unix_ns: int, position: int, ticks: list[StoredTick], effects: Effects) -> None:
        taken = list(takewhile(lambda control: control.appended_unix_ns <= time_unix_ns, self._waiting))
        self._waiting = self._waiting[len(taken) :]
        control_position = self._waiting[0].position if self._waiting else self._read_to
        tick = StoredTick(self._partition.place.tick_number + 1, position, control_position, time_unix_ns)
        ticks.append(tick)
        self._partition.tick(tick, taken, effects)
