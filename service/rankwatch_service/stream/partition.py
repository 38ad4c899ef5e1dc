"""The state of one partition: gives records, ticks and control records to the jobs that they concern, in order. Pure.

The outcome depends on records and ticks only, not on how they are batched. After a restart each job goes on from its
own place: a replay skips for it what came before.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final

from rankwatch_service.incidents.model import unix_ns
from rankwatch_service.job.admission import Admission, BundleRefused, BundleSplit, CellQuota, LimitExceeded
from rankwatch_service.job.detection import MakeDetectors
from rankwatch_service.job.effects import Effects, RefusedRecord
from rankwatch_service.job.job import JobStream, Links
from rankwatch_service.job.progress_board import GONE_STATES
from rankwatch_service.log.base import Control, Controls, Offsets, Record, Saved, StoredTick
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import JobDeleted, JobOwnership, decode_control
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.telemetry.bundle import read_bundle
from rankwatch_service.telemetry.envelope import BadBatchError, Envelope, Reason, SecretOf, no_secrets, read_envelope

CONTROLS_MAX: Final = 1_000
"""Control records read at once. People and orders make few; a start may find those of a day."""


class Ticker:
    """Ticks a partition between its records. New ticks are appended to the caller's lists; the caller stores them."""

    def __init__(self, partition: Partition, controls: Controls, concerns: Callable[[Control], bool]) -> None:
        """Read nothing yet. `concerns`: whether a control record is applied in this partition."""
        self._partition = partition
        self._controls = controls
        self._concerns = concerns
        self._waiting: list[Control] = []
        """Control records that are read and not applied yet."""
        self._read_to = 0

    def go_on_at(self, control_position: int) -> None:
        """Read control records from this position on."""
        self._waiting, self._read_to = [], control_position

    def read_controls(self) -> None:
        """Read the control records that were appended since the last call."""
        found = self._controls.read(self._read_to, CONTROLS_MAX)
        if found:
            self._read_to = found[-1].position + 1
            self._waiting += [control for control in found if self._concerns(control)]

    def tick_before(self, record: Record, ticks: list[StoredTick], effects: Effects) -> None:
        """Tick up to a record: with each control record that was appended before it, and once a second."""
        at = record.appended_unix_ns
        while self._waiting and self._waiting[0].appended_unix_ns <= at:
            self._tick(self._waiting[0].appended_unix_ns, record.position, ticks, effects)
        if at - self._partition.now_ns >= TICK_S * 1e9:
            self._tick(at, record.position, ticks, effects)

    def next_unix_ns(self) -> int:
        """The time of the next tick: `tick_before` has nothing to do for a record that was appended before it."""
        due = self._partition.now_ns + int(TICK_S * 1e9)
        return min(due, self._waiting[0].appended_unix_ns) if self._waiting else due

    def tick_now(self, now_unix_ns: int, ticks: list[StoredTick], effects: Effects) -> None:
        """Tick while no record waits: control records are applied at once, whatever time they carry."""
        needs_ticks = self._partition.has_active_jobs or not self._partition.now_ns
        due = needs_ticks and now_unix_ns - self._partition.now_ns >= TICK_S * 1e9
        if self._waiting or due:
            # The api that appended them may run on a host whose clock is ahead of this one's.
            latest = max((control.appended_unix_ns for control in self._waiting), default=now_unix_ns)
            self._tick(max(now_unix_ns, latest), self._partition.offsets.position, ticks, effects)

    def _tick(self, time_unix_ns: int, position: int, ticks: list[StoredTick], effects: Effects) -> None:
        taken = list(takewhile(lambda control: control.appended_unix_ns <= time_unix_ns, self._waiting))
        self._waiting = self._waiting[len(taken) :]
        control_position = self._waiting[0].position if self._waiting else self._read_to
        tick = StoredTick(self._partition.offsets.tick_number + 1, position, control_position, time_unix_ns)
        ticks.append(tick)
        self._partition.tick(tick, taken, effects)


TICK_S: Final = 1.0
"""Between ticks, while any job is active."""

OUTAGE_MIN_S: Final = 3.0
"""A longer pause between ticks means that the service was down or behind: nobody's silence in that time counts."""

JOBS_MAX: Final = 1_000
"""Active jobs of one partition; beyond it, telemetry of a new job is refused with a dead letter."""

TOGETHER_MAX: Final = 512
TOGETHER_BYTES_MAX: Final = 4 * 1024 * 1024
"""Records given to a partition at once: enough to share work, few enough to check the clock and the size of closed
frames in between."""

BUNDLE_BYTES_MAX: Final = 640 * 1024
"""A bundle with this many bytes of tables is full: 8,192 rank-steps of 16 metrics make 1 MB of numbers, which stay in a
core's cache until they are in frames."""

_START: Final = Offsets(0, 0, 0)

LoadIdle = Callable[[JobStream], Offsets]
"""Restores an evicted job; returns the place from which on records and ticks are new to it."""


def _no_idle_jobs(job: JobStream) -> Offsets:
    raise LookupError(f"job {job.job!r} was evicted, and there is nothing to load it from")


@dataclass(slots=True)
class _Group:
    """Records of one attempt that will be taken as one bundle, with their batches."""

    records: list[Record] = field(default_factory=list)
    batches: list[Envelope] = field(default_factory=list)
    bytes: int = 0

    def add(self, record: Record, batch: Envelope) -> None:
        self.records.append(record)
        self.batches.append(batch)
        self.bytes += len(record.value)

    def may_take(self, batch: Envelope) -> bool:
        return self.batches[0].attempt == batch.attempt and self.bytes < BUNDLE_BYTES_MAX

    def singles(self) -> Iterator[_Group]:
        for record, batch in zip(self.records, self.batches, strict=True):
            yield _Group([record], [batch], len(record.value))


class Partition:
    """State of one partition, as of `place`."""

    def __init__(
        self,
        make_detectors: MakeDetectors,
        links: Links,
        owns: Callable[[str], bool] = lambda _job: True,
        load_idle: LoadIdle = _no_idle_jobs,
        secret_of: SecretOf = no_secrets,
    ) -> None:
        """Begin without jobs.

        Args:
            make_detectors: makes the detectors of a job.
            links: pages about an incident, for notifications.
            owns: whether a job belongs to this partition. A new job that does not is refused.
            load_idle: restores evicted jobs.
            secret_of: the secrets of agents that have enrolled.
        """
        self.offsets = _START
        self._owns = owns
        self._load_idle = load_idle
        self._secret_of = secret_of
        self.now_ns = 0
        self.jobs: dict[str, JobStream] = {}
        """The jobs in memory."""
        self._idle: set[str] = set()
        """Names of evicted jobs."""
        self._accepted: Container[str] | None = None
        """During a replay: the jobs that were accepted the first time; no other may begin."""
        self._granted: Mapping[tuple[str, int], int] = {}
        """During a replay: the cells that jobs were granted the first time, by job and position."""
        self.settings = SettingsInForce()
        self._make_detectors = make_detectors
        self._links = links
        self._new_from: dict[str, Offsets] = {}
        """During a replay, by job: the place from which on records, ticks and control records are new to it."""

    @property
    def has_active_jobs(self) -> bool:
        """Whether any job needs ticks."""
        return any(not job.is_idle for job in self.jobs.values())

    def records(self, records: Sequence[Record], effects: Effects) -> None:
        """The next records of telemetry, between two ticks.

        Jobs do not see each other, so the records of one job are taken in bundles. A record that cannot be used becomes
        a dead letter, and the stream goes on.
        """
        refused_before = len(effects.refused)
        for group in self._groups(records, effects):
            self._take(group, effects)
        # Bundles of several jobs are taken in another order than that of the log.
        effects.refused[refused_before:] = sorted(effects.refused[refused_before:], key=attrgetter("position"))
        if records:
            self.offsets = replace(self.offsets, position=records[-1].position + 1)

    def _groups(self, records: Iterable[Record], effects: Effects) -> Iterator[_Group]:
        """The records by job, in log order. Only plain batches of one attempt are in a group of several."""
        waiting: dict[str, _Group] = {}
        for record in records:
            batch = self._batch(record, effects)
            if batch is None:
                continue
            shares = record.key in self.jobs and _is_plain(batch)
            group = waiting.get(record.key)
            if group is not None and not (shares and group.may_take(batch)):
                yield waiting.pop(record.key)
                group = None
            if group is None:
                group = _Group()
            group.add(record, batch)
            if shares:
                waiting[record.key] = group
            else:
                yield group
        yield from waiting.values()

    def _batch(self, record: Record, effects: Effects) -> Envelope | None:
        """The batch of a record; None if it is refused, or if its job has processed it already."""
        if self._is_known(record):
            return None
        try:
            batch = read_envelope(record.value, self._secret_of)
        except Exception as error:  # noqa: BLE001 - one record must not stop all jobs, now and at every restart
            self._refuse([record], _refused(error), effects)
            return None
        if batch.job != record.key:
            detail = f"a batch of job {batch.job!r} under the key {record.key!r}"
            self._refuse([record], BundleRefused(Reason.NAME, detail), effects)
            return None
        # Not in the `try`: a store that fails must end the stream, and refuse no record.
        if batch.job in self._idle:
            self._look_up(batch.job)
            if self._is_known(record):
                return None
        return batch

    def _take(self, group: _Group, effects: Effects) -> None:
        """Process records as one bundle. A bundle that cannot be processed whole is split here, and nowhere else."""
        record = group.records[0]
        try:
            bundle = read_bundle(group.batches)
            job = self.jobs.get(record.key) or self._new(record.key, record.position, effects)
            admission: Admission = job.admit(bundle, self._quota(record), self._now_s, effects)
        except Exception as error:  # noqa: BLE001 - one record must not stop all jobs, now and at every restart
            # Of several batches only the bad one is refused. Another error may have left part of the bundle applied.
            is_one_bad = isinstance(error, BadBatchError) and len(group.records) > 1
            admission = BundleSplit() if is_one_bad else _refused(error)
        match admission:
            case BundleSplit():
                for single in group.singles():
                    self._take(single, effects)
            case BundleRefused():
                self._refuse(group.records, admission, effects)

    def _quota(self, record: Record) -> CellQuota:
        """What the job of a record may have at it."""
        if self._accepted is not None:
            offsets = record.key, record.position
            return CellQuota(*offsets, replayed_cells=self._granted.get(offsets, 0))
        return CellQuota(
            record.key, record.position, lambda: [job.allowed for name, job in self.jobs.items() if name != record.key]
        )

    def _refuse(self, records: Sequence[Record], refused: BundleRefused, effects: Effects) -> None:
        reason, detail = refused.reason, refused.detail
        effects.refused += [RefusedRecord(r.position, reason, detail, r.value, self.now_ns) for r in records]
        job = self.jobs.get(records[0].key)
        if reason is Reason.FORGED and job is not None:
            fields = {"what": "telemetry", "detail": detail, "count": len(records)}
            job.report("forged", fields, self._now_s, effects)

    def tick(self, tick: StoredTick, controls: Sequence[Control], effects: Effects) -> None:
        """The next tick, with the control records below its control position that are not applied yet.

        A tick that is earlier than the one before does not move time back.
        """
        before, self.now_ns = self.now_ns, max(self.now_ns, tick.time_unix_ns)
        pause_s = (self.now_ns - before) / 1e9
        outage_s = pause_s - TICK_S if before and pause_s > OUTAGE_MIN_S else 0.0
        for control in controls:
            self.control(control, effects)
        self.offsets = Offsets(max(self.offsets.position, tick.position), tick.number, tick.control_position)
        for name, job in self.jobs.items():
            if tick.number > self._new_from.get(name, _START).tick_number:
                job.tick(self._now_s, outage_s, effects)

    def control(self, control: Control, effects: Effects) -> None:
        """Apply a control record at the time of the last tick. Settings hold for jobs that begin later too."""
        if control.key != ALL_JOBS and self._is_new_to(control.key, control):
            self._look_up(control.key)  # not in the `try`: a store that fails must end the stream and refuse nothing
        try:
            self._obey(control, effects)
        except Exception as error:  # noqa: BLE001 - one record must not stop all jobs; a newer api may have written it
            detail = f"control record: {type(error).__name__}: {error}"[:500]
            effects.refused.append(RefusedRecord(control.position, Reason.FAILED, detail, control.value, self.now_ns))

    def snapshot(self, name: str) -> dict[str, Any]:
        """The state of one job, or of the settings (`ALL_JOBS`)."""
        if name == ALL_JOBS:
            return {"settings": self.settings.state()}
        return self.jobs[name].state()

    def restore(
        self,
        snapshots: Iterable[Saved],
        idle: Mapping[str, Offsets],
        known: Container[str],
        granted: Mapping[tuple[str, int], int] = MappingProxyType({}),
    ) -> None:
        """Restore snapshots of different places. The replay that follows may begin at the earliest of them.

        Args:
            snapshots: of active jobs, and of the settings.
            idle: evicted jobs, with the places of their rows.
            known: the jobs that were accepted the first time; no other may begin until `end_replay`.
            granted: the cells that jobs were granted the first time, by job and position.
        """
        self._granted = granted
        self._new_from |= idle
        self._idle |= idle.keys()
        self._accepted = known
        for saved in snapshots:
            self._new_from[saved.job] = saved.offsets
            if saved.job == ALL_JOBS:
                self.settings = SettingsInForce.restored(saved.state["settings"])
            else:
                self._begin(saved.job).restore(saved.state)

    def evict(self, name: str) -> None:
        """Drop an idle job from memory; `load_idle` restores it."""
        del self.jobs[name]
        self._idle.add(name)

    def begin_without_snapshot(self, names: Iterable[str], offsets: Offsets) -> list[JobStream]:
        """Begin jobs whose past cannot be replayed: records and ticks are new to them from `place` on.

        The settings (`ALL_JOBS`) are copied from the job with the latest place: every job has a copy.

        Returns:
            The jobs, still empty.
        """
        begun = []
        for name in names:
            self._new_from[name] = offsets
            if name == ALL_JOBS:
                newest = max(self.jobs, key=lambda job: self._new_from[job].position, default=None)
                self.settings = self.settings if newest is None else self.jobs[newest].settings.copy()
            else:
                begun.append(self._begin(name))
        return begun

    def end_replay(self) -> None:
        """End the replay: nothing is skipped any more, and new jobs may begin."""
        self._new_from, self._accepted, self._granted = {}, None, {}

    @property
    def _now_s(self) -> float:
        return self.now_ns / 1e9

    def _obey(self, control: Control, effects: Effects) -> None:
        record = decode_control(control.value)
        if isinstance(record, JobDeleted):
            self._delete(control, effects)
            return
        waits = control.key not in self.jobs and control.key not in self._idle and self._owns(control.key)
        if self._is_new_to(ALL_JOBS, control) and (waits or not isinstance(record, JobOwnership)):
            self.settings.apply(record)
        for name, job in self.jobs.items():
            if control.key in (ALL_JOBS, name) and self._is_new_to(name, control):
                job.control(record, self._now_s, effects)

    def _delete(self, control: Control, effects: Effects) -> None:
        """Delete the job of a control record, unless the job of that name now began after the request."""
        job = self.jobs.get(control.key)
        began_ns = None if job is None else job.first_seen_unix_ns
        if not self._is_new_to(control.key, control) or (began_ns or 0) > control.appended_unix_ns:
            return
        self.jobs.pop(control.key, None)
        self.settings.waiting.pop(control.key, None)
        effects.delete_job(control.key)

    def _is_known(self, record: Record) -> bool:
        return bool(self._new_from) and record.position < self._new_from.get(record.key, _START).position

    def _is_new_to(self, name: str, control: Control) -> bool:
        return control.position >= self._new_from.get(name, _START).control_position

    def _look_up(self, name: str) -> None:
        """Load a job if it was evicted."""
        if name not in self._idle:
            return
        job = JobStream(name, self._make_detectors, self._links, self.settings.copy())
        offsets = self._load_idle(job)
        if self._new_from:
            self._new_from[name] = offsets
        job.adopt(self.settings.copy())  # the row has those of its eviction; what was set since holds too
        self.jobs[name] = job
        self._idle.remove(name)

    def _new(self, name: str, position: int, effects: Effects) -> JobStream:
        if not self._owns(name):
            raise BadBatchError(Reason.NAME, f"records of job {name!r} belong in another partition")
        if not self._has_room_for(name):
            self._report_full(position, effects)
            raise BadBatchError(Reason.LIMIT, f"more than {JOBS_MAX} jobs in one partition")
        job = self._begin(name)
        job.ownership = self.settings.waiting.pop(name, job.ownership)
        return job

    def _report_full(self, position: int, effects: Effects) -> None:
        """Report a new job that is refused, in the newest job that there is."""
        begun = [job for job in self.jobs.values() if 0 < (job.first_seen_unix_ns or 0) <= unix_ns(self._now_s)]
        newest = max(begun, key=lambda job: (job.first_seen_unix_ns, job.job), default=None)
        if newest is not None and position >= self._new_from.get(newest.job, _START).position:
            limit = LimitExceeded("active jobs in a partition", JOBS_MAX, JOBS_MAX + 1)
            newest.report("limit", asdict(limit), self._now_s, effects)

    def _has_room_for(self, name: str) -> bool:
        if self._accepted is not None:
            return name in self._accepted
        return len(self.jobs) < JOBS_MAX or sum(not job.is_idle for job in self.jobs.values()) < JOBS_MAX

    def _begin(self, name: str) -> JobStream:
        job = self.jobs[name] = JobStream(name, self._make_detectors, self._links, self.settings.copy())
        return job


def together(records: Sequence[Record], first: int) -> Sequence[Record]:
    """The records from `first` on that are given to a partition at once: one at least."""
    size = 0
    for index in range(first, min(first + TOGETHER_MAX, len(records))):
        size += len(records[index].value)
        if size > TOGETHER_BYTES_MAX and index > first:
            return records[first:index]
    return records[first : first + TOGETHER_MAX]


def _refused(error: Exception) -> BundleRefused:
    if isinstance(error, BadBatchError):
        return BundleRefused(error.reason, error.detail)
    return BundleRefused(Reason.FAILED, f"{type(error).__name__}: {error}"[:500])


def _is_plain(batch: Envelope) -> bool:
    """Whether a batch has only rows, and progress of ranks that go on, so that it may share a bundle with others."""
    return not (batch.ranks or batch.events or any(block.state in GONE_STATES for block in batch.progress))
