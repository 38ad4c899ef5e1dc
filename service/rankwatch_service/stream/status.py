"""What a stream process says about itself and its partitions, for metrics and people. Nothing is decided by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Engine, delete

from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import write_aside
from rankwatch_service.store.models import StreamProcess, StreamReport
from rankwatch_service.store.upsert import upsert

FORGET_S: Final = 24 * 3_600.0
"""Reports of processes and partitions that were not heard of for so long leave."""


@dataclass(slots=True)
class Counts:
    """What happened in a process since it began."""

    restarts: int = 0
    """Streams, or the whole loop, begun anew after a failure."""
    fenced: int = 0
    """Partitions that another process had taken over when we wanted to commit."""
    away: int = 0
    """Times that the log did not answer at all."""


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """One partition of ours: see the table `stream_report`."""

    partition: int
    epoch: int
    position: int
    end: int
    tick_unix_ns: int
    lost_records: int


class Reporter:
    """Writes reports under the name of one process."""

    def __init__(self, engine: Engine, clock: Clock, owner: str) -> None:
        self._engine = engine
        self._clock = clock
        self._owner = owner
        self._started_unix_ns = clock.unix_ns()

    def report(self, partitions: Sequence[PartitionReport], counts: Counts, of_source: Mapping[str, int]) -> None:
        """Replace what was said before, in one transaction."""
        now = self._clock.unix_ns()
        said = {"owner": self._owner, "at_unix_ns": now}
        process = said | {"started_unix_ns": self._started_unix_ns, "counters": {**asdict(counts), **of_source}}
        rows = [said | asdict(partition) for partition in sorted(partitions, key=lambda report: report.partition)]
        old = now - int(FORGET_S * 1e9)
        with write_aside(self._engine) as connection:
            connection.execute(upsert(connection, StreamProcess, process), process)
            if rows:
                connection.execute(upsert(connection, StreamReport, rows[0]), rows)
            for model in (StreamProcess, StreamReport):
                connection.execute(delete(model).where(model.at_unix_ns < old))
