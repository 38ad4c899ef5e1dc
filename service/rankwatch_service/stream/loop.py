"""The stream of one partition: read, process, commit once, go on. What fails here ends this object, not the truth:
a new one starts from what is committed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from typing import Final, Protocol

import structlog
from sqlalchemy import Engine, delete, func, select, update

from rankwatch_detectors.base import Frame
from rankwatch_service.clock import Clock
from rankwatch_service.job.detection import MakeDetectors
from rankwatch_service.job.effects import Effects, Refused
from rankwatch_service.job.job import JobStream, Links
from rankwatch_service.log import control_log
from rankwatch_service.log.base import ALL_JOBS, Log, LogError, Record
from rankwatch_service.log.control_log import Control, Controls
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Job, StreamPosition, StreamTick
from rankwatch_service.stream import idle_jobs, snapshots
from rankwatch_service.stream.commit import Place, StoredTick, begin_another_log, claim, commit, own
from rankwatch_service.stream.partition import TICK_S, Partition
from rankwatch_service.stream.restore import adopt
from rankwatch_service.stream.snapshots import Saved
from rankwatch_service.stream.ticks import CONTROLS_MAX, applied_controls, stored_ticks

RECORDS_MAX: Final = 2_048
"""Records in one batch: at 20 us each 40 ms, of which the commit is a tenth."""

TOGETHER_MAX: Final = 512
"""Records handed over at once: enough to share what is done once, few enough to look at the clock between them."""

BATCH_S: Final = 0.2
"""Processing time after which a batch is committed, full or not: an incident must not wait for its neighbours."""

SNAPSHOT_S: Final = 60.0
SNAPSHOT_ROWS: Final = 2_000_000
"""A job is saved after so much stream time or so many rank-steps, whichever comes first: a start replays these in a few
seconds."""

AWAY_TOGETHER: Final = 256
"""Jobs put away in one transaction: a tenth of a second."""

TRIM_RECORDS: Final = 1_000
"""Records forgotten in one transaction."""

REPLAY_WAIT_S: Final = 10.0
"""How long a start waits for records that lie in the log."""

_POSITION: Final = attrgetter("position")

_log = structlog.get_logger(__name__)


TellRefused = Callable[[int, Sequence[Refused]], None]
"""(partition, records of it that could not be used)"""


class SeriesSink(Protocol):
    """Where closed frames go besides the detectors: the charts."""

    def add(self, job: str, frame: Frame) -> None:
        """Take up a frame; the same one may come again after a restart."""
        ...

    def flush(self, job: str) -> None:
        """Write what is held for a job."""
        ...

    def flush_due(self) -> None:
        """Write what has been held long enough."""
        ...


@dataclass(slots=True)
class Started:
    """How a start went."""

    replayed_records: int = 0
    replayed_ticks: int = 0
    cold_jobs: list[str] = field(default_factory=list)
    """Jobs without a usable snapshot whose log is gone."""
    lost_records: int = 0
    """Records behind the committed position that the log had forgotten already."""
    log_is_another: bool = False
    """The log ends before the committed position: it was made anew. It is read from its beginning."""
    cold_detectors: dict[str, list[str]] = field(default_factory=dict)
    """Detectors that begin anew, by job."""


class Stream:
    """One partition's stream. Not thread-safe. Only one owner commits; the last one that started."""

    def __init__(
        self,
        engine: Engine,
        log: Log,
        controls: Controls,
        clock: Clock,
        make_detectors: MakeDetectors,
        links: Links,
        series: SeriesSink,
        partition: int = 0,
        tell_refused: TellRefused | None = None,
    ) -> None:
        """Nothing is claimed or read yet.

        Args:
            engine: the store.
            log: telemetry.
            controls: what people and the api decide.
            clock: the only one.
            make_detectors: a new set, for each job.
            links: where receivers can read on.
            series: where closed frames go.
            partition: of the log.
            tell_refused: hears of records that could not be used, before that is committed; it must not raise.
        """
        self._engine = engine
        self._log = log
        self._controls = controls
        self._waiting: list[Control] = []
        """Control records that were read and not applied yet."""
        self._read_to = 0
        self._clock = clock
        self._series = series
        self._number = partition
        self._partition = Partition(make_detectors, links, self._owns, self._recall)
        self._tell_refused = tell_refused
        self._epoch = 0
        self._saved_ns: dict[str, int] = {}
        self._saved: set[str] = set()
        """Jobs in memory that have a snapshot since they began or came back."""
        self._replayed_to: Place | None = None
        """While the past is replayed: its end."""
        self._rows: dict[str, int] = {}

    @property
    def epoch(self) -> int:
        """Of our claim; 0 before the start."""
        return self._epoch

    @property
    def partition(self) -> Partition:
        """The state, for looking at."""
        return self._partition

    def start(self) -> Started:
        """Take over the partition and catch up with what is committed, without any effect."""
        with write(self._engine) as connection:
            held = claim(connection, self._number)
        self._epoch, committed = held.epoch, held.place
        begin, end = self._log.begin(self._number), self._log.end(self._number)
        started = Started(lost_records=max(begin - committed.position, 0), log_is_another=end < committed.position)
        # What the log forgot by itself, not by our leave, is missing from the past of those who need it.
        is_whole = begin <= held.needed_position and not started.log_is_another
        kept_from = held.needed_position if is_whole else begin if not started.log_is_another else committed.position
        known = self._known_jobs()
        found, unreadable = snapshots.load(self._engine, self._number, kept_from, committed)
        # Where the log has other partitions than it had, some of what was watched here is watched elsewhere now.
        found = [saved for saved in found if saved.job in known]
        put_away: dict[str, Place] = {}
        if not started.log_is_another:
            newest = {**{saved.job: saved.place for saved in found}, **unreadable}
            put_away = self._resting(newest, 0 if is_whole else begin, committed)
        found = [_within(saved, kept_from, committed) for saved in found if saved.job not in put_away]
        is_first = committed.tick_number == 0
        settings = snapshots.newest_settings(self._engine) if is_first else None
        if settings is not None:
            committed = replace(committed, control_position=settings.place.control_position)
            found = [replace(settings, place=committed)]
        self._partition.restore(found, put_away, known)
        places = [saved.place for saved in found]
        missing = known - {saved.job for saved in found} - put_away.keys()
        for name in sorted(missing):
            if not is_whole or (is_first and name != ALL_JOBS) or (name in unreadable and kept_from > 0):
                self._begin_cold(name, committed, started)
        if missing - set(started.cold_jobs):
            # The log is forgotten up to where every job had snapshots: it holds all of the others' past.
            places.append(Place(kept_from, 0, held.needed_control))
        self._replayed_to = committed
        self._replay(snapshots.earliest(places or [committed]), committed, started)
        # Of a log with other partitions than it had: known from the tables, and in none of the records that are ours.
        for name in sorted(known - {ALL_JOBS} - self._partition.jobs.keys() - put_away.keys()):
            self._begin_cold(name, committed, started)
        self._partition.settled()
        self._replayed_to = None
        if started.lost_records or started.log_is_another:
            committed = replace(committed, position=begin)
        self._partition.place = committed
        self._waiting, self._read_to = [], committed.control_position
        started.cold_detectors = {name: job.cold for name, job in self._partition.jobs.items() if job.cold}
        self._saved_ns = {saved.job: self._partition.now_ns for saved in found}
        self._saved = set(self._saved_ns)
        if started.log_is_another:
            with write(self._engine) as connection:
                begin_another_log(connection, self._number, self._epoch, begin)
        # Their next start must not be a cold one again, nor find what another partition put away.
        cold = [name for name in started.cold_jobs if name != ALL_JOBS]
        for first in range(0, len(cold), AWAY_TOGETHER):
            self._put_away(cold[first : first + AWAY_TOGETHER])
        if not is_whole:
            with write(self._engine) as connection:
                own(connection, self._number, self._epoch, position_needed=begin)
        if settings is not None:
            self.save(ALL_JOBS)  # the next start must begin with the same
        return started

    def step(self, records_max: int = RECORDS_MAX) -> int:
        """Process what lies in the log, at most `records_max` records, and commit it; returns how many there were.

        Raises:
            FencedError: another process owns the partition now.
            Exception: the database failed; start anew, since it may or may not have taken the batch.
        """
        records = self._log.read(self._number, self._partition.place.position, records_max)
        self._read_controls()
        effects, ticks = Effects(), list[StoredTick]()
        began_s = self._clock.monotonic_s()
        done = 0
        while done < len(records) and self._clock.monotonic_s() - began_s <= BATCH_S:
            self._live_up_to(records[done].appended_unix_ns, records[done].position, ticks, effects)
            part = _appended_before(self._next_tick_ns(), records[done : done + TOGETHER_MAX])
            self._partition.records(part, effects)
            done += len(part)
        if done == len(records) < records_max and self._log.drained(self._number, self._partition.place.position):
            self._live_up_to_now(ticks, effects)
        if done or ticks:
            self._commit(ticks, effects)
        return done

    def save_due(self) -> int:
        """Save the jobs whose time has come, put away those that rest, and forget what no start needs any more.

        Returns:
            How many were saved.

        Raises:
            FencedError: another process owns the partition now.
        """
        self._series.flush_due()
        at_rest = [name for name, job in self._partition.jobs.items() if job.resting]
        if at_rest:
            self._put_away(at_rest[:AWAY_TOGETHER])
        if len(at_rest) > AWAY_TOGETHER:
            return 0  # the others first
        due = [name for name in (ALL_JOBS, *self._partition.jobs) if self._is_due(name)]
        for name in due:
            self.save(name)
        if due:
            kept = snapshots.needed_from(self._engine, self._number, (ALL_JOBS, *self._partition.jobs))
            if kept is not None:
                self._forget(kept)
        return len(due)

    def save(self, name: str) -> None:
        """Save one job now, or the partition itself (`ALL_JOBS`). Its series go first: a replay begins here.

        The partition's own snapshot is where a replay begins at the latest, so it comes after the first of each job.

        Raises:
            FencedError: another process owns the partition now.
        """
        if name == ALL_JOBS:
            for unsaved in self._partition.jobs.keys() - self._saved:
                self.save(unsaved)
        else:
            self._series.flush(name)
        state = self._partition.snapshot(name)
        now = self._partition.now_ns
        snapshots.save(self._engine, self._number, self._epoch, name, self._partition.place, state, now)
        self._saved_ns[name], self._rows[name] = now, 0
        self._saved.add(name)

    def close(self) -> None:
        """Save everything, so that the next start is quick. Only after a `step` that did not fail."""
        for name in (*self._partition.jobs, ALL_JOBS):
            self.save(name)

    def _put_away(self, names: Sequence[str]) -> None:
        place = self._partition.place
        for name in names:
            self._series.flush(name)
        with write(self._engine) as connection:
            own(connection, self._number, self._epoch)
            for name in names:
                state = self._partition.snapshot(name)
                idle_jobs.put_away(connection, self._number, name, place, state, self._partition.now_ns)
        for name in names:
            self._partition.let_go(name)
            self._saved.discard(name)
            self._saved_ns.pop(name, None)
            self._rows.pop(name, None)

    def _recall(self, job: JobStream) -> Place:
        try:
            saved = idle_jobs.recalled(self._engine, self._number, job.job)
        except ValueError as error:
            _log.error("resting_job_unreadable", job=job.job, error=str(error))
            adopt(self._engine, job)
            # The tables know already what a replay would bring.
            return self._replayed_to or self._partition.place
        job.restore(saved.state)
        return saved.place

    # ---- processing ------------------------------------------------------------------------------------------------

    def _live_up_to(self, time_unix_ns: int, position: int, ticks: list[StoredTick], effects: Effects) -> None:
        """Apply the control records that were appended before the record at `position`, at their times, and tick."""
        while self._waiting and self._waiting[0].appended_unix_ns <= time_unix_ns:
            self._tick(self._waiting[0].appended_unix_ns, position, ticks, effects)
        if time_unix_ns - self._partition.now_ns >= TICK_S * 1e9:
            self._tick(time_unix_ns, position, ticks, effects)

    def _next_tick_ns(self) -> int:
        """Append time of a record from which on `_live_up_to` has something to do."""
        due = self._partition.now_ns + int(TICK_S * 1e9)
        return min(due, self._waiting[0].appended_unix_ns) if self._waiting else due

    def _live_up_to_now(self, ticks: list[StoredTick], effects: Effects) -> None:
        """No telemetry lies there: control records count at once, whatever the time of the clock they came from."""
        now, position = self._clock.unix_ns(), self._partition.place.position
        due = now - self._partition.now_ns >= TICK_S * 1e9 and (self._partition.awake or not self._partition.now_ns)
        if self._waiting or due:
            latest = max((control.appended_unix_ns for control in self._waiting), default=now)
            self._tick(max(now, latest), position, ticks, effects)

    def _tick(self, time_unix_ns: int, position: int, ticks: list[StoredTick], effects: Effects) -> None:
        taken = list(takewhile(lambda control: control.appended_unix_ns <= time_unix_ns, self._waiting))
        self._waiting = self._waiting[len(taken) :]
        control_position = self._waiting[0].position if self._waiting else self._read_to
        tick = StoredTick(self._partition.place.tick_number + 1, position, control_position, time_unix_ns)
        ticks.append(tick)
        self._partition.tick(tick, taken, effects)

    def _read_controls(self) -> None:
        found = self._controls.read(self._read_to, CONTROLS_MAX)
        if found:
            self._read_to = found[-1].position + 1
            self._waiting += [control for control in found if self._concerns_us(control)]

    def _concerns_us(self, control: Control) -> bool:
        return control.key == ALL_JOBS or self._owns(control.key)

    def _owns(self, job: str) -> bool:
        return self._log.partition_of(job) == self._number

    def _commit(self, ticks: list[StoredTick], effects: Effects) -> None:
        if effects.refused and self._tell_refused is not None:
            self._tell_refused(self._number, effects.refused)
        with write(self._engine) as connection:
            now = self._clock.unix_ns()
            commit(connection, self._number, self._epoch, self._partition.place, ticks, effects, now)
        for refused in effects.refused:
            _log.warning("record_refused", position=refused.position, reason=refused.reason, detail=refused.detail)
        for job, failure in effects.failures:
            _log.error("detector_failed", job=job, detector=failure.detector, error=failure.error, off=failure.off)
        self._chart(effects)

    def _chart(self, effects: Effects) -> None:
        for job, frame in effects.frames:
            self._rows[job] = self._rows.get(job, 0) + max((p.size for p in frame.present.values()), default=0)
            self._series.add(job, frame)

    def _is_due(self, name: str) -> bool:
        # Jobs that appeared together are saved one after the other: each waits a share of its own before the first.
        share = (sum(name.encode()) % 16) / 16
        now = self._partition.now_ns
        since_s = (now - self._saved_ns.setdefault(name, now - int(share * SNAPSHOT_S * 1e9))) / 1e9
        return since_s >= SNAPSHOT_S or self._rows.get(name, 0) >= SNAPSHOT_ROWS

    def _forget(self, kept: Place) -> None:
        with write(self._engine) as connection:
            old = (StreamTick.partition == self._number, StreamTick.number < kept.tick_number)
            connection.execute(delete(StreamTick).where(*old))
            # An owner that was replaced and does not know it yet may come with a place that is long past.
            mine = (StreamPosition.partition == self._number, StreamPosition.position_needed <= kept.position)
            needed = {"position_needed": kept.position, "control_needed": kept.control_position}
            connection.execute(update(StreamPosition).where(*mine).values(needed))
            living = StreamPosition.partition < self._log.partitions  # the log may have had more of them once
            needed_by_all = connection.scalar(select(func.min(StreamPosition.control_needed)).where(living)) or 0
            control_log.trim(connection, needed_by_all, TRIM_RECORDS)
        while self._log.trim(self._number, kept.position, TRIM_RECORDS):
            pass

    # ---- starting --------------------------------------------------------------------------------------------------

    def _begin_cold(self, name: str, committed: Place, started: Started) -> None:
        started.cold_jobs.append(name)
        job = self._partition.begin_cold(name, committed)
        if job is not None:
            adopt(self._engine, job)

    def _resting(self, newest: Mapping[str, Place], begin: int, committed: Place) -> dict[str, Place]:
        """Since when jobs are put away that have no later snapshot: who was heard of since may have none yet."""
        return {
            job: place
            for job, place in idle_jobs.places(self._engine, self._number, begin, committed).items()
            if job not in newest or not newest[job].is_later(place)
        }

    def _known_jobs(self) -> set[str]:
        """Jobs of this partition that anything was committed about, and the partition's own settings."""
        with read(self._engine) as connection:
            names = connection.scalars(select(Job.name)).all()
        return {ALL_JOBS, *(name for name in names if self._owns(name))}

    def _replay(self, begin: Place, committed: Place, started: Started) -> None:
        ticks, since_ns = stored_ticks(self._engine, self._number, begin, committed)
        self._partition.now_ns = since_ns or self._partition.now_ns
        controls = applied_controls(self._controls, self._concerns_us, begin, committed)
        position, effects = begin.position, Effects()
        while position < committed.position:
            records = self._log.read(self._number, position, RECORDS_MAX, REPLAY_WAIT_S)
            if not records:
                if self._log.end(self._number) > position:
                    raise LogError(f"partition {self._number}: nothing came from position {position} on")
                break
            records = [record for record in records if record.position < committed.position]
            done = 0
            while done < len(records):
                while ticks and ticks[0].position <= records[done].position:
                    self._replay_tick(ticks.popleft(), controls, effects, started)
                end = ticks[0].position if ticks else committed.position
                part = records[done : min(bisect_left(records, end, key=_POSITION), done + TOGETHER_MAX)]
                self._partition.records(part, effects)
                done += len(part)
            started.replayed_records += len(records)
            if not records:
                break
            position = records[-1].position + 1
            self._chart(effects)
            effects = Effects()
        while ticks:
            self._replay_tick(ticks.popleft(), controls, effects, started)
        for control in controls:  # where there was one log for everything, they needed no tick to come
            self._partition.control(control, effects)
        self._chart(effects)

    def _replay_tick(self, tick: StoredTick, controls: deque[Control], effects: Effects, started: Started) -> None:
        taken = []
        while controls and controls[0].position < tick.control_position:
            taken.append(controls.popleft())
        self._partition.tick(tick, taken, effects)
        started.replayed_ticks += 1


def _within(saved: Saved, kept_from: int, committed: Place) -> Saved:
    """What people had set is as good as ever, wherever the log of telemetry begins now."""
    position = min(max(saved.place.position, kept_from), committed.position)
    return replace(saved, place=replace(saved.place, position=position))


def _appended_before(time_unix_ns: int, records: Sequence[Record]) -> Sequence[Record]:
    """The first records, up to one that was appended at that time or later."""
    for count, record in enumerate(records):
        if record.appended_unix_ns >= time_unix_ns:
            return records[:count]
    return records
