"""The log of telemetry as a table of the store. It has one partition, which one stream process reads.

More telemetry than one process can read needs Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import READ_BYTES_MAX, Entry, Record
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import DeadLetter, LogPartition, LogRecord

PARTITION: Final = 0
"""The only partition."""


class SqlLog:
    """Appends to, reads and trims the table. Thread-safe; no transaction is longer than one append."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def append(self, entries: Sequence[Entry]) -> None:
        """Append in order, in one transaction: all entries are durable when this returns, and none if it raises.

        Raises:
            StoreBusyError: the store is busy; try again with the same entries.
        """
        with write(self._engine, first=True) as connection:
            now = self._clock.unix_ns()
            first = _reserve(connection, len(entries))
            rows = [
                {
                    "partition": PARTITION,
                    "position": first + index,
                    "key": entry.key,
                    "value": entry.value,
                    "appended_unix_ns": now,
                }
                for index, entry in enumerate(entries)
            ]
            if rows:
                connection.execute(insert(LogRecord), rows)

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:  # noqa: ARG002
        """Up to `limit` records and `READ_BYTES_MAX` from `position` on, in order; `wait_s` has no effect here."""
        query = (
            select(LogRecord.__table__)
            .where(LogRecord.partition == partition, LogRecord.position >= position)
            .order_by(LogRecord.position)
            .limit(limit)
        )
        records: list[Record] = []
        total = 0
        # Rows are fetched 64 at a time, so that few values are read beyond READ_BYTES_MAX.
        with read(self._engine) as connection, connection.execution_options(yield_per=64).execute(query) as rows:
            for row in rows:
                total += len(row.value)
                if records and total > READ_BYTES_MAX:
                    break
                records.append(Record(*row))
        return records

    def end(self, partition: int) -> int:
        """The position that the next record will have."""
        with read(self._engine) as connection:
            return connection.scalar(select(LogPartition.next_position).filter_by(partition=partition)) or 0

    def begin(self, partition: int) -> int:
        """The position of the oldest record kept; `end` if there is none."""
        with read(self._engine) as connection:
            oldest = connection.scalar(select(func.min(LogRecord.position)).filter_by(partition=partition))
        return self.end(partition) if oldest is None else oldest

    def trim(self, partition: int, before: int, limit: int) -> int:
        """Remove up to `limit` of the oldest records with positions below `before`; returns how many."""
        with write(self._engine) as connection:
            oldest = connection.scalar(select(func.min(LogRecord.position)).filter_by(partition=partition))
            if oldest is None or oldest >= before:
                return 0
            stop = min(before, oldest + limit)  # positions are consecutive, so this limits the rows
            gone = delete(LogRecord).where(LogRecord.partition == partition, LogRecord.position < stop)
            return connection.execute(gone).rowcount


def _reserve(connection: Connection, count: int) -> int:
    """Reserve `count` positions; returns the first. The row is locked until the commit, so readers see no gap fill."""
    taken = update(LogPartition).where(LogPartition.partition == PARTITION)
    taken = taken.values(next_position=LogPartition.next_position + count)
    after: int | None = connection.scalar(taken.returning(LogPartition.next_position))
    if after is None:
        connection.execute(insert(LogPartition).values(partition=PARTITION, next_position=count))
        return 0
    return after - count


VALUE_BYTES_MAX: Final = 64 * 1024
"""Bytes kept of each value, which is enough to see what it was."""

ROWS_MAX: Final = 2_000
"""The newest are kept: 2,000 x 64 KB = 128 MB at most, so that invalid data cannot fill the disk."""


def keep(connection: Connection, source: str, reason: str, detail: str, value: bytes, at_unix_ns: int) -> None:
    """Store one dead letter, and delete the oldest beyond `ROWS_MAX`.

    Args:
        connection: of a write transaction.
        source: who refused it: api or stream.
        reason: one of `telemetry.envelope.Reason`, for counting.
        detail: one sentence for a person.
        value: the record as it came; cut at `VALUE_BYTES_MAX`.
        at_unix_ns: when it was refused.
    """
    connection.execute(
        insert(DeadLetter).values(
            source=source, reason=reason, detail=detail, value=value[:VALUE_BYTES_MAX], at_unix_ns=at_unix_ns
        )
    )
    newest = connection.scalar(select(func.max(DeadLetter.id))) or 0
    connection.execute(delete(DeadLetter).where(DeadLetter.id <= newest - ROWS_MAX))
