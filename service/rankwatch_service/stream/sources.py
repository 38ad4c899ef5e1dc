"""The source of telemetry of a stream process: the log in the store, or a topic of Kafka (`stream.kafka_source`).

The log in the store as a source: one partition, which one process reads alone.
"""

from __future__ import annotations

from typing import Final, Protocol

from sqlalchemy import Engine

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Record
from rankwatch_service.log.sql_log import PARTITION, SqlLog
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.stream.saved import FencedError


class Source(Protocol):
    """Partitions of telemetry, numbered from 0, with positions that only grow. For one thread.

    All records of a job are in one partition, in the order in which they were appended. A record that has a position is
    durable, and no record with a smaller position appears later.
    """

    @property
    def partitions(self) -> int:
        """Number of partitions.

        Raises:
            LogError: nothing can be read now.
        """
        ...

    def partition_of(self, key: str) -> int:
        """The partition that holds the records of `key`."""
        ...

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that this process should read, as far as is known."""
        ...

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """Receive what has arrived. If `idle`, wait a fraction of a second for records or for a change of the store.

        Returns:
            Whether the store has changed.

        Raises:
            LogError: nothing can be read now.
        """
        ...

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        """Up to `limit` records from `position` on, in order; fewer than exist if they are large (`READ_BYTES_MAX`).

        Positions may be missing: those records were removed. An empty list means that nothing has arrived yet;
        `drained` says whether the partition has more.

        Args:
            partition: whose records.
            position: of the first record.
            limit: records at most.
            wait_s: how long to wait for records that exist and have not arrived yet.

        Raises:
            LogError: the partition cannot be read now, or it is another log than before.
        """
        ...

    def drained(self, partition: int, position: int) -> bool:
        """Whether the source knows, as of a few seconds ago at most, that no record is at `position` or after it."""
        ...

    def begin(self, partition: int) -> int:
        """The position of the oldest record; `end` if there is none.

        Raises:
            LogError: the log does not answer.
        """
        ...

    def end(self, partition: int) -> int:
        """The position that the next record will have, or more.

        Raises:
            LogError: the log does not answer.
        """
        ...

    def last_known_end(self, partition: int) -> int:
        """The `end` that was last known, without asking the log; 0 before the first answer."""
        ...

    def processed(self, partition: int, committed: int, needed: int) -> None:
        """Take note of how far a partition is processed.

        Args:
            partition: which one.
            committed: everything before this position is processed and committed.
            needed: no start needs a record before this position.
        """
        ...

    def fenced(self, partition: int) -> None:
        """Note that another process has taken over a partition that is assigned to this one.

        Raises:
            FencedError: this form has one reader only, so the process must end.
        """
        ...


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
