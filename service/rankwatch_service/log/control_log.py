"""The control log: whatever decides and is not telemetry, in one sequence for all jobs.

It lies in the store whatever the telemetry's log is, so that a record commits with the row it explains. One sequence,
not one for each partition: who appends need not know how many partitions there are, and what concerns all jobs is one
record. It reaches stream through ticks alone (`stream.loop`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final, Protocol

from sqlalchemy import Connection, Engine, delete, func, insert, select, update

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import Entry
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import ControlEnd, ControlRecord

_ROW: Final = 0
"""Of `control_end`: the one that the migration made."""


TAIL_MAX: Final = 1_000
"""Control records kept in memory: 0.5 MB. What lies further back is read from the store."""


@dataclass(frozen=True, slots=True)
class Control:
    """A control record with its place. The key is a job's name, or `ALL_JOBS`; the value a `ControlRecord` as JSON."""

    position: int
    key: str
    value: bytes
    appended_unix_ns: int


class Controls(Protocol):
    """Where control records are read from."""

    def read(self, position: int, limit: int) -> list[Control]:
        """Up to `limit` records from `position` on, in order; positions may be missing (trimmed)."""
        ...


class ControlLog:
    """Control records by position. Thread-safe."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock

    def append_in(self, connection: Connection, entries: Sequence[Entry]) -> None:
        """Append as part of a writing transaction of the store: they exist if and only if it commits."""
        first = _reserve(connection, len(entries))
        now = self._clock.unix_ns()
        rows = [
            {"position": first + index, "key": entry.key, "value": entry.value, "appended_unix_ns": now}
            for index, entry in enumerate(entries)
        ]
        if rows:
            connection.execute(insert(ControlRecord), rows)

    def read(self, position: int, limit: int) -> list[Control]:
        """Up to `limit` records from `position` on, in order; positions may be missing (trimmed)."""
        query = select(ControlRecord.__table__).where(ControlRecord.position >= position)
        with read(self._engine) as connection:
            return [Control(*row) for row in connection.execute(query.order_by(ControlRecord.position).limit(limit))]

    def begin(self) -> int:
        """The position of the oldest record kept; `end` where there is none."""
        with read(self._engine) as connection:
            oldest = connection.scalar(select(func.min(ControlRecord.position)))
        return self.end() if oldest is None else oldest

    def end(self) -> int:
        """The position that the next record will have."""
        with read(self._engine) as connection:
            position: int = connection.execute(select(ControlEnd.next_position)).scalar_one()
        return position


class ControlTail:
    """The newest control records in memory, for the many partitions of one process. Not thread-safe."""

    def __init__(self, log: ControlLog) -> None:
        self._log = log
        self._begin = self._end = -1
        self._records: deque[Control] = deque()

    def refresh(self) -> None:
        """Take up what was appended since the last time."""
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
        """As `ControlLog.read`, without asking the store for what is at hand."""
        if position < self._begin or self._begin < 0:
            return self._log.read(position, limit)
        if position >= self._end:
            return []
        return list(islice((record for record in self._records if record.position >= position), limit))


def trim(connection: Connection, before: int, limit: int) -> int:
    """Forget up to `limit` of the oldest records below `before`, in a writing transaction; returns how many went."""
    oldest = connection.scalar(select(func.min(ControlRecord.position)))
    if oldest is None or oldest >= before:
        return 0
    return connection.execute(
        delete(ControlRecord).where(ControlRecord.position < min(before, oldest + limit))
    ).rowcount


def _reserve(connection: Connection, count: int) -> int:
    """Take `count` positions. The updated row stays locked until the commit, so positions commit in their order."""
    taken = update(ControlEnd).where(ControlEnd.id == _ROW).values(next_position=ControlEnd.next_position + count)
    after: int = connection.execute(taken.returning(ControlEnd.next_position)).scalar_one()
    return after - count
