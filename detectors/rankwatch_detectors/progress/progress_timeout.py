"""How long a standstill may last: limits that are learned from a job's steps, pauses and long phases. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from rankwatch_detectors.base import Severity
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import median

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
    pause_known_s: float = 300.0
    """... but not before this if all ranks pause: what comes after the last step is often longer ..."""
    pause_unknown_s: float = 900.0
    """... nor before this while no pause is known: people mark evaluations of a quarter of an hour as phases."""
    alone_s: float = 15.0
    """If the others wait within a step, a pause is critical after `pause_s`, since rank 0 or the first rank of a host
    saves for all; that of any other rank after this: it fetches data, collects garbage, or will not come back."""
    log_lines: float = 8.0
    """A standstill is reported after this many usual steps, and `prompt_s`, if only a log's lines report finished
    steps. Evaluations, saves and waits for data are then not distinguishable, so it is critical only when a pause
    outside of a step would be reported."""
    received_within_s: float = 5.0
    """Blocks older than this are not used, nor those delayed by more than this compared with usual and with others."""
    way_forgets: float = 0.01
    """Seconds per second by which the usual delay of a rank's blocks grows, so that a host clock that was set back by
    ten seconds is trusted again after a quarter of an hour ..."""
    clock_jump_s: float = 600.0
    """... and one that was set back by more than blocks are ever delayed, at once."""
    window: int = 256
    """Progress readings from which the usual step is computed."""
    readings_min: int = 4
    """Readings before the usual step counts as known ..."""
    steps_min: int = 32
    """... or half as many, if they are of so many steps together."""
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

    @property
    def least_s(self) -> float:
        """No deadline is shorter."""
        return min(self.floor_s - self.reporting_s, self.stopped_s, self.pause_s)


class Limits(NamedTuple):
    """Age in seconds at which a standstill is reported as information, as a warning, and as critical."""

    sent_s: float
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


class ProgressTimeout(Stateful):
    """Durations learned from a job. Memory: a window of readings, and the longest of each kind of standstill."""

    STATE: ClassVar[str] = "_readings _from_rows _longest"

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self._readings: list[list[float]] = []
        """Signs of progress, newest last: seconds since the last one, and the steps made in them."""
        self._from_rows: list[list[float]] = []
        """The same, by the rows of steps, while too little progress was seen: after an outage all blocks of a host
        arrive at once, and only the newest is seen."""
        self._longest: dict[str, float] = {}

    # ---- learning --------------------------------------------------------------------------------------------------

    def learn_steps(self, took_s: float, steps: int) -> None:
        """Learn that this many steps took this time, without pauses."""
        self._readings = [*self._readings, [took_s, float(steps)]][-self._config.window :]

    def learn_row(self, took_s: float) -> None:
        """Learn from its row that a step after the first one took this time; used while the usual step is unknown."""
        if self.knows_by_progress:
            return
        if not self._from_rows or self._from_rows[-1][0] >= self._config.block_s:
            self._from_rows = [*self._from_rows, [0.0, 0.0]][-self._config.window :]
        before_s, steps = self._from_rows[-1]
        self._from_rows[-1] = [before_s + took_s, steps + 1.0]

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
        return bool(self._known())

    @property
    def knows_by_progress(self) -> bool:
        """Whether progress alone tells enough, so that rows are not looked at."""
        return self._suffice(self._readings)

    @property
    def knows_usual_step(self) -> bool:
        """Whether enough steps were seen to know how long one takes."""
        return self._suffice(self._known())

    def _suffice(self, readings: list[list[float]]) -> bool:
        count, least = len(readings), self._config.readings_min
        return count >= least or (2 * count >= least and sum(steps for _, steps in readings) >= self._config.steps_min)

    def _known(self) -> list[list[float]]:
        """The source of step times: progress, or rows as long as only these are enough."""
        if self._from_rows and not self.knows_by_progress and self._suffice(self._from_rows[:-1]):
            return self._from_rows[:-1]
        return self._readings

    def usual_step_s(self) -> float:
        """Median step time of the job in seconds; 0 if unknown."""
        known = self._known()
        return median(np.array([took_s / steps for took_s, steps in known])) if known else 0.0

    # ---- limits ----------------------------------------------------------------------------------------------------

    def in_step(self, *, log: bool, cold: bool, first: str) -> Limits:
        """Limits within a step.

        Args:
            log: only finished steps are reported, by the lines of a log.
            cold: steps may still be slower than those of earlier attempts.
            first: name of the first step of this attempt.
        """
        config, known = self._config, self._known()
        if not self._suffice(known):
            seen = [self._longest.get(first, 0.0), *(reading[0] for reading in known)]
            unknown_s = max(config.unknown_s, min(config.slow_steps_factor * max(seen), config.unknown_max_s))
            return Limits(unknown_s, unknown_s, unknown_s)
        # Rounded down, so that a single outlier among a hundred steps is not the 99th percentile.
        took_s = sorted(reading[0] for reading in known)
        last = len(took_s) - 1
        usual, slow = took_s[last // 2], took_s[99 * last // 100]
        enough_s = max(config.slow_steps_factor * slow, config.cold_factor * usual if cold else 0.0, config.floor_s)
        if log:
            lines_s = max(enough_s, config.log_lines * usual, config.prompt_s)
            critical_s = max(lines_s, self._pause_s())
            return Limits(lines_s, critical_s, critical_s)
        sent_s = max(enough_s, min(config.steps * usual, config.prompt_s)) - config.reporting_s
        critical_s = max(enough_s, config.critical_steps * usual)
        return Limits(sent_s, critical_s, critical_s)

    def pause(self) -> Limits:
        """Limits if all ranks are outside of a step."""
        sent_s, critical_s = self._of_pauses(PAUSE)
        return Limits(sent_s, critical_s, critical_s).but_not_before(self._pause_s())

    def pause_inside(self, in_step: Limits) -> Limits:
        """Limits if all ranks do work of their own within a step, or wait for data.

        Args:
            in_step: the limits of ranks that wait for each other.
        """
        sent_s, critical_s = self._of_pauses(PAUSE_INSIDE)
        warned_s = max(self._pause_s(), self._config.pause_factor * self._longest.get(PAUSE_INSIDE, 0.0))
        return Limits(max(in_step.sent_s, sent_s), warned_s, critical_s).but_not_before(in_step.sent_s)

    def for_data(self, in_step: Limits) -> Limits:
        """Limits if ranks wait for their data within a step, and others for them: loader workers may be starting."""
        late_s = max(in_step.critical_s, self._config.alone_s)
        return Limits(in_step.sent_s, late_s, late_s)

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
        sent_s = min(max(in_step.sent_s, known_s), self._pause_s())
        critical_s = max(self._pause_s() if leading else max(in_step.critical_s, self._config.alone_s), known_s)
        return Limits(sent_s, critical_s, critical_s)

    def _pause_s(self) -> float:
        return max(self._config.pause_s, self._config.pause_steps * self.usual_step_s())

    def named(self, name: str, unseen_s: float) -> float:
        """Seconds that a long phase or the first step may take; `unseen_s` until one has ended."""
        longest = self._longest.get(name)
        return unseen_s if longest is None else max(self._config.long_factor * longest, self._config.long_floor_s)
