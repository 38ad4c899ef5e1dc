"""The stream of one partition: read, process, commit once, go on.

After a failure a stream is dropped, and a new one starts from what is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import structlog
from sqlalchemy import Engine, select

from rankwatch_service.clock import Clock
from rankwatch_service.job.detection import MakeDetectors
from rankwatch_service.job.effects import Effects, RefusedRecord
from rankwatch_service.job.job import JobStream, Links
from rankwatch_service.log.base import Claim, Control, Controls, LogError, Offsets, Record, StoredTick
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.series.writer import SeriesSink
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Job
from rankwatch_service.stream.commit import commit, forget, resume
from rankwatch_service.stream.partition import Partition, Ticker, together
from rankwatch_service.stream.recovery import Facts, Past, Plan, Replay, plan_start
from rankwatch_service.stream.saved import (
    applied_controls,
    claim,
    idle_offsets,
    load_grants,
    load_idle_job,
    load_snapshots,
    needed_from,
    newest_settings,
    own,
    restore_from_tables,
    save_snapshot,
    store_idle_job,
    stored_ticks,
)
from rankwatch_service.stream.sources import Source
from rankwatch_service.telemetry.envelope import SecretOf, no_secrets

RECORDS_MAX: Final = 2_048
"""Records in one batch: at 20 us each 40 ms, of which the commit is a tenth."""

BATCH_S: Final = 0.2
"""Processing time after which a batch is committed, full or not, so that an incident does not wait for other jobs."""

FRAMES_BYTES: Final = 64 * 1024 * 1024
"""Closed frames after which a batch is committed, full or not, so that they are charted and their memory is free."""

SNAPSHOT_S: Final = 60.0
SNAPSHOT_ROWS: Final = 2_000_000
"""A snapshot of a job is due after this much stream time or this many rank-steps, whichever is first: a start replays
that in a few seconds."""

EVICTED_TOGETHER: Final = 256
"""Jobs evicted in one transaction: a tenth of a second."""

REPLAY_WAIT_S: Final = 10.0
"""How long a start waits for a record that the log says it has."""

_log = structlog.get_logger(__name__)


PublishRefused = Callable[[int, Sequence[RefusedRecord]], None]
"""(partition, records of it that could not be used)"""


@dataclass(frozen=True, slots=True)
class Started:
    """How a start went."""

    replayed_records: int = 0
    replayed_ticks: int = 0
    jobs_without_snapshot: tuple[str, ...] = ()
    """Jobs that had to be restored from the tables, and `ALL_JOBS` if the settings were lost."""
    detectors_without_snapshot: dict[str, list[str]] = field(default_factory=dict)
    """The detectors that begin anew because their state is of another version, by job."""
    lost_records: int = 0
    """Records that were removed from the log before they were processed."""
    is_new_log: bool = False
    """Whether the log ended before the committed position: then it is another log, and is read from its beginning."""


class Stream:
    """One partition's stream. Not thread-safe. Only the stream of a partition that started last can commit."""

    def __init__(
        self,
        engine: Engine,
        source: Source,
        controls: Controls,
        clock: Clock,
        make_detectors: MakeDetectors,
        links: Links,
        series: SeriesSink,
        partition: int = 0,
        publish_refused: PublishRefused | None = None,
        secret_of: SecretOf = no_secrets,
    ) -> None:
        """Nothing is claimed or read yet.

        Args:
            engine: the store.
            source: of telemetry.
            controls: control records.
            clock: for ticks and durations.
            make_detectors: makes the detectors of a job.
            links: pages about an incident, for notifications.
            series: gets closed frames, for charts.
            partition: of the source.
            publish_refused: gets records that could not be used, before that is committed; it must not raise.
            secret_of: the secrets of agents that have enrolled.
        """
        self._engine = engine
        self._source = source
        self._controls = controls
        self._clock = clock
        self._series = series
        self._number = partition
        self._partition = Partition(make_detectors, links, self._owns, self._load_idle, secret_of)
        self._ticker = Ticker(self._partition, controls, self._concerns_us)
        self._publish_refused = publish_refused
        self._epoch = 0
        self._needed_position = 0
        """No start needs an older record."""
        self._lost_records = 0
        self._saved_ns: dict[str, int] = {}
        self._saved: set[str] = set()
        """Jobs in memory that have a snapshot since they began or were loaded."""
        self._replay_end: Offsets | None = None
        """During a replay: where it ends."""
        self._rows: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """The epoch of this stream's claim; 0 before the start."""
        return self._epoch

    def take_lost(self) -> int:
        """How many records were removed before they could be processed, since the last call."""
        lost, self._lost_records = self._lost_records, 0
        return lost

    @property
    def partition(self) -> Partition:
        """The state of the jobs, for inspection."""
        return self._partition

    def start(self) -> Started:
        """Take over the partition and catch up with what is committed, as `stream.recovery` plans it."""
        # Committed before the facts are read: from here on the former owner can commit nothing that they lack.
        with write(self._engine) as connection:
            held = claim(connection, self._number)
        self._epoch = held.epoch
        return self._carry_out(plan_start(self._facts(held)))

    def step(self, records_max: int = RECORDS_MAX) -> int:
        """Read and process at most `records_max` records, commit what follows, and return how many there were.

        Raises:
            FencedError: another process has taken over the partition.
            Exception: the database failed. Whether the batch is committed is not known: drop this stream.
        """
        position = self._partition.offsets.position
        records = self._source.read(self._number, position, records_max)
        self._ticker.read_controls()
        effects, ticks = Effects(), list[StoredTick]()
        began_s = self._clock.monotonic_s()
        done = 0
        while (
            done < len(records)
            and self._clock.monotonic_s() - began_s <= BATCH_S
            and effects.frames_bytes <= FRAMES_BYTES
        ):
            self._ticker.tick_before(records[done], ticks, effects)
            part = _appended_before(self._ticker.next_unix_ns(), together(records, done))
            self._partition.records(part, effects)
            done += len(part)
        if done == len(records) < records_max and self._source.drained(self._number, self._partition.offsets.position):
            self._ticker.tick_now(self._clock.unix_ns(), ticks, effects)
        if done or ticks:
            self._commit(ticks, effects)
        # Positions that were passed without a record: the log removed them before they were read.
        self._count_lost(self._partition.offsets.position - position - done)
        return done

    def save_due(self) -> int:
        """Save the jobs whose snapshot is due, evict idle jobs, and remove what no start needs any more.

        Returns:
            How many snapshots were saved.

        Raises:
            FencedError: another process has taken over the partition.
        """
        self._series.flush_due()
        idle = [name for name, job in self._partition.jobs.items() if job.is_idle]
        self._evict(idle[:EVICTED_TOGETHER])
        if len(idle) > EVICTED_TOGETHER:
            return 0  # the next calls evict the rest; snapshots of idle jobs would be deleted at once
        due = [name for name in (ALL_JOBS, *self._partition.jobs) if self._is_due(name)]
        for name in due:
            self.save(name)
        if due:
            kept = needed_from(self._engine, self._number, (ALL_JOBS, *self._partition.jobs))
            if kept is not None:
                self._forget(kept)
        self._source.processed(self._number, self._partition.offsets.position, self._needed_position)
        return len(due)

    def save(self, name: str) -> None:
        """Save a snapshot of one job, or of the settings (`ALL_JOBS`).

        The series of the job are written first, because a replay from this snapshot does not bring their frames again.
        Settings are saved after every job has a snapshot: a replay begins at the settings' place at the latest, so it
        has the whole past of a job without one.

        Raises:
            FencedError: another process has taken over the partition.
        """
        if name == ALL_JOBS:
            for unsaved in self._partition.jobs.keys() - self._saved:
                self.save(unsaved)
        else:
            self._series.flush(name)
        state = self._partition.snapshot(name)
        now = self._partition.now_ns
        save_snapshot(self._engine, self._number, self._epoch, name, self._partition.offsets, state, now)
        self._saved_ns[name], self._rows[name] = now, 0
        self._saved.add(name)

    def close(self) -> None:
        """Save everything, so that the next start is quick. Do not call it after a `step` that failed."""
        for name in (*self._partition.jobs, ALL_JOBS):
            self.save(name)

    def _evict(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), EVICTED_TOGETHER):
            self._evict_together(names[first : first + EVICTED_TOGETHER])

    def _evict_together(self, names: Sequence[str]) -> None:
        offsets = self._partition.offsets
        for name in names:
            self._series.close(name)
        with write(self._engine) as connection:
            own(connection, self._number, self._epoch)
            for name in names:
                state = self._partition.snapshot(name)
                store_idle_job(connection, self._number, name, offsets, state, self._partition.now_ns)
        for name in names:
            self._partition.evict(name)
            self._unschedule(name)

    def _load_idle(self, job: JobStream) -> Offsets:
        try:
            saved = load_idle_job(self._engine, self._number, job.job)
        except ValueError as error:
            _log.error("idle_job_unreadable", job=job.job, error=str(error))
            restore_from_tables(self._engine, job)
            # The tables already have what follows from the rest of a replay.
            return self._replay_end or self._partition.offsets
        job.restore(saved.state)
        return saved.offsets

    # ---- processing ------------------------------------------------------------------------------------------------

    def _concerns_us(self, control: Control) -> bool:
        return control.key == ALL_JOBS or self._owns(control.key)

    def _owns(self, job: str) -> bool:
        return self._source.partition_of(job) == self._number

    def _commit(self, ticks: list[StoredTick], effects: Effects) -> None:
        # Before the commit: after a crash in between they are published twice; the other order could lose them.
        if effects.refused and self._publish_refused is not None:
            self._publish_refused(self._number, effects.refused)
        with write(self._engine) as connection:
            now = self._clock.unix_ns()
            commit(connection, self._number, self._epoch, self._partition.offsets, ticks, effects, now)
        for refused in effects.refused:
            _log.warning("record_refused", position=refused.position, reason=refused.reason, detail=refused.detail)
        if effects.frames_left_out:
            _log.warning("frames_not_charted", partition=self._number, frames=effects.frames_left_out)
        for job, failure in effects.failures:
            _log.error("detector_failed", job=job, detector=failure.detector, error=failure.error, off=failure.off)
        for job in effects.deleted_jobs:
            self._unschedule(job)
        self._chart(effects)

    def _unschedule(self, name: str) -> None:
        """Cancel the snapshot of a job that is no longer in memory."""
        self._saved.discard(name)
        self._saved_ns.pop(name, None)
        self._rows.pop(name, None)

    def _chart(self, effects: Effects) -> None:
        # Here, so that a replay ends a removal that a crash cut short.
        for job in effects.deleted_jobs:
            self._series.delete(job)
        for series, frame in effects.frames:
            if frame.family != "devices":
                self._rows[series] = self._rows.get(series, 0) + max(
                    (p.size for p in frame.present.values()), default=0
                )
            self._series.add(series, frame)

    def _count_lost(self, records: int) -> None:
        if records:
            before = self._partition.offsets.position
            _log.error("records_lost", partition=self._number, before=before, records=records)
            self._lost_records += records

    def _is_due(self, name: str) -> bool:
        # The first snapshots of jobs that appeared together are spread over SNAPSHOT_S, by a share from their names.
        share = (sum(name.encode()) % 16) / 16
        now = self._partition.now_ns
        since_s = (now - self._saved_ns.setdefault(name, now - int(share * SNAPSHOT_S * 1e9))) / 1e9
        return since_s >= SNAPSHOT_S or self._rows.get(name, 0) >= SNAPSHOT_ROWS

    def _forget(self, kept: Offsets) -> None:
        with write(self._engine) as connection:
            forget(connection, self._number, kept, self._source.partitions)
        self._needed_position = kept.position

    # ---- starting --------------------------------------------------------------------------------------------------

    def _facts(self, held: Claim) -> Facts:
        found, unreadable = load_snapshots(self._engine, self._number, held.offsets)
        with read(self._engine) as connection:
            names = connection.scalars(select(Job.name)).all()
        return Facts(
            claim=held,
            log_begin=self._source.begin(self._number),
            log_end=self._source.end(self._number),
            snapshots=found,
            unreadable=unreadable,
            idle=idle_offsets(self._engine, self._number),
            jobs=frozenset(name for name in names if self._owns(name)),
            newest_settings=newest_settings(self._engine),
        )

    def _carry_out(self, plan: Plan) -> Started:
        self._partition.restore(plan.snapshots, plan.idle, plan.known, load_grants(self._engine, self._number))
        self._begin_from_tables(plan.from_tables, plan.replay_to)
        self._replay_end = plan.replay_to
        replay = Replay(self._partition, self._past(plan.replay_from, plan.replay_to), self._chart)
        replay.run()
        absent = tuple(sorted(plan.from_log - self._partition.jobs.keys()))
        self._begin_from_tables(absent, plan.replay_to)
        self._replay_end = None
        self._partition.end_replay()
        self._partition.offsets = plan.resume_at
        self._ticker.go_on_at(plan.resume_at.control_position)
        self._saved_ns = {saved.job: self._partition.now_ns for saved in plan.snapshots}
        self._saved = set(self._saved_ns)
        begin_anew = {
            name: job.detectors_without_snapshot
            for name, job in self._partition.jobs.items()
            if job.detectors_without_snapshot
        }
        with write(self._engine) as connection:
            resume(connection, self._number, self._epoch, plan.resume_at.position, plan.is_new_log)
        # Jobs restored from the tables become idle jobs, so that the next start does not lose them again.
        without_snapshot = plan.from_tables + absent
        self._evict([name for name in without_snapshot if name != ALL_JOBS])
        # Only then: once this is committed, a start takes a log that begins here for complete (`plan_start`).
        with write(self._engine) as connection:
            own(connection, self._number, self._epoch, position_needed=plan.needed_position)
        for name in plan.save:
            self.save(name)
        self._needed_position, self._lost_records = plan.needed_position, plan.lost_records
        return Started(replay.records, replay.ticks, without_snapshot, begin_anew, plan.lost_records, plan.is_new_log)

    def _begin_from_tables(self, names: Iterable[str], offsets: Offsets) -> None:
        for job in self._partition.begin_without_snapshot(names, offsets):
            restore_from_tables(self._engine, job)

    def _past(self, begin: Offsets, end: Offsets) -> Past:
        ticks, since_ns = stored_ticks(self._engine, self._number, begin, end)
        controls = applied_controls(self._controls, self._concerns_us, begin, end)
        return Past(self._records(begin.position, end.position), ticks, controls, since_ns, end.position)

    def _records(self, position: int, end: int) -> Iterator[list[Record]]:
        while position < end:
            records = self._source.read(self._number, position, RECORDS_MAX, REPLAY_WAIT_S)
            if not records:
                if self._source.end(self._number) > position:
                    raise LogError(f"partition {self._number}: no record arrived from position {position} on")
                return
            position = records[-1].position + 1
            yield [record for record in records if record.position < end]


def _appended_before(time_unix_ns: int, records: Sequence[Record]) -> Sequence[Record]:
    """The records before the first one that was appended at that time or later."""
    for count, record in enumerate(records):
        if record.appended_unix_ns >= time_unix_ns:
            return records[:count]
    return records
