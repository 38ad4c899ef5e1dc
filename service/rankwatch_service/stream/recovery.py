"""The plan of a start, and the replay that it needs. Pure.

Replays what a partition processed between two places: the same records, ticks and control records, in that order.

Effects are discarded, because they were committed the first time. Frames go to the charts again: series are written
beside the deciding transaction, so a crash may have lost some.

The plan of a start. Pure: facts in, plan out. `stream.loop` carries it out and decides nothing itself.

Every known job starts in exactly one of four ways, and so do the partition's settings (`ALL_JOBS`):

- from its *snapshot*, followed by a replay of what came after it;
- as an *idle* job, which stays in its row until a record or a control record concerns it;
- from the *log* alone, if the log still has the job's whole past;
- from the *tables*, if that past is lost: incidents and checkpoints are kept, detectors begin anew.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Final

from rankwatch_service.job.effects import Effects
from rankwatch_service.log.base import Claim, Control, Offsets, Record, Saved, StoredTick, earliest
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.stream.partition import Partition, together

_POSITION: Final = attrgetter("position")


@dataclass(frozen=True, slots=True)
class Past:
    """What is replayed: everything that was processed between two places."""

    records: Iterable[Sequence[Record]]
    """In order, in chunks as they were read."""
    ticks: deque[StoredTick]
    controls: deque[Control]
    """Control records that concern the partition; each comes with the first tick with a higher control position."""
    begin_unix_ns: int
    """The time before the first tick; 0 if it is not known."""
    end: int
    """Position of the first record that is not replayed."""


class Replay:
    """One replay of a partition. `run` it once."""

    def __init__(self, partition: Partition, past: Past, chart: Callable[[Effects], None]) -> None:
        self.records = 0
        """Replayed so far."""
        self.ticks = 0
        self._partition = partition
        self._past = past
        self._chart = chart

    def run(self) -> None:
        """Replay everything; frames go to the charts after each part of the records."""
        past = self._past
        self._partition.now_ns = past.begin_unix_ns or self._partition.now_ns
        for records in past.records:
            self._chunk(records)
        effects = Effects()
        while past.ticks:
            self._tick(effects)
        self._chart(effects)

    def _chunk(self, records: Sequence[Record]) -> None:
        ticks, done = self._past.ticks, 0
        while done < len(records):
            effects = Effects()
            while ticks and ticks[0].position <= records[done].position:
                self._tick(effects)
            end = ticks[0].position if ticks else self._past.end
            part = together(records[: bisect_left(records, end, key=_POSITION)], done)
            self._partition.records(part, effects)
            self._chart(effects)
            done += len(part)
        self.records += len(records)

    def _tick(self, effects: Effects) -> None:
        tick, controls = self._past.ticks.popleft(), self._past.controls
        taken = []
        while controls and controls[0].position < tick.control_position:
            taken.append(controls.popleft())
        self._partition.tick(tick, taken, effects)
        self.ticks += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a start finds in the store and in the log of one partition."""

    claim: Claim
    log_begin: int
    """Position of the oldest record that the log has; `log_end` if it has none."""
    log_end: int
    """The position that the next record will have."""
    snapshots: tuple[Saved, ...] = ()
    """The newest readable snapshot of each job that has one, none of them beyond the claim's place."""
    unreadable: Mapping[str, Offsets]
    """Jobs that have snapshots of which none can be read, with the place of the newest."""
    idle: Mapping[str, Offsets]
    """Jobs that have a row as idle jobs, with its place."""
    jobs: frozenset[str]
    """The known jobs: those of this partition that have a row in the store."""
    newest_settings: Saved | None
    """The settings in the newest readable snapshot of any partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a start does, in this order."""

    snapshots: tuple[Saved, ...]
    """1. Restore these. Each skips what the replay has from before its place."""
    idle: Mapping[str, Offsets]
    """2. Leave these in their rows. They are loaded if the replay, or anything later, concerns them."""
    from_tables: tuple[str, ...]
    """3. Restore these from the tables, as of `replay_to`."""
    replay_from: Offsets
    replay_to: Offsets
    """4. Replay the log, the ticks and the control log between these places, without effects."""
    from_log: frozenset[str]
    """5. Expect these from the replay, and restore from the tables those that it did not bring back: their records are
    in another partition, because the number of partitions has changed."""
    resume_at: Offsets
    """6. Go on from here."""
    is_new_log: bool
    """7. If true, remove what refers to positions in the old log."""
    needed_position: int
    """8. Remember that no start needs an older record."""
    save: tuple[str, ...]
    """9. Save these at once."""
    known: frozenset[str]
    """Jobs that the replay may begin: those that were accepted when their records were new."""
    lost_records: int
    """Records that were removed from the log before they were processed."""


def plan_start(facts: Facts) -> Plan:
    """Decide how each job starts, what is replayed, and where the stream goes on."""
    claim = facts.claim
    committed = claim.offsets
    is_new_log = facts.log_end < committed.position
    # The log is complete if it lacks only records that no start needs.
    is_complete = not is_new_log and facts.log_begin <= claim.needed_position
    complete_from = _complete_from(facts, is_new_log, is_complete)
    known = facts.jobs | {ALL_JOBS}

    snapshots = {saved.job: saved for saved in facts.snapshots if saved.job in known}
    too_old = {name: saved.offsets for name, saved in snapshots.items() if not _can_replay(saved, complete_from)}
    unusable = {**facts.unreadable, **too_old}
    # Rows of idle jobs have positions in the old log, which the new one does not continue.
    idle = {} if is_new_log else _idle(facts, {name: saved.offsets for name, saved in snapshots.items()} | unusable)
    idle = {name: offsets for name, offsets in idle.items() if is_complete or offsets.position >= facts.log_begin}
    usable = [saved for name, saved in snapshots.items() if name not in too_old.keys() | idle.keys()]
    restored = [_moved_into(saved, complete_from, committed) for saved in usable]

    is_first_start = committed.tick_number == 0
    save: tuple[str, ...] = ()
    if is_first_start and facts.newest_settings is not None:
        # A new partition begins with the newest settings of any other partition.
        committed = replace(committed, control_position=facts.newest_settings.offsets.control_position)
        restored = [Saved(ALL_JOBS, committed, facts.newest_settings.state)]
        save = (ALL_JOBS,)  # so that the next start begins with the same settings

    missing = known - {saved.job for saved in restored} - idle.keys()
    lost = {
        name
        for name in missing
        if not is_complete
        or (is_first_start and name != ALL_JOBS)  # its past is in another partition
        or (name in unusable and complete_from > 0)  # what its snapshot held is no longer in the log
    }
    from_log = missing - lost
    places = [saved.offsets for saved in restored]
    if from_log:
        places.append(Offsets(complete_from, 0, claim.needed_control))
    lost_records = max(facts.log_begin - committed.position, 0)
    resumes_elsewhere = lost_records > 0 or is_new_log
    return Plan(
        snapshots=tuple(restored),
        idle=idle,
        from_tables=tuple(sorted(lost)),
        replay_from=earliest(places or [committed]),
        replay_to=committed,
        from_log=frozenset(from_log - {ALL_JOBS}),
        resume_at=replace(committed, position=facts.log_begin) if resumes_elsewhere else committed,
        is_new_log=is_new_log,
        needed_position=claim.needed_position if is_complete else facts.log_begin,
        save=save,
        known=known,
        lost_records=lost_records,
    )


def _complete_from(facts: Facts, is_new_log: bool, is_complete: bool) -> int:
    """The position from which on the log has everything that was processed."""
    committed = facts.claim.offsets.position
    if is_new_log:
        return committed  # the new log has nothing of what was processed
    return min(facts.claim.needed_position if is_complete else facts.log_begin, committed)


def _can_replay(saved: Saved, complete_from: int) -> bool:
    """Whether the log has what came after a snapshot. Settings need the control log alone, which is complete."""
    return saved.job == ALL_JOBS or saved.offsets.position >= complete_from


def _idle(facts: Facts, newest: Mapping[str, Offsets]) -> dict[str, Offsets]:
    """Jobs that have not come back since their row was written: they have no later snapshot."""
    return {
        name: offsets
        for name, offsets in facts.idle.items()
        if offsets.is_within(facts.claim.offsets) and not (name in newest and newest[name].is_later(offsets))
    }


def _moved_into(saved: Saved, complete_from: int, committed: Offsets) -> Saved:
    """The snapshot, at a position that the log has. Only that of the settings may be older than the log."""
    position = min(max(saved.offsets.position, complete_from), committed.position)
    return replace(saved, offsets=replace(saved.offsets, position=position))
