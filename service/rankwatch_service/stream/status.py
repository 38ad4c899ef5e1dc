"""The status of a stream process and its partitions, for metrics and people. No decision depends on it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from sqlalchemy import Engine, delete

from rankwatch_service.clock import Clock
from rankwatch_service.store.engine import write_aside
from rankwatch_service.store.models import StreamProcess, StreamReport
from rankwatch_service.store.upsert import upsert

FORGET_S: Final = 24 * 3_600.0
"""Older reports of processes and partitions are deleted."""


def new_counts() -> Counter[str]:
    """The counters of one process, by name; its source adds names of its own.

    `restarts`: how often a stream, or the whole loop, was restarted after a failure; `fenced`: how often a commit found
    that another process had taken the partition over; `away`: how often the source did not answer.
    """
    return Counter(restarts=0, fenced=0, away=0)


@dataclass(frozen=True, slots=True)
class PartitionReport:
    """The status of one partition: a row of the table `stream_report`.

    `end` is the position that the next record of the log will have, as far as is known; `position` is what is processed
    up to. `tick_unix_ns` is stream time.
    """

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

    def report(self, partitions: Sequence[PartitionReport], counts: Mapping[str, int]) -> None:
        """Replace this process's last report, in one transaction."""
        now = self._clock.unix_ns()
        said = {"owner": self._owner, "at_unix_ns": now}
        process = said | {"started_unix_ns": self._started_unix_ns, "counters": dict(counts)}
        # Sorted, because processes that report at once must lock rows in the same order (`write_aside`).
        rows = [said | asdict(partition) for partition in sorted(partitions, key=lambda report: report.partition)]
        old = now - int(FORGET_S * 1e9)
        with write_aside(self._engine) as connection:
            connection.execute(upsert(connection, StreamProcess, process), process)
            if rows:
                connection.execute(upsert(connection, StreamReport, rows[0]), rows)
            for model in (StreamProcess, StreamReport):
                connection.execute(delete(model).where(model.at_unix_ns < old))
