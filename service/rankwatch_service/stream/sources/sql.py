"""The log in the store as a source: one partition, which one process reads alone."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Engine

from rankwatch_service.clock import Clock
from rankwatch_service.log.sql_log import PARTITION, SqlLog
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.stream.ownership import FencedError

POLL_S: Final = 0.01
"""Between checks for a change of the store while it is idle; a check takes 3 us."""

IDLE_S: Final = 0.25
"""Longest wait: a tick is at most this late."""

TRIM_RECORDS: Final = 1_000
"""Records removed in one transaction, so that other writers do not wait for long."""


class SqlSource(SqlLog):
    """A `Source` over the log in the store."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        super().__init__(engine, clock)
        self._trimmed = 0

    @property
    def partitions(self) -> int:
        """Always 1."""
        return 1

    def partition_of(self, key: str) -> int:  # noqa: ARG002
        """The only partition."""
        return PARTITION

    @property
    def assigned(self) -> frozenset[int]:
        """The only partition."""
        return frozenset({PARTITION})

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """If `idle`, wait until the store changes, for `IDLE_S` at most; returns whether it has."""
        deadline_s = self._clock.monotonic_s() + IDLE_S
        while not (changed := changes.changed()) and idle and self._clock.monotonic_s() < deadline_s:
            self._clock.sleep(POLL_S)
        return changed

    def drained(self, partition: int, position: int) -> bool:
        """Whether no record is at `position` or after it."""
        return position >= self.end(partition)

    def last_known_end(self, partition: int) -> int:
        """The position that the next record will have."""
        return self.end(partition)

    def processed(self, partition: int, committed: int, needed: int) -> None:  # noqa: ARG002
        """Remove the records that no start needs any more."""
        if needed <= self._trimmed:
            return
        while self.trim(partition, needed, TRIM_RECORDS):
            pass
        self._trimmed = needed

    def fenced(self, partition: int) -> None:
        """Raise: the log in the store has one reader, and another process is the reader now.

        Raises:
            FencedError: always.
        """
        raise FencedError(f"another stream process reads the log in the store (partition {partition}); this one ends")
