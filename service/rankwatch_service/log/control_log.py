"""The control log: what people, policy and orders decide, in one sequence for all jobs.

It is always in the store, also with Kafka, so that a record commits in the same transaction as the row that it
explains. There is one sequence for all partitions: the api need not know how many there are, and what concerns all jobs
is one record. The stream applies control records with its ticks (`stream.partition.Ticker`). See decision 0009.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Control, Entry
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import ControlEnd, ControlRecord

_ROW: Final = 0
"""The only row of `control_end`; a migration inserts it."""

TAIL_MAX: Final = 1_000
"""Control records kept in memory: 0.5 MB. Older ones are read from the store."""


class ControlLog:
    """Control records by position. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def append_in(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Append in the caller's write transaction: the records exist if and only if it commits."""
        first = _reserve(connection, len(entries))
        now = self._clock.unix_ns()
        rows = [
            {"position": first + index, "key": entry.key, "value": entry.value, "appended_unix_ns": now}
            for index, entry in enumerate(entries)
        ]
        if rows:
            connection.execute(insert(ControlRecord), rows)

    def read(self, position: int, limit: int) -> list[Control]:
        """Up to `limit` records from `position` on, in order; positions may be missing: those records were removed."""
        query = select(ControlRecord.__table__).where(ControlRecord.position >= position)
        with read(self._engine) as connection:
            return [Control(*row) for row in connection.execute(query.order_by(ControlRecord.position).limit(limit))]

    def begin(self) -> int:
        """The position of the oldest record kept; `end` if there is none."""
        with read(self._engine) as connection:
            oldest = connection.scalar(select(func.min(ControlRecord.position)))
        return self.end() if oldest is None else oldest

    def end(self) -> int:
        """The position that the next record will have."""
        with read(self._engine) as connection:
            position: int = connection.execute(select(ControlEnd.next_position)).scalar_one()
        return position


class ControlTail:
    """Keeps the newest control records in memory, for all partitions of one process. Not thread-safe."""

    def __init__(self, log: ControlLog) -> None:
        self._log = log
        self._begin = self._end = -1
        self._records: deque[Control] = deque()

    def refresh(self) -> None:
        """Read the records that were appended since the last call; the first call begins at the end of the log."""
        if self._begin < 0:
            self._begin = self._end = self._log.end()
        while found := self._log.read(self._end, TAIL_MAX):
            self._end = found[-1].position + 1
            self._records.extend(found)
            while len(self._records) > TAIL_MAX:
                self._begin = self._records.popleft().position + 1
            if len(found) < TAIL_MAX:
                break

    def read(self, position: int, limit: int) -> list[Control]:
        """As `ControlLog.read`, up to the last `refresh`; records in memory cost no query."""
        if position < self._begin or self._begin < 0:
            return self._log.read(position, limit)
        if position >= self._end:
            return []
        return list(islice((record for record in self._records if record.position >= position), limit))


def trim(connection: Connection, before: int, limit: int) -> int:
    """Remove up to `limit` of the oldest records below `before`, in a write transaction; returns how many."""
    oldest = connection.scalar(select(func.min(ControlRecord.position)))
    if oldest is None or oldest >= before:
        return 0
    # Positions are consecutive, so a range of positions limits the rows without counting them.
    return connection.execute(
        delete(ControlRecord).where(ControlRecord.position < min(before, oldest + limit))
    ).rowcount


def _reserve(connection: Connection, count: int) -> int:
    """Reserve `count` positions; returns the first. The row is locked until the commit, so readers see no gap fill."""
    taken = update(ControlEnd).where(ControlEnd.id == _ROW).values(next_position=ControlEnd.next_position + count)
    after: int = connection.execute(taken.returning(ControlEnd.next_position)).scalar_one()
    return after - count
