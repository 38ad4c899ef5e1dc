"""Finds a job that makes no progress, and the rank that did not arrive.

It reads progress blocks and ticks only. Within a step the deadline is learned from the job (`Patience`): a standstill
is reported early as information, and becomes critical when it is longer than in healthy jobs. Where all ranks are
outside of a step, or do work of their own in one, nobody waits for anybody: loops evaluate, save and read there, so the
deadline is longer. Where all wait in a collective, nobody will come, wherever they are. Phases that are long by nature
(first step, compile, eval, checkpoint_save) have their own deadlines, learned from their earlier durations. Ranks that
an order holds, silent hosts, and what ranks do after training are not evidence of a hang.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from rankwatch_detectors.base import (
    UNREPORTED,
    AttemptStart,
    Bools,
    Finding,
    Floats,
    Kind,
    Occurrence,
    Presence,
    Severity,
    Topology,
)
from rankwatch_detectors.dispatch import DispatchingDetector
from rankwatch_detectors.episodes import since
from rankwatch_detectors.scope import WHOLE_JOB
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone, median

# A rank in a busy loop uses a whole core, one that waits in a socket none; ranks that poll while waiting are between.
BUSY_SHARE, IDLE_SHARE = 0.5, 0.2
DESCRIBED_MAX = 16
NAMED_MAX = 4
"""Ranks that a sentence names."""
# Stopped by a signal, held by a debugger, dead and not reaped. Not D, in which a rank is while it saves to a slow disk.
STOPPED_STATES = ("T", "t", "Z")
STOPPED = "stopped by a signal"
"""`decided_by` of a rank that is in one of these states."""
COLLECTIVE, DATA, OWN, ENDING = "collective", "data", "own", "ending"
"""What a rank that stands still does (`Presence.doing`)."""
# A rank whose block is this many intervals older than the newest has missed two.
SILENT_BLOCKS = 2.5


@dataclass(frozen=True, slots=True)
class Missing:
    """The ranks that did not arrive, the evidence for it, and where the others wait."""

    ranks: tuple[int, ...]
    decided_by: str
    confidence: float
    described: list[dict[str, Any]]
    waiting: list[dict[str, Any]]
    """Ranks by step and phase: {"step", "phase", "ranks"}."""


def who_is_missing(presence: Presence, stuck: Bools, running: Bools, cpu_before: Floats, block_s: float) -> Missing:
    """Find the ranks that the others wait for, by the strongest witness that distinguishes them.

    Args:
        presence: the newest progress blocks.
        stuck: ranks whose step is older than the deadline.
        running: ranks with a recent block that have neither left nor exited.
        cpu_before: row 0: CPU seconds of each rank when the step began; row 1: stream time of that reading.
        block_s: usual seconds between two progress blocks of a rank.
    """
    cpu_share = _cpu_share(presence, cpu_before, block_s)
    decided: tuple[Bools, str, float] = (np.zeros_like(stuck), "no evidence distinguishes the ranks", 0.3)
    for witness, reason, confidence in _witnesses(presence, stuck, running, cpu_share, SILENT_BLOCKS * block_s):
        # A witness that applies to most ranks describes the waiting ranks.
        if witness.any() and 2 * int(witness.sum()) <= max(int(running.sum()), 2):
            decided = (witness, reason, confidence)
            break
    chosen = tuple(int(rank) for rank in np.flatnonzero(decided[0]))
    late_s = presence.heard_s[running].max() - presence.heard_s
    described = [
        _describe(presence, rank, cpu_share)
        | ({"silent_s": float(late_s[rank])} if late_s[rank] > SILENT_BLOCKS * block_s else {})
        for rank in chosen[:DESCRIBED_MAX]
    ]
    return Missing(chosen, decided[1], decided[2], described, _grouped(presence, running & ~decided[0]))


def _witnesses(
    presence: Presence, stuck: Bools, running: Bools, cpu_share: Floats, silent_s: float
) -> list[tuple[Bools, str, float]]:
    left = presence.heard & presence.where("state", "left")
    several = int(running.sum()) > 1
    if running.size == 1:
        return [(running, "it is the only rank", 1.0)]
    lowest_step = running & several & (presence.step == presence.step[running].min())
    sequence = presence.collective_seq
    lowest_sequence = running & several & (sequence == sequence[running].min())
    waiting = waiting_ranks(presence, running)
    late_s = presence.heard_s[running].max() - presence.heard_s
    silent = presence.heard & ~left & (late_s > silent_s)
    busy, idle = stuck & (cpu_share > BUSY_SHARE), stuck & (cpu_share < IDLE_SHARE)
    return [
        (running & stopped_ranks(presence), STOPPED, 1.0),
        (running & presence.where("doing", ENDING), "its process is ending", 0.95),
        (lowest_step, "it is in an earlier step", 0.95),
        (lowest_step & has_not_begun(presence), "it has not begun its step, the others have", 0.95),
        (lowest_sequence, "it has entered fewer collectives", 0.9),
        (running & ~waiting & bool(waiting.any()), "it is not in a collective, the others are", 0.85),
        (left, "it left its loop, the others wait", 0.8),
        (silent, "its progress blocks stopped", 0.6),
        (busy & bool(idle.any()), "it computes, the others wait", 0.7),
        (idle & bool(busy.any()), "it waits, the others compute", 0.5),
    ]


def waiting_ranks(presence: Presence, running: Bools) -> Bools:
    """Running ranks that wait for others, or may do so: a backward ends with a reduction."""
    return running & (presence.where("phase", "backward", COLLECTIVE) | presence.where("doing", COLLECTIVE))


def leading_ranks(topology: Topology) -> Bools:
    """Ranks that save, evaluate or log for all: rank 0, the first one of each host, and the last one of a pipeline."""
    firsts: dict[str, int] = {}
    for rank, host in enumerate(topology.host):
        firsts.setdefault(host, rank)
    leads = np.zeros(topology.world_size, dtype=np.bool_)
    leads[list(firsts.values())] = True
    leads[-1] |= bool(topology.pp.max() > 0)
    return leads


def has_not_begun(presence: Presence) -> Bools:
    """Ranks that have been outside of their step since it began, so that they are behind all others in it.

    Where an optimizer's step ends a step of the loop, the next one begins at once, and its work with the next forward.
    """
    return np.asarray((presence.outside_s >= 0) & (presence.outside_s >= presence.step_age_s))


def stopped_ranks(presence: Presence) -> Bools:
    """Ranks that are stopped by a signal, held by a debugger, or dead and not reaped."""
    return presence.where("os_state", *STOPPED_STATES)


def _cpu_share(presence: Presence, before: Floats, block_s: float) -> Floats:
    """CPU seconds per second of each rank since the step began; NaN if that is too recent."""
    elapsed = presence.heard_s - before[1]
    with np.errstate(invalid="ignore", divide="ignore"):
        share = (presence.cpu_s - before[0]) / elapsed
    return np.where(elapsed >= block_s, share, np.nan)


def _describe(presence: Presence, rank: int, cpu_share: Floats) -> dict[str, Any]:
    return {
        "rank": rank,
        "step": int(presence.step[rank]),
        "phase": presence.phase[rank],
        "phase_age_s": float(presence.phase_age_s[rank]),
        "collective_seq": int(presence.collective_seq[rank]),
        "os_state": presence.os_state[rank],
        "doing": presence.doing[rank],
        "cpu_share": float(cpu_share[rank]),
    }


def _grouped(presence: Presence, others: Bools) -> list[dict[str, Any]]:
    groups = Counter((int(presence.step[rank]), presence.phase[rank]) for rank in np.flatnonzero(others))
    shown = groups.most_common(DESCRIBED_MAX)
    return [{"step": step, "phase": phase, "ranks": count} for (step, phase), count in shown]


PAUSE = "pause"
PAUSE_APART = "pause apart"
PAUSE_INSIDE = "pause inside"


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Settings of the hang detector; seconds unless said otherwise."""

    steps: float = 3.0
    """A standstill within a step is reported after this many usual steps ..."""
    floor_s: float = 5.0
    """... but not earlier than this ..."""
    prompt_s: float = 8.0
    """... and not later than this, unless the job's slowest steps take longer: every second costs all GPUs."""
    slow_steps_factor: float = 2.0
    """A deadline is at least this many times the 99th percentile of step times ..."""
    cold_steps: int = 50
    """... and for the first steps after a restart, in which caches fill and kernels are tuned, ..."""
    cold_factor: float = 4.0
    """... at least this many usual steps: such steps take up to three times as long."""
    critical_steps: float = 4.5
    """A standstill is critical after this many usual steps, `floor_s` and `slow_steps_factor`. Two and a half times the
    usual step happens in healthy jobs, and is reported as information."""
    stopped_s: float = 8.0
    """A standstill is critical after this, however long steps take, once a signal has stopped a rank for as long. A
    debugger that reads a stack stops it for milliseconds."""
    block_s: float = 1.0
    """Interval of progress blocks and of ticks."""
    reporting_s: float = 1.5
    """Delay of a finding because of both intervals: half of them on average, this at most nearly always. It is
    subtracted from the deadline of a report, so that reports are in time, but not from that of `critical`."""
    pause_s: float = 60.0
    """Outside of a step loops evaluate, save and log: a pause up to this is not reported ..."""
    pause_steps: float = 20.0
    """... nor one of up to this many usual steps ..."""
    pause_usual_factor: float = 1.5
    """... nor one of up to this many times the longest one that ended well in this job."""
    pause_factor: float = 3.0
    """It is critical after this many times that longest one ..."""
    alone_s: float = 15.0
    """If the others wait within a step, it is critical after `pause_s`, since rank 0 or the first rank of a host saves
    for all; that of any other rank after this: it fetches data, collects garbage, or will not come back."""
    pause_known_s: float = 300.0
    """... but not before this if all ranks pause: what comes after the last step is often longer ..."""
    pause_unknown_s: float = 900.0
    """... nor before this while no pause is known: people mark evaluations of a quarter of an hour as phases."""
    log_lines: float = 8.0
    """A standstill is reported after this many usual steps, and `prompt_s`, if only a log's lines report finished
    steps. Evaluations, saves and waits for data are then not distinguishable, so it is critical only when a pause
    outside of a step would be reported."""
    heard_within_s: float = 5.0
    """Blocks older than this are not used, nor those delayed by more than this compared with usual and with others."""
    way_forgets: float = 0.01
    """Seconds per second by which the usual delay of a rank's blocks grows, so that a host clock that was set back by
    ten seconds is trusted again after a quarter of an hour ..."""
    clock_jump_s: float = 600.0
    """... and one that was set back by more than blocks are ever delayed, at once."""
    window: int = 256
    """Progress readings from which the usual step is computed."""
    readings_min: int = 4
    """Readings before the usual step counts as known."""
    unknown_s: float = 60.0
    """Deadline while the usual step is unknown ..."""
    unknown_max_s: float = 240.0
    """... unless the first steps take longer: then twice the longest of them, but at most this."""
    first_step_s: float = 1800.0
    """Start, compilation and first collectives of large jobs take a quarter of an hour and more; after the first
    attempt, the time that it took is used."""
    rollback_s: float = 120.0
    """A rollback inside the processes loads a checkpoint before its first step."""
    long_phases: tuple[tuple[str, float], ...] = (
        ("compile", 1800.0),
        ("eval", 1800.0),
        ("checkpoint_save", 900.0),
        ("checkpoint_load", 900.0),
    )
    """Phases that are long by nature, with their deadlines in seconds until the first one has ended."""
    long_factor: float = 3.0
    long_floor_s: float = 60.0
    """Afterwards the deadline is `long_factor` times the longest duration, and at least this."""


class Limits(NamedTuple):
    """Age in seconds at which a standstill is reported as information, as a warning, and as critical."""

    told_s: float
    warned_s: float
    critical_s: float

    def severity(self, age_s: float) -> Severity:
        """Severity of a standstill of this age."""
        if age_s >= self.critical_s:
            return Severity.CRITICAL
        return Severity.WARNING if age_s >= self.warned_s else Severity.INFO

    def not_after(self, seconds: float) -> Limits:
        """The same limits, but critical at this age at the latest."""
        return Limits(*(min(limit, seconds) for limit in self))

    def but_not_before(self, seconds: float) -> Limits:
        """The same limits, but none before this age."""
        return Limits(*(max(limit, seconds) for limit in self))


class Patience(Stateful):
    """Durations learned from a job. Memory: a window of readings, and the longest of each kind of standstill."""

    STATE: ClassVar[tuple[str, ...]] = ("_readings", "_longest")

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self._readings: list[list[float]] = []
        """Signs of progress, newest last: seconds since the last one, and the steps made in them."""
        self._longest: dict[str, float] = {}

    # ---- learning --------------------------------------------------------------------------------------------------

    def learn_steps(self, took_s: float, steps: int) -> None:
        """Learn that this many steps took this time, without pauses."""
        self._readings = [*self._readings, [took_s, float(steps)]][-self._config.window :]

    def learn(self, name: str, lasted_s: float) -> None:
        """Learn that a named standstill ended well after this time."""
        self._longest[name] = max(self._longest.get(name, 0.0), lasted_s)

    def learn_pause(self, lasted_s: float, name: str) -> None:
        """Learn that a pause ended well; one of all ranks below `floor_s` is ignored."""
        if name == PAUSE_APART or lasted_s >= self._config.floor_s:
            self.learn(name, lasted_s)

    @property
    def knows_steps(self) -> bool:
        """Whether the end of any step was seen."""
        return bool(self._readings)

    def usual_step_s(self) -> float:
        """Median step time of the job in seconds; 0 if unknown."""
        if not self._readings:
            return 0.0
        return median(np.array([took_s / steps for took_s, steps in self._readings]))

    # ---- limits ----------------------------------------------------------------------------------------------------

    def in_step(self, *, log: bool, cold: bool, first: str) -> Limits:
        """Limits within a step.

        Args:
            log: only finished steps are reported, by the lines of a log.
            cold: steps may still be slower than those of earlier attempts.
            first: name of the first step of this attempt.
        """
        config = self._config
        if len(self._readings) < config.readings_min:
            seen = [self._longest.get(first, 0.0), *(reading[0] for reading in self._readings)]
            unknown_s = max(config.unknown_s, min(config.slow_steps_factor * max(seen), config.unknown_max_s))
            return Limits(unknown_s, unknown_s, unknown_s)
        # Rounded down, so that a single outlier among a hundred steps is not the 99th percentile.
        took_s = sorted(reading[0] for reading in self._readings)
        last = len(took_s) - 1
        usual, slow = took_s[last // 2], took_s[99 * last // 100]
        enough_s = max(config.slow_steps_factor * slow, config.cold_factor * usual if cold else 0.0, config.floor_s)
        if log:
            lines_s = max(enough_s, config.log_lines * usual, config.prompt_s)
            critical_s = max(lines_s, self._pause_s())
            return Limits(lines_s, critical_s, critical_s)
        told_s = max(enough_s, min(config.steps * usual, config.prompt_s)) - config.reporting_s
        critical_s = max(enough_s, config.critical_steps * usual)
        return Limits(told_s, critical_s, critical_s)

    def pause(self) -> Limits:
        """Limits if all ranks are outside of a step."""
        told_s, critical_s = self._of_pauses(PAUSE)
        return Limits(told_s, critical_s, critical_s).but_not_before(self._pause_s())

    def pause_inside(self, in_step: Limits) -> Limits:
        """Limits if all ranks do work of their own within a step, or wait for data.

        Args:
            in_step: the limits of ranks that wait for each other.
        """
        told_s, critical_s = self._of_pauses(PAUSE_INSIDE)
        warned_s = max(self._pause_s(), self._config.pause_factor * self._longest.get(PAUSE_INSIDE, 0.0))
        return Limits(max(in_step.told_s, told_s), warned_s, critical_s).but_not_before(in_step.told_s)

    def _of_pauses(self, name: str) -> tuple[float, float]:
        """Seconds after which a pause of all ranks is longer than usual, and after which it is critical."""
        config, longest_s = self._config, self._longest.get(name)
        if longest_s is None:
            return 0.0, config.pause_unknown_s
        return config.pause_usual_factor * longest_s, max(config.pause_factor * longest_s, config.pause_known_s)

    def pause_apart(self, in_step: Limits, *, leading: bool) -> Limits:
        """Limits if ranks are outside of a step while others wait within theirs: as within a step, or as learned.

        Args:
            in_step: the limits of the waiting ranks.
            leading: one of those outside does what one rank does for all.
        """
        known_s = self._config.pause_factor * self._longest.get(PAUSE_APART, 0.0)
        told_s = min(max(in_step.told_s, known_s), self._pause_s())
        critical_s = max(self._pause_s() if leading else max(in_step.critical_s, self._config.alone_s), known_s)
        return Limits(told_s, critical_s, critical_s)

    def _pause_s(self) -> float:
        return max(self._config.pause_s, self._config.pause_steps * self.usual_step_s())

    def named(self, name: str, unseen_s: float) -> float:
        """Seconds that a long phase or the first step may take; `unseen_s` until one has ended."""
        longest = self._longest.get(name)
        return unseen_s if longest is None else max(self._config.long_factor * longest, self._config.long_floor_s)


FIRST_STEP = "first step"
FIRST_AFTER_ROLLBACK = "first step after a rollback"
RUNNING = "running"
GRAVITY = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)


@dataclass(frozen=True, slots=True)
class Standstill:
    """A job that has stood still beyond its deadline."""

    stuck: Bools
    age_s: float
    limits: Limits
    paused: bool
    """All ranks in the earliest step are outside of it."""
    together: str
    """What all ranks do, if it is known and the same: `COLLECTIVE` or `OWN`."""


class HangDetector(DispatchingDetector):
    """One episode at a time, scope "job". Memory: 64 bytes for each rank and a window of readings."""

    kind: Kind = Kind.HANG
    COMPARES_RANKS: ClassVar[bool] = True
    STATE: ClassVar[tuple[str, ...]] = (
        *DispatchingDetector.STATE,
        "lockstep",
        "_patience",
        "_newest",
        "_newest_s",
        "_attempt_s",
        "_moved",
        "_cold_until",
        "_orders",
        "_was",
        "_way_s",
        "_way_at_s",
        "_phase_was",
        "_rested",
        "_paused_s",
        "_inside_s",
        "_apart",
        "_stopped",
        "_stopped_at_s",
        "_hosts",
        "_leads",
        "_accelerated",
    )

    LEARNED_FOR_GOOD: ClassVar[tuple[str, ...]] = ("_patience",)

    def __init__(self, config: HangConfig) -> None:
        super().__init__()
        self.name = "hang"
        self.version = 9
        self._config = config
        self._patience = Patience(config)
        self._orders: list[str] = []
        self._hosts: list[str] = []
        self._leads: Bools = np.zeros(0, dtype=np.bool_)
        self._accelerated = False
        self._restart(0)

    def _restart(self, ranks: int) -> None:
        self._newest: int | None = None
        self._newest_s = 0.0
        self._attempt_s = self.now_s
        self._moved = False
        self._cold_until = 0
        """Steps before this one may be slower than those of earlier attempts."""
        self._was: Floats = np.full((4, ranks), math.nan)
        """By rank, when the newest step was first seen: CPU seconds, stream time of the reading, its step, and when it
        entered that step by its host's clock."""
        self._way_s: Floats = np.full(ranks, math.nan)
        """By rank, the least difference between stream time and its host's clock: clock offset plus transport."""
        self._way_at_s = self.now_s
        self._rested: Floats = np.zeros((3, ranks))
        """By rank: its step, seconds that it was outside of the work of that step before it went on with it, and how
        long it has been outside now."""
        self._stands()

    def _stands(self) -> None:
        """Reset what is observed between two signs of progress."""
        self._phase_was: dict[str, float] = {}
        self._paused_s = 0.0
        """Seconds for which all ranks in the earliest step were outside of it."""
        self._inside_s = 0.0
        """Seconds for which all ranks did work of their own within a step."""
        self._apart = False
        """Other ranks waited for them meanwhile."""
        self._stopped = False
        """A rank was stopped by a signal."""
        self._stopped_at_s: float | None = None
        """Since when a rank has been stopped at every tick; None if none is."""

    def _on_attempt(self, start: AttemptStart, *, new_attempt: bool, new_launch: bool) -> Sequence[Finding]:
        self._hosts, self._accelerated = list(start.topology.host), start.topology.accelerated
        self._leads = leading_ranks(start.topology)
        if new_attempt:
            self._restart(start.topology.world_size)
        if new_launch:
            self._orders = []
        return ()

    def _on_occurrence(self, occurrence: Occurrence) -> Sequence[Finding]:
        if occurrence.kind == "order":
            order, phase = str(occurrence.fields.get("order", "")), occurrence.fields.get("phase")
            if order in self._orders:
                self._orders.remove(order)
            # Between hold and go the order itself stops the ranks.
            if phase in ("hold", "do"):
                self._orders.append(order)
        return ()

    def _on_tick(self, presence: Presence | None) -> Sequence[Finding]:
        if presence is None or not anyone(presence.heard):
            return ()
        presence, proper = self._proper(presence)
        fresh = presence.heard & (self.now_s - presence.heard_s <= self._config.heard_within_s) & proper
        fresh &= self._in_time(presence, presence.heard & proper, fresh)
        running = fresh & presence.where("state", RUNNING)
        if not anyone(running):
            return self._close(TRAINING_IS_OVER) if len(self.episodes) and _all_left(presence) else ()
        progressed = self._read(presence, running)
        if progressed and len(self.episodes):
            return self._close(f"The job makes progress again: step {self._newest}.")
        if self._excused(presence):
            return ()
        if _is_over(presence, running):
            return self._close(TRAINING_IS_OVER) if len(self.episodes) else ()
        still = self._standstill(presence, running)
        if still is None:
            return self._close_done()
        missing = who_is_missing(presence, still.stuck, running, self._was[:2], self._config.block_s)
        if not len(self.episodes):
            return self._open(presence, still, missing)
        return self._go_on(still, missing)

    def _proper(self, presence: Presence) -> tuple[Presence, Bools]:
        """The presence with ages limited to the attempt's age, and the ranks whose blocks have finite numbers."""
        ages = np.array([presence.step_age_s, presence.phase_age_s, presence.outside_s])
        proper: Bools = np.logical_and.reduce(np.isfinite(ages)) & np.isfinite(presence.told_s)
        if not everyone(proper):
            ages = np.where(proper, ages, 0.0)
        step_age_s, phase_age_s = np.minimum(np.maximum(ages[:2], 0.0), self.now_s - self._attempt_s)
        outside_s = np.minimum(np.maximum(ages[2], -1.0), step_age_s)
        return replace(presence, step_age_s=step_age_s, phase_age_s=phase_age_s, outside_s=outside_s), proper

    def _in_time(self, presence: Presence, known: Bools, fresh: Bools) -> Bools:
        """Ranks whose blocks arrive without delay, compared with their usual delay and with the fastest rank."""
        delay_s = np.where(known, presence.heard_s - presence.told_s, math.nan)
        usual_s = self._way_s + self._config.way_forgets * (self.now_s - self._way_at_s)
        jumped = delay_s - usual_s > self._config.clock_jump_s
        self._way_s, self._way_at_s = np.where(jumped, delay_s, np.fmin(usual_s, delay_s)), self.now_s
        late_s = delay_s - self._way_s
        soonest_s = late_s[fresh].min() if anyone(fresh) else 0.0
        return np.asarray(late_s - soonest_s <= self._config.heard_within_s)

    def _excused(self, presence: Presence) -> bool:
        """Whether ranks stand still by order, or because a process is gone, which rank_lost reports."""
        return bool(self._orders) or not presence.told("state").isdisjoint(("held", "exited"))

    # ---- progress --------------------------------------------------------------------------------------------------

    def _read(self, presence: Presence, running: Bools) -> bool:
        """Learn from one reading; True if the job's newest step has advanced."""
        newest = int(presence.step[running].max())
        if self._newest is not None and newest <= self._newest:
            self._see(presence, running)
            return False
        # Blocks arrive once a second but contain the step's age, so its start is known more exactly than to a tick.
        ahead = running & (presence.step == newest)
        was, self._was = self._was, _where_each_is(presence)
        entered_s = float((presence.heard_s - presence.step_age_s)[ahead].min())
        if self._newest is not None:
            if not self._moved:
                self._remember(self._first_step()[0], self.now_s - self._attempt_s)
                self._cold_until = newest + self._config.cold_steps if self._patience.knows_steps else newest
            elif not self._standing():
                self._learn_steps(self._was - was, ahead, entered_s - self._newest_s)
                self._patience.learn_pause(self._paused_s, PAUSE_APART if self._apart else PAUSE)
                self._patience.learn_pause(self._inside_s, PAUSE_INSIDE)
            self._moved = True
        for name, lasted_s in self._phase_was.items():
            self._remember(name, lasted_s)
        progressed = self._newest is not None
        self._newest, self._newest_s = newest, entered_s
        self._stands()
        self._see(presence, running)
        return progressed

    def _learn_steps(self, since: Floats, ahead: Bools, apart_s: float) -> None:
        """Learn step times by the ranks' own clocks, since delayed blocks arrive all at once.

        `apart_s`: seconds by stream time, used if these clocks stand still.
        """
        known = ahead & np.isfinite(since[2])
        if anyone(known):
            took = since[3, known]
            took_s = median(took) if not anyone(np.isnan(took)) else math.nan
            took_s = took_s if took_s > 0 else apart_s
            self._patience.learn_steps(max(took_s - self._paused_s, 0.0), max(int(median(since[2, known])), 1))

    def _remember(self, name: str, lasted_s: float) -> None:
        if not len(self.episodes):
            self._patience.learn(name, lasted_s)

    def _first_step(self) -> tuple[str, float]:
        """Name and unlearned deadline of the first step of this attempt."""
        if self.attempt.endswith(".0"):
            return FIRST_STEP, self._config.first_step_s
        return FIRST_AFTER_ROLLBACK, self._config.rollback_s

    def _standing(self) -> bool:
        """Whether the time since the newest step was due to a long phase, an order or a signal, and is not learned."""
        return bool(self._phase_was) or bool(self._orders) or self._stopped

    def _see(self, presence: Presence, running: Bools) -> None:
        """Observe what ranks do between two signs of progress."""
        step, rested_s, was_s = self._rested
        outside_s = np.where(running, np.maximum(presence.outside_s, 0.0), was_s)
        rested_s = np.where(step == presence.step, rested_s + np.where(outside_s < was_s, was_s, 0.0), 0.0)
        self._rested = np.array([presence.step, rested_s, outside_s])
        for name, _ in self._config.long_phases:
            if name in presence.told("phase"):
                inside = running & presence.where("phase", name)
                if anyone(inside):
                    lasted = float(presence.phase_age_s[inside].max())
                    self._phase_was[name] = max(self._phase_was.get(name, 0.0), lasted)
        is_stopped = anyone(running & stopped_ranks(presence))
        self._stopped |= is_stopped
        if not is_stopped:
            self._stopped_at_s = None
        elif self._stopped_at_s is None:
            self._stopped_at_s = self.now_s
        behind, paused = self._behind(presence, running)
        if not paused and self._together(presence, running) == OWN:
            self._inside_s = max(self._inside_s, float(presence.step_age_s[running].max()))
        if paused:
            self._paused_s = max(self._paused_s, float(presence.outside_s[behind].max()))
            self._apart |= _apart(presence, running, behind)

    def _behind(self, presence: Presence, running: Bools) -> tuple[Bools, bool]:
        """The ranks in the earliest step, and whether all of them are outside of it, not stopped by a signal, and not
        ending while others wait.

        If some of them have not begun that step and others have, the former.
        """
        behind = running & (presence.step == presence.step[running].min())
        outside = (presence.outside_s >= 0) & ~stopped_ranks(presence)
        if anyone(ending := running & presence.where("doing", ENDING)) and anyone(waiting_ranks(presence, running)):
            outside &= ~ending
        if anyone(outside[behind]):
            not_begun = behind & outside & has_not_begun(presence)
            behind = not_begun if anyone(not_begun) else behind
        return behind, everyone(outside[behind])

    def _together(self, presence: Presence, running: Bools) -> str:
        """`COLLECTIVE` if all running ranks wait in collectives, `OWN` if all do work of their own, else ""."""
        if int(running.sum()) > 1 and everyone(presence.where("doing", COLLECTIVE)[running]):
            return COLLECTIVE
        for_data = presence.where("phase", "data_wait")
        if self.world_size == 1:
            return OWN if everyone(for_data | presence.where("phase", "")) else ""
        # A host that waits for its device may do so busily, and the device for its peers.
        own = presence.where("doing", OWN) & ~(self._accelerated & presence.where("os_state", "R"))
        return OWN if everyone((own | for_data | presence.where("doing", DATA))[running]) else ""

    # ---- standing still --------------------------------------------------------------------------------------------

    def _standstill(self, presence: Presence, running: Bools) -> Standstill | None:
        behind, paused = self._behind(presence, running)
        limits = self._limits(presence, running, behind, paused=paused)
        lag_s = self.now_s - presence.heard_s
        # What a rank did between two steps is no part of the work that it has begun since.
        in_step_s = presence.step_age_s - np.where(presence.outside_s < 0, self._rested[1], 0.0)
        step_age_s = in_step_s + lag_s
        told_s, standing = (presence.outside_s, behind) if paused else (in_step_s, running)
        stuck = standing & (told_s + lag_s >= limits.told_s)
        # A rank that has begun a step since then is not waiting.
        others = running & ~stuck
        since_s = float(step_age_s[others].min()) if anyone(others) else math.inf
        # Progress since the last block is not visible, so the age within the block itself must nearly reach the limit.
        stuck &= told_s >= limits.told_s - self._config.block_s
        if since_s < limits.told_s or not anyone(stuck):
            return None
        age_s = min(float((told_s + lag_s)[stuck].max()), since_s)
        return Standstill(stuck, age_s, limits, paused, self._together(presence, running))

    def _limits(self, presence: Presence, running: Bools, behind: Bools, *, paused: bool) -> Limits:
        """How long this standstill may last; the phase with the longest deadline on any rank decides for all."""
        # What is usual need not be known: a stopped rank makes no progress, and the others wait for it.
        stopped = self._stopped_at_s is not None and self.now_s - self._stopped_at_s >= self._config.stopped_s
        named_s = [] if self._moved or stopped else [self._patience.named(*self._first_step())]
        phases = [phase for phase in self._config.long_phases if phase[0] in self._phase_was]
        named_s += [self._patience.named(*phase) for phase in phases]
        cold = self._newest is not None and self._newest < self._cold_until
        told = presence.told("phase")
        limits = self._patience.in_step(log=UNREPORTED in told, cold=cold, first=self._first_step()[0])
        together = self._together(presence, running)
        if paused and told.isdisjoint(name for name, _ in phases) and together != COLLECTIVE:
            apart = _apart(presence, running, behind)
            leading = anyone(self._leads[behind])
            limits = self._patience.pause_apart(limits, leading=leading) if apart else self._patience.pause()
        elif together == OWN:
            limits = self._patience.pause_inside(limits)
        if stopped:
            limits = limits.not_after(self._config.stopped_s)
        return limits.but_not_before(max(named_s, default=0.0))

    def _close_done(self) -> Sequence[Finding]:
        """Close the episode if the step's work is done and its ranks are now outside of it."""
        if not len(self.episodes) or not self._paused_s or self.episodes.told(WHOLE_JOB)["evidence"]["outside"]:
            return ()
        return self._close(f"The work of step {self._newest} is done.")

    def _close(self, summary: str) -> list[Finding]:
        stood = {"age_s": self.now_s - self.episodes.told(WHOLE_JOB)["onset_time_s"]}
        return self.episodes.close(WHOLE_JOB, self._newest, self.now_s, summary, stood)

    def _open(self, presence: Presence, still: Standstill, missing: Missing) -> list[Finding]:
        step = int(presence.step[still.stuck].min())
        return self.episodes.open(
            WHOLE_JOB,
            attempt=self.attempt,
            severity=still.limits.severity(still.age_s),
            ranks=missing.ranks,
            onset_step=step,
            detected_step=step,
            onset_time_s=self.now_s - still.age_s,
            detected_time_s=self.now_s,
            score=still.age_s / max(still.limits.told_s / 3, 1e-3),
            confidence=missing.confidence,
            summary=self._summary(step, self.now_s - still.age_s, still, missing),
            evidence=self._evidence(still, missing),
        )

    def _go_on(self, still: Standstill, missing: Missing) -> Sequence[Finding]:
        """Report a higher severity, or a rank that could not be named before: it used CPU while others waited."""
        told = self.episodes.told(WHOLE_JOB)
        severity = max(still.limits.severity(still.age_s), Severity(told["severity"]), key=GRAVITY.index)
        graver = severity != told["severity"]
        named = bool(missing.ranks) and not told["ranks"]
        if not graver and not named:
            return ()
        if not missing.ranks:
            missing = _as_told(told)
        return self.episodes.update(
            WHOLE_JOB,
            severity=severity,
            ranks=missing.ranks,
            confidence=missing.confidence,
            detected_time_s=self.now_s,
            summary=self._summary(told["onset_step"], told["onset_time_s"], still, missing),
            evidence=self._evidence(still, missing),
        )

    def _evidence(self, still: Standstill, missing: Missing) -> Mapping[str, Any]:
        return {
            "age_s": still.age_s,
            "deadline_s": still.limits.told_s,
            "critical_after_s": still.limits.critical_s,
            "outside": still.paused,
            "usual_step_s": self._patience.usual_step_s() if self._patience.knows_steps else None,
            "decided_by": missing.decided_by,
            "missing": missing.described,
            "waiting": missing.waiting,
        }

    def _summary(self, step: int, onset_time_s: float, still: Standstill, missing: Missing) -> str:
        where = f"between two steps, after step {step}," if still.paused else f"in step {step}"
        return f"Training stands still {where} {since(onset_time_s)}{self._verdict(still, missing)}."

    def _verdict(self, still: Standstill, missing: Missing) -> str:
        """Who waits for whom, as the end of a sentence."""
        if still.paused and still.together != COLLECTIVE and (self.world_size == 1 or not missing.ranks):
            return ": an evaluation, a save, or a hang outside of the step"
        if self.world_size == 1:
            return ""
        if missing.ranks:
            first, *others = missing.ranks
            who = f"rank {first}" + (f" on {self._hosts[first]}" if self._hosts[first] and not others else "")
            if others:
                listed = ", ".join(str(rank) for rank in missing.ranks[:NAMED_MAX])
                more = len(missing.ranks) - NAMED_MAX
                hosts = {self._hosts[rank] for rank in missing.ranks}
                who = f"ranks {listed}" + (f" and {more} more" if more > 0 else "")
                who += f" on {hosts.pop()}" if len(hosts) == 1 and all(hosts) else ""
            return f"; the others wait for {who} ({missing.decided_by.replace('it ', 'each ', 1 if others else 0)})"
        if still.together == COLLECTIVE:
            return f"; all {self.world_size} ranks wait in a collective"
        if still.together == OWN:
            return "; no rank waits for another: each does work of its own, or waits for data"
        return NOBODY


NOBODY: Final = "; no rank stands out"
"""The end of a summary that names nobody; where stacks show who stands apart, they say so instead."""


def _where_each_is(presence: Presence) -> Floats:
    """CPU seconds, time of the reading, step, and when it was entered by the host's clock; NaN without a block."""
    rows = [presence.cpu_s, presence.heard_s, presence.step, presence.told_s - presence.step_age_s]
    return np.where(presence.heard, np.array(rows), math.nan)


def _as_told(told: Mapping[str, Any]) -> Missing:
    """The missing ranks of the newest finding."""
    evidence = told["evidence"]
    ranks, confidence = tuple(told["ranks"]), told["confidence"]
    return Missing(ranks, evidence["decided_by"], confidence, evidence["missing"], evidence["waiting"])


TRAINING_IS_OVER = "Training is over: ranks have left their loops after the same step."


def _all_left(presence: Presence) -> bool:
    return everyone(presence.where("state", "left")[presence.heard])


def _is_over(presence: Presence, running: Bools) -> bool:
    """Whether ranks have left their loops and the others are done with the same step, or all that are left are ending:
    what these do is no training.
    """
    if everyone(presence.where("doing", ENDING)[running]):
        return True
    left = presence.heard & presence.where("state", "left")
    if not anyone(left) or not everyone((presence.outside_s >= 0)[running]):
        return False
    return bool(presence.step[left].max() >= presence.step[running].max())


def _apart(presence: Presence, running: Bools, behind: Bools) -> bool:
    """Whether others wait for the ranks behind: in a later step, or in a collective that not all of these are in."""
    waiting = presence.where("phase", "collective") & behind
    return anyone(running & ~behind) or (anyone(waiting) and not everyone(waiting[behind]))
