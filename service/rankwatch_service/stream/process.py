"""A stream process: runs one stream for each partition that is assigned to it, in turns, and reports on them.

The source says which partitions those are; the store lets only one process commit to each (`stream.saved`).
A stream that fails is dropped alone: it is started again from what is committed, after a pause, and the others go on.
"""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import structlog
from sqlalchemy import Engine, delete

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import LogError
from rankwatch_service.log.control_log import ControlTail
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import upsert, write_aside
from rankwatch_service.store.errors import StoreBusyError
from rankwatch_service.store.models import StreamProcess as ProcessRow
from rankwatch_service.store.models import StreamReport
from rankwatch_service.stream.loop import RECORDS_MAX, Started, Stream
from rankwatch_service.stream.saved import FencedError
from rankwatch_service.stream.sources import Source

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
            connection.execute(upsert(connection, ProcessRow, process), process)
            if rows:
                connection.execute(upsert(connection, StreamReport, rows[0]), rows)
            for model in (ProcessRow, StreamReport):
                connection.execute(delete(model).where(model.at_unix_ns < old))


RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
"""Pause before a stream that failed is started again: doubled from failure to failure, up to RETRY_S_MAX."""

SAVE_S: Final = 0.25
"""Between checks of which jobs are due for a snapshot."""

REPORT_S: Final = 5.0
"""Between reports. They are for people: a partition whose report is older than 15 s has no process."""

_log = structlog.get_logger(__name__)


class Stop:
    """Set by a signal; the process ends after the batch that it is processing."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, _number: int = 0, _frame: object = None) -> None:
        """Request a stop; a signal handler."""
        self.asked = True


@dataclass(slots=True)
class _Slot:
    """One assigned partition."""

    stream: Stream | None = None
    start_s: float = float("-inf")
    """When to start a stream, at the earliest."""
    failures: int = 0
    saved_s: float = 0.0
    lost_records: int = 0


class StreamProcess:
    """Runs the streams of the assigned partitions. For one thread."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        controls: ControlTail,
        clock: Clock,
        make_stream: Callable[[int], Stream],
        counts: Counter[str],
    ) -> None:
        """Nothing is read yet.

        Args:
            engine: the store.
            source: of partitions and their records.
            controls: the newest control records, for all streams of the process.
            clock: for durations and reports.
            make_stream: makes the stream of a partition, not started.
            counts: counters of this process (`new_counts`).
        """
        self.counts = counts
        self._engine = engine
        self._source = source
        self._controls = controls
        self._clock = clock
        self._make_stream = make_stream
        self._slots: dict[int, _Slot] = {}
        self._reporter = Reporter(engine, clock, f"{socket.gethostname()}:{os.getpid()}")
        self._reported_s = float("-inf")

    def run(self, stop: Stop) -> None:
        """Run until asked to stop, then save everything.

        Raises:
            FencedError: another process took a partition over, and this source allows only one process.
        """
        while not stop.asked:
            try:
                self._run(stop)
            except (FencedError, KeyboardInterrupt):
                raise
            except Exception:  # noqa: BLE001 - logged, and tried again
                # The store does not answer. Streams are kept: each is dropped by a failure of its own (`_turn`).
                _log.exception("stream_process_failed")
                self.counts["restarts"] += 1
                self._clock.sleep(RETRY_S)
        self._close()

    def _run(self, stop: Stop) -> None:
        changes, busy = ChangeWatch(self._engine), False
        try:
            while not stop.asked:
                if self._wait(not busy, changes):
                    self._controls.refresh()
                self._follow_assignment()
                busy = False
                for partition, slot in list(self._slots.items()):
                    busy |= self._turn(partition, slot)
                self._now_and_then()
        finally:
            changes.close()

    def _wait(self, idle: bool, changes: ChangeWatch) -> bool:
        try:
            return self._source.wait(idle, changes)
        except LogError as error:
            self.counts["away"] += 1
            _log.warning("source_away", error=str(error))
            self._clock.sleep(RETRY_S)
            return True  # whether the store has changed is not known, so control records are read

    def _follow_assignment(self) -> None:
        assigned = self._source.assigned
        if assigned == self._slots.keys():
            return
        for partition in self._slots.keys() - assigned:
            _log.info("partition_unassigned", partition=partition)
            del self._slots[partition]
        for partition in sorted(assigned - self._slots.keys()):
            self._slots[partition] = _Slot()

    def _turn(self, partition: int, slot: _Slot) -> bool:
        """Process one batch of one partition; returns whether more records may be at hand."""
        now_s = self._clock.monotonic_s()
        if slot.stream is None and now_s < slot.start_s:
            return False
        try:
            slot.stream = slot.stream or self._started(partition)
            done = slot.stream.step()
            self._count_lost(slot, slot.stream.take_lost())
            if now_s - slot.saved_s >= SAVE_S:
                slot.saved_s = now_s
                slot.stream.save_due()
            slot.failures = 0
        except FencedError:
            self.counts["fenced"] += 1
            slot.stream = None
            _log.warning("partition_fenced", partition=partition)
            self._source.fenced(partition)
            return False
        except Exception:  # noqa: BLE001 - logged, and started again
            # It is not known whether the last batch was committed; the next start reads what is.
            _log.exception("stream_failed", partition=partition)
            self.counts["restarts"] += 1
            slot.stream = None
            slot.start_s = self._clock.monotonic_s() + min(RETRY_S * 2**slot.failures, RETRY_S_MAX)
            slot.failures = min(slot.failures + 1, 10)  # the pause is at its maximum long before; 2**n stays small
            return False
        return done >= RECORDS_MAX

    def _count_lost(self, slot: _Slot, records: int) -> None:
        slot.lost_records += records
        self.counts["lost_records"] += records

    def _started(self, partition: int) -> Stream:
        stream = self._make_stream(partition)
        _log_start(partition, stream.start())
        return stream

    def _now_and_then(self) -> None:
        now_s = self._clock.monotonic_s()
        try:
            if now_s - self._reported_s >= REPORT_S:
                self._reported_s = now_s
                self._report()
        except StoreBusyError as error:
            _log.warning("not_reported", error=str(error))

    def _report(self) -> None:
        reports = []
        for partition, slot in self._slots.items():
            if slot.stream is None:
                continue
            position = slot.stream.partition.offsets.position
            end = max(self._source.last_known_end(partition), position)
            now_ns = slot.stream.partition.now_ns
            reports.append(PartitionReport(partition, slot.stream.epoch, position, end, now_ns, slot.lost_records))
        self._reporter.report(reports, self.counts)

    def _close(self) -> None:
        for partition, slot in self._slots.items():
            if slot.stream is None:
                continue
            try:
                slot.stream.close()
            except Exception:  # noqa: BLE001 - a snapshot only makes the next start quick
                _log.exception("not_saved", partition=partition)


def _log_start(partition: int, started: Started) -> None:
    _log.info("stream_started", partition=partition, records=started.replayed_records, ticks=started.replayed_ticks)
    if started.lost_records or started.is_new_log:
        _log.error(
            "records_lost", partition=partition, lost_records=started.lost_records, is_new_log=started.is_new_log
        )
    for job in started.jobs_without_snapshot:
        _log.warning("job_without_snapshot", job=job)
    for job, names in started.detectors_without_snapshot.items():
        _log.warning("detectors_without_snapshot", job=job, detectors=names)
