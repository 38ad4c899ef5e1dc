"""What a job changes intentionally, so that what it was before is no measure any more.

Events say so: a script declares a change, or the probe sees another model or optimizer in the same process. So do
logged metrics: the learning rate, and the amount of work in a step.

A rising learning rate explains a rising loss (warm-up, warm restarts); a falling one does not. Batch sizes and token
counts explain it in either direction, once their average has changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Frame, Kind, Occurrence
from rankwatch_detectors.dispatch import typical
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import median

RATES = ("lr", "learning_rate")
AMOUNTS = ("tokens", "batch_size", "global_batch_size")
WORK = "step_work"
"""Elements of a step's inputs, as a multiple of the first step's; not reported as long as all steps are alike."""

WORK_ALIKE = 0.01
"""Amounts of work that differ by less are equal."""


@dataclass(frozen=True, slots=True)
class Changed:
    """An intended change of the training."""

    what: str
    """One sentence."""
    step: int
    """The first step with it; -1: not known, so from now on."""


def change_in(occurrence: Occurrence, attempt: str) -> Changed | None:
    """The change of which an event of this attempt informs, if any."""
    if occurrence.kind != "declared" or occurrence.attempt != attempt:
        return None
    who = "Training goes on with" if occurrence.fields.get("kind") else "The job declared a change:"
    return Changed(f"{who} {occurrence.fields.get('what')}.", -1 if occurrence.step is None else occurrence.step)


def why_anew(occurrence: Occurrence, attempt: str, *kinds: Kind) -> str:
    """Why what was usual is no measure any more, as a sentence: a change, or a person who accepts the present level of
    one of these kinds; "" if the event is of neither.
    """
    if (change := change_in(occurrence, attempt)) is not None:
        return change.what
    accepted = occurrence.kind == "accepted" and not {*kinds}.isdisjoint(occurrence.fields.get("kinds", ()))
    return "The level was accepted." if accepted else ""


@dataclass(frozen=True, slots=True)
class GrowthConfig:
    """What no declared change explains."""

    points: int = 8
    """The median of so many points is compared: a few bad batches are no growth."""
    ratio: float = 10.0
    """As for a curve that runs away (`SettlingConfig.away_ratio`): a new task may be several times as hard."""


class Growth(Stateful):
    """A curve compared with the level before a declared change, as long as the new level is not known.

    The first points after the change may be higher, however much: they are the level then. Further changes in the
    meantime do not move it, so that nobody hides a curve that grows by declaring one change after the other.
    """

    STATE: ClassVar[str] = "_former _unit _newest _pushed level now step"

    def __init__(self, config: GrowthConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """No change is unknown in its effect."""
        self._former, self._unit, self._newest, self._pushed = 0.0, 0.0, list[float](), 0
        self.level = 0.0
        """What the curve is compared with."""
        self.now = 0.0
        self.step = 0
        """In which the change was declared."""

    def begin(self, level: float, unit: float, step: int) -> None:
        """A change is declared.

        Args:
            level: of the curve before it.
            unit: for multiples of the level; positive.
            step: in which it is declared.
        """
        if not self._unit:
            self._former, self._unit, self.level, self.step = level, unit, level, step

    def push(self, value: float) -> bool:
        """Add one finite point; return whether the curve has grown beyond what a change explains."""
        config = self._config
        if not self._unit:
            return False
        self._newest, self._pushed = [*self._newest, value][-config.points :], self._pushed + 1
        if len(self._newest) < config.points:
            return False
        self.now = median(np.asarray(self._newest))
        if self._pushed == config.points and self.now > self.level:
            self.level, self._unit = self.now, max(self._unit, abs(self.now))
        if self.now <= self._former:
            self.clear()
            return False
        return self.excess >= config.ratio - 1.0

    @property
    def excess(self) -> float:
        """How far the curve is above the level, in its units."""
        return (self.now - self.level) / self._unit if self._unit else 0.0


class NewLevel(Stateful):
    """The level of a series since a change was declared in an open episode. Memory: its points."""

    STATE: ClassVar[str] = "_points"
    POINTS: ClassVar[int] = 128
    """A level that has not risen over so many points has stayed."""

    def __init__(self) -> None:
        self._points: list[float] = []

    def __bool__(self) -> bool:
        return bool(self._points)

    def begin(self, value: float) -> None:
        """A change is declared; further ones before the level is known do not begin anew.

        Args:
            value: the newest point.
        """
        self._points = self._points or [value]

    def clear(self) -> None:
        """The episode is over."""
        self._points = []

    def push(self, value: float, least_rise: float) -> float | None:
        """Add a point, if a change was declared; return the new level once it has stayed.

        Args:
            value: of the point.
            least_rise: by how much its later half must be above its earlier half to rise.
        """
        if not self._points:
            return None
        self._points = [*self._points, value][-self.POINTS :]
        if len(self._points) < self.POINTS:
            return None
        earlier, later = (median(half) for half in np.split(np.asarray(self._points), 2))
        return None if later - earlier > least_rise else later


class Declared(StrEnum):
    """How much a logged schedule changed."""

    GRADUAL = "gradual"
    """Over many rows: earlier levels are no longer comparable."""
    SHARP = "sharp"
    """From one row to the next: the curve may jump with it."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """What counts as a change."""

    rates: tuple[str, ...] = RATES
    amounts: tuple[str, ...] = AMOUNTS
    ratio: float = 1.1
    sharp_ratio: float = 1.5
    amount_rows: int = 32
    """Length of the average of amounts, which differ from batch to batch."""
    steps_up: bool = True
    """More work in a step, after as many steps with equal work, is a change too: larger images, longer sequences."""
    new_rows: int = 8
    """Rows after which another amount of work is the usual one, and no last batch of an epoch."""


class Schedule(Stateful):
    """The schedule of a job as it logs it. Memory: a few numbers for each metric."""

    STATE: ClassVar[str] = "_rate _reference _amounts _work _other"

    def __init__(self, config: ScheduleConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget the schedule, for a new launch, which may have another one."""
        self._rate: float | None = None
        self._reference: float | None = None
        """The lowest rate since the last declared change."""
        self._amounts: dict[str, list[float]] = {}
        """Its average, and that average at the last declared change, by metric."""
        self._work, self._other = [0.0, 1.0], [0.0, 1.0]
        """For how many rows the work in a step has been so much, and another amount since."""

    def push(self, frame: Frame) -> Declared | None:
        """Add one frame; return the change that it declares, if any."""
        turn = Declared.SHARP if self._config.steps_up and self._steps_up(typical(frame, WORK) or 1.0) else None
        for name in self._config.amounts:
            if name in frame.values and (amount := typical(frame, name)) is not None and amount > 0:
                turn = self._amount(name, amount) or turn
        for name in self._config.rates:
            if name in frame.values and (rate := typical(frame, name)) is not None and rate >= 0:
                return self._learning_rate(rate) or turn
        return turn

    def _steps_up(self, work: float) -> bool:
        """Whether a step has more to do than all those before it."""
        config, (rows, usual) = self._config, self._work
        if abs(work / usual - 1.0) < WORK_ALIKE:
            self._work, self._other = [rows + 1.0, usual], [0.0, 1.0]
            return False
        others, other = self._other
        self._other = [others + 1.0 if abs(work / other - 1.0) < WORK_ALIKE else 1.0, work]
        up = rows >= config.amount_rows and work >= config.ratio * usual
        if up or self._other[0] >= config.new_rows:
            self._work, self._other = [self._other[0], work], [0.0, 1.0]
        else:
            self._work = [rows / 2, usual]  # that of uneven steps is never known
        return up

    def _learning_rate(self, rate: float) -> Declared | None:
        config = self._config
        before, reference = self._rate, self._reference
        self._rate = rate
        if before is None or reference is None or rate <= config.ratio * reference:
            self._reference = rate if reference is None else min(reference, rate)
            return None
        self._reference = rate
        return Declared.SHARP if rate > config.sharp_ratio * before else Declared.GRADUAL

    def _amount(self, name: str, amount: float) -> Declared | None:
        config = self._config
        first = 1.0 if name == WORK else amount
        average, reference = self._amounts.get(name, [first, first])
        average += (amount - average) / config.amount_rows
        changed = not 1 / config.ratio <= average / reference <= config.ratio
        self._amounts[name] = [average, average if changed else reference]
        return Declared.GRADUAL if changed else None
