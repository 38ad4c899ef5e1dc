"""How long a job may stand still before it is told: learned from how long its steps, pauses and long phases took."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from rankwatch_detectors.base import Severity
from rankwatch_detectors.state import Stateful

PAUSE = "pause"
PAUSE_APART = "pause apart"


@dataclass(frozen=True, slots=True)
class HangConfig:
    """Settings of the hang detector; seconds unless said otherwise."""

    steps: float = 3.0
    """A standstill of so many usual steps within a step is told ..."""
    floor_s: float = 5.0
    """... but not one shorter than this ..."""
    prompt_s: float = 8.0
    """... and one of so long is, unless the job's slowest steps say otherwise: every second costs all GPUs."""
    slow_steps_factor: float = 2.0
    """Twice what one step in a hundred exceeds is never too short ..."""
    cold_steps: int = 50
    """... but for the first steps after a restart, in which caches fill and kernels are tuned ..."""
    cold_factor: float = 4.0
    """... and which take up to three times as long: four usual steps are not too short for them."""
    critical_steps: float = 4.5
    """After so many usual steps, after `floor_s` and after `slow_steps_factor` somebody must act: two and a half times
    the usual step happens to jobs that are well, and is told but wakes nobody."""
    block_s: float = 1.0
    """Progress blocks and ticks come so often."""
    reporting_s: float = 1.5
    """Half of both is what finding takes on average, this at most nearly always. It is taken off the time after which
    a standstill is told, so that the whole keeps the promise; not off the time after which somebody must act."""
    pause_s: float = 60.0
    """Outside of a step loops evaluate, save, log: what takes no longer than this is nobody's business ..."""
    pause_steps: float = 20.0
    """... nor what takes no longer than so many usual steps."""
    pause_factor: float = 3.0
    """So many times the longest pause that ended well in this job, somebody must act ..."""
    pause_unknown_s: float = 900.0
    """... or after this, while none is known: an evaluation of a quarter of an hour is one that people label."""
    log_lines: float = 8.0
    """Where only a log's lines tell of finished steps, evaluations, saves and waits for data look like any pause: they
    take a few lines every day. Eight are more than that, and not less than `prompt_s`."""
    heard_within_s: float = 5.0
    """Older progress blocks say nothing about now, nor do those that came so much later than usual and than others'."""
    way_forgets: float = 0.01
    """Seconds a second by which the usual way of a rank's blocks gets longer: a clock that was put back by ten seconds
    is believed again after a quarter of an hour ..."""
    clock_jump_s: float = 600.0
    """... and one that was put back by more than blocks ever take to come, at once."""
    window: int = 256
    """Progress readings that are remembered for the usual step."""
    readings_min: int = 4
    """Readings before the usual step counts as known."""
    unknown_s: float = 60.0
    """Deadline while the usual step is unknown ..."""
    unknown_max_s: float = 240.0
    """... but where the first ones take longer: then it is twice the longest of them, and this at most."""
    first_step_s: float = 1800.0
    """Start, compilation, first collectives of large jobs take a quarter of an hour and more; after one attempt its
    own time decides."""
    rollback_s: float = 120.0
    """A rollback inside the processes loads a checkpoint before its first step."""
    long_phases: tuple[tuple[str, float], ...] = (
        ("compile", 1800.0),
        ("eval", 1800.0),
        ("checkpoint_save", 900.0),
        ("checkpoint_load", 900.0),
    )
    """Phases that are long by nature, with their deadlines until one has been seen."""
    long_factor: float = 3.0
    long_floor_s: float = 60.0
    """A phase seen before has so many times its longest duration, and at least this."""


class Limits(NamedTuple):
    """Seconds of a standstill after which it is told, as what, and after which somebody must act."""

    told_s: float
    told_as: Severity
    critical_s: float

    def severity(self, age_s: float) -> Severity:
        """What a standstill of this age is."""
        return Severity.CRITICAL if age_s >= self.critical_s else self.told_as

    def but_not_before(self, seconds: float) -> Limits:
        """The same with more patience."""
        return Limits(max(self.told_s, seconds), self.told_as, max(self.critical_s, seconds))


class Patience(Stateful):
    """What a job has shown of itself. Memory: a window of readings, and the longest of each kind of standstill."""

    STATE: ClassVar[tuple[str, ...]] = ("_readings", "_longest")

    def __init__(self, config: HangConfig) -> None:
        self._config = config
        self._readings: list[list[float]] = []
        """Signs of progress, newest last: seconds since the one before, and the steps done in them."""
        self._longest: dict[str, float] = {}

    # ---- learning --------------------------------------------------------------------------------------------------

    def learn_steps(self, took_s: float, steps: int) -> None:
        """So many steps were made in this time, pauses left out."""
        self._readings = [*self._readings, [took_s, float(steps)]][-self._config.window :]

    def learn(self, name: str, lasted_s: float) -> None:
        """A named standstill ended well after this time."""
        self._longest[name] = max(self._longest.get(name, 0.0), lasted_s)

    def learn_pause(self, lasted_s: float, *, apart: bool) -> None:
        """A pause ended well; one of all ranks that would be too short for a hang within a step is no pause."""
        if apart or lasted_s >= self._config.floor_s:
            self.learn(PAUSE_APART if apart else PAUSE, lasted_s)

    @property
    def knows_steps(self) -> bool:
        """Whether any step was seen to end."""
        return bool(self._readings)

    def usual_step_s(self) -> float:
        """Median step time of the job in seconds; 0 while none is known."""
        if not self._readings:
            return 0.0
        return float(np.median([took_s / steps for took_s, steps in self._readings]))

    # ---- limits ----------------------------------------------------------------------------------------------------

    def in_step(self, *, log: bool, cold: bool, first: str) -> Limits:
        """Within a step.

        Args:
            log: only finished steps are told, by the lines of a log.
            cold: steps may still be slower than those of attempts before.
            first: name of the first step of this attempt.
        """
        config = self._config
        if len(self._readings) < config.readings_min:
            seen = [self._longest.get(first, 0.0), *(reading[0] for reading in self._readings)]
            unknown_s = max(config.unknown_s, min(config.slow_steps_factor * max(seen), config.unknown_max_s))
            return Limits(unknown_s, Severity.CRITICAL, unknown_s)
        # The lower of two neighbours: one odd step among a hundred decides nothing.
        took_s = sorted(reading[0] for reading in self._readings)
        last = len(took_s) - 1
        usual, slow = took_s[last // 2], took_s[99 * last // 100]
        enough_s = max(config.slow_steps_factor * slow, config.cold_factor * usual if cold else 0.0, config.floor_s)
        if log:
            lines_s = max(enough_s, config.log_lines * usual, config.prompt_s)
            return Limits(lines_s, Severity.CRITICAL, lines_s)
        told_s = max(enough_s, min(config.steps * usual, config.prompt_s)) - config.reporting_s
        return Limits(told_s, Severity.INFO, max(enough_s, config.critical_steps * usual))

    def pause(self) -> Limits:
        """Outside of a step, all ranks."""
        config = self._config
        known_s = config.pause_factor * self._longest[PAUSE] if PAUSE in self._longest else config.pause_unknown_s
        return Limits(self._pause_s(), Severity.WARNING, max(self._pause_s(), known_s))

    def pause_apart(self, in_step: Limits) -> Limits:
        """Outside of a step, while others wait within theirs: told as soon as within a step, or as this job knows it.

        Args:
            in_step: the limits of those that wait.
        """
        known_s = self._config.pause_factor * self._longest.get(PAUSE_APART, 0.0)
        told_s = min(max(in_step.told_s, known_s), self._pause_s())
        return Limits(told_s, Severity.INFO, max(self._pause_s(), known_s))

    def _pause_s(self) -> float:
        return max(self._config.pause_s, self._config.pause_steps * self.usual_step_s())

    def named(self, name: str, unseen_s: float) -> float:
        """Seconds that a phase which is long by nature, or the first step, may take."""
        longest = self._longest.get(name)
        return unseen_s if longest is None else max(self._config.long_factor * longest, self._config.long_floor_s)
