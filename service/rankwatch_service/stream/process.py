"""A process that streams: the partitions that are its own at the time, each with a stream of its own, in turns.

Whose a partition is others decide (`Source`); that only one process commits to it the store decides (`stream.commit`).
A stream that fails ends alone: it is begun anew from what is committed, after a pause, and the others go on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import structlog
from sqlalchemy import Engine

from rankwatch_service.clock import Clock
from rankwatch_service.log.base import LogError
from rankwatch_service.log.control_log import ControlTail
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.errors import StoreBusyError
from rankwatch_service.stream.commit import FencedError
from rankwatch_service.stream.loop import RECORDS_MAX, Started, Stream
from rankwatch_service.stream.status import Counts, PartitionReport, Reporter

RETRY_S: Final = 1.0
RETRY_S_MAX: Final = 30.0
"""Before a stream that failed is begun anew; doubled from failure to failure."""

FENCED_S: Final = 5.0
"""Before a partition that another process took is claimed again: a heartbeat fits in, and tells whether it is ours."""

SAVE_S: Final = 0.25
"""Between looks at which jobs are due for a snapshot."""

REPORT_S: Final = 5.0
"""Between reports. They are for people: a partition whose report is older than 15 s has no owner that lives."""

_log = structlog.get_logger(__name__)


class Stop:
    """Set by a signal; the loop ends after the batch it is in."""

    def __init__(self) -> None:
        self.asked = False

    def ask(self, _number: int = 0, _frame: object = None) -> None:
        """As a signal handler or by hand."""
        self.asked = True


class Source(Protocol):
    """Where partitions and their records come from."""

    sole: bool
    """Every partition is meant for this process alone: losing one is an error, and the process ends."""

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that are ours, as far as is known."""
        ...

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """Take up what came; where `idle`, wait a little for anything to do. Returns whether the store has changed.

        Raises:
            LogError: nothing can be read now.
        """
        ...

    def end(self, partition: int, position: int) -> int:
        """Where the partition ends, as far as is known; `position` where it is not."""
        ...

    def processed(self, positions: Mapping[int, int]) -> None:
        """Committed up to these positions, for others to see."""
        ...

    @property
    def counts(self) -> Mapping[str, int]:
        """Counts of its own, by name."""
        ...

    def lost(self, partition: int) -> int:
        """Records of a partition that were gone before they could be read."""
        ...

    def close(self) -> None:
        """Let go of the partitions."""
        ...


@dataclass(slots=True)
class _Slot:
    """One partition of ours."""

    stream: Stream | None = None
    begin_s: float = float("-inf")
    """When to begin, at the earliest."""
    failures: int = 0
    saved_s: float = 0.0
    lost_at_start: int = 0


class Member:
    """Keeps the streams of its partitions going. For one thread."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        controls: ControlTail,
        clock: Clock,
        make_stream: Callable[[int], Stream],
    ) -> None:
        """Nothing is read yet.

        Args:
            engine: the store.
            source: where partitions come from.
            controls: the newest control records, for all streams of the process.
            clock: for durations and reports.
            make_stream: makes the stream of a partition, not started.
        """
        self.counts = Counts()
        self._engine = engine
        self._source = source
        self._controls = controls
        self._clock = clock
        self._make_stream = make_stream
        self._slots: dict[int, _Slot] = {}
        self._reporter = Reporter(engine, clock, f"{socket.gethostname()}:{os.getpid()}")
        self._reported_s = float("-inf")

    def run(self, stop: Stop) -> None:
        """Go on until asked to stop, then save everything.

        Raises:
            FencedError: another process took a partition that is ours alone.
        """
        while not stop.asked:
            try:
                self._run(stop)
            except (FencedError, KeyboardInterrupt):
                raise
            except Exception:  # noqa: BLE001 - told, and gone on
                # The store does not answer. Streams whose own commits did not fail are as they were.
                _log.exception("member_failed")
                self.counts.restarts += 1
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
            self.counts.away += 1
            _log.warning("log_away", error=str(error))
            self._clock.sleep(RETRY_S)
            return True

    def _follow_assignment(self) -> None:
        assigned = self._source.assigned
        if assigned == self._slots.keys():
            return
        for partition in self._slots.keys() - assigned:
            _log.info("partition_left", partition=partition)
            del self._slots[partition]
        for partition in sorted(assigned - self._slots.keys()):
            self._slots[partition] = _Slot()

    def _turn(self, partition: int, slot: _Slot) -> bool:
        """One batch of one partition; True if there is more at hand."""
        now_s = self._clock.monotonic_s()
        if slot.stream is None and now_s < slot.begin_s:
            return False
        try:
            if slot.stream is None:
                stream = self._make_stream(partition)
                started = stream.start()
                _say(partition, started)
                slot.stream, slot.lost_at_start = stream, slot.lost_at_start + started.lost_records
            done = slot.stream.step()
            if now_s - slot.saved_s >= SAVE_S:
                slot.saved_s = now_s
                slot.stream.save_due()
            slot.failures = 0
        except FencedError:
            self.counts.fenced += 1
            slot.stream, slot.begin_s = None, now_s + FENCED_S
            _log.warning("partition_fenced", partition=partition)
            if self._source.sole:
                raise
            return False
        except Exception:  # noqa: BLE001 - told, and begun anew
            # Whether the last batch was committed is not known: a new start finds out.
            _log.exception("stream_failed", partition=partition)
            self.counts.restarts += 1
            slot.stream = None
            slot.begin_s = self._clock.monotonic_s() + min(RETRY_S * 2**slot.failures, RETRY_S_MAX)
            slot.failures = min(slot.failures + 1, 10)
            return False
        return done >= RECORDS_MAX

    def _now_and_then(self) -> None:
        now_s = self._clock.monotonic_s()
        try:
            if now_s - self._reported_s >= REPORT_S:
                self._reported_s = now_s
                self._report()
        except StoreBusyError as error:
            _log.warning("not_reported", error=str(error))

    def _report(self) -> None:
        reports, positions = [], {}
        for partition, slot in self._slots.items():
            if slot.stream is None:
                continue
            position = positions[partition] = slot.stream.partition.place.position
            lost = slot.lost_at_start + self._source.lost(partition)
            end = max(self._source.end(partition, position), position)
            now_ns = slot.stream.partition.now_ns
            reports.append(PartitionReport(partition, slot.stream.epoch, position, end, now_ns, lost))
        self._source.processed(positions)
        self._reporter.report(reports, self.counts, self._source.counts)

    def _close(self) -> None:
        for partition, slot in self._slots.items():
            if slot.stream is None:
                continue
            try:
                slot.stream.close()
            except Exception:  # noqa: BLE001 - snapshots make the next start quick, and decide nothing
                _log.exception("not_saved", partition=partition)
        self._source.close()


def _say(partition: int, started: Started) -> None:
    _log.info("stream_starts", partition=partition, records=started.replayed_records, ticks=started.replayed_ticks)
    if started.lost_records or started.is_new_log:
        _log.error(
            "records_lost", partition=partition, lost_records=started.lost_records, is_new_log=started.is_new_log
        )
    for job in started.jobs_without_snapshot:
        _log.warning("job_without_snapshot", job=job)
    for job, names in started.detectors_without_snapshot.items():
        _log.warning("detectors_without_snapshot", job=job, detectors=names)
