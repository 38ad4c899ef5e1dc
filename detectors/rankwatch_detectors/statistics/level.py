"""Watches the level of one series of a job: whether it jumps, and whether it comes back.

The level is the median of the newest points. The scale is their usual distance from it, tails included, so that noisy
batches widen the scale instead of opening episodes. Two tests run in parallel: one point far out, and a sum of
moderately high points (a CUSUM in units of the scale). During an episode nothing is learned: points are judged against
the level before it.

A training that goes back, or is started again from a checkpoint, goes on at the level that the curve had at that step:
a loss that is higher than it was there is a jump.

A series may have several levels: tasks in turn, an evaluation among the training steps, a critic that is trained more
at times. So episodes that came back by themselves are remembered with their height and length. Once three are as high
and as long, further ones are the character of the series, and are not reported.

Peaks within a divergence, or just before it, are found apart: while an episode is open, points are compared with the
level before it, so a spike during a climb opens no other one. There a point is compared with the median of the points
just before it, in units of their scatter, so that a climb alone is no peak.

Curves of a new network move: norms grow eightfold within tens of steps, losses of adversaries climb and fall in turn.
So a curve's level is not judged before it is 256 steps old and four blocks of 32 points are known. From then on only a
rise of more than three times the usual one from block median to block median is reported. The usual rise is the root
mean square over the newest blocks: for noise alone the standard deviation of a median, for a climb its slope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import median
from rankwatch_detectors.statistics.series import RollingQuantiles


@dataclass(frozen=True, slots=True)
class PeakConfig:
    """What a peak is, and how many are kept."""

    points: int = 16
    sigmas: float = 8.0
    """As for a point that doubles a loss (`LevelConfig.ratio_sigmas`)."""
    kept: int = 16


class Peaks(Stateful):
    """The newest peaks of one series. Memory: its window and the peaks."""

    STATE: ClassVar[str] = "_window _inside _peaks"

    def __init__(self, config: PeakConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget all points and peaks, for a new attempt."""
        self._window: list[float] = []
        self._inside = False
        self._peaks: list[dict[str, Any]] = []

    def push(self, step: int, value: float, scale: float) -> bool:
        """Add one finite point; return whether a peak has begun or become higher."""
        config, window = self._config, self._window
        usual = median(window) if len(window) == config.points else value
        around = SIGMAS_OF_MIDDLE * median([abs(point - usual) for point in window]) if window else 0.0
        self._window = [*window, value][-config.points :]
        before, self._inside = self._inside, value - usual >= config.sigmas * max(scale, around, 1e-12)
        if not self._inside:
            return False
        if before and value <= self._peaks[-1]["value"]:
            return False
        if not before:
            self._peaks = [*self._peaks, {"step": step}][-config.kept :]
        self._peaks[-1] |= {"value": value, "height": value - usual}
        return True

    def since(self, step: int) -> list[dict[str, Any]]:
        """The peaks from a step on, oldest first: the step in which each began, its highest value, and its height
        above the points before it.
        """
        return [dict(peak) for peak in self._peaks if peak["step"] >= step]


@dataclass(frozen=True, slots=True)
class SettlingConfig:
    """When a curve has a level. Points are logged values, which may come every hundredth step."""

    young_steps: int = 256
    """Steps after which new networks of a dozen kinds, with and without warm-up, are stable."""
    block_points: int = 32
    """The number of points in the level's median: a rise that the level would follow is a rise between blocks."""
    rises_min: int = 3
    rises_kept: int = 7
    """Together with the current block as many points as the scatter is learned from."""
    rise_factor: float = 3.0
    history_kept: int = 64
    """Blocks whose level is remembered, for a training that goes back to an earlier step."""
    away_ratio: float = 10.0
    """A curve runs away if its newest block is so many times its lowest one, ..."""
    away_rise: float = 1.25
    """... each of the newest three blocks so many times the one before, ..."""
    away_slowing: float = 0.8
    """... and none of these ratios smaller than this share of the ratio before: a loss that grows as returns do slows
    down."""
    away_sigmas: float = 4.0
    """Ratios mean something only if the lowest block is so far above zero, in units of its own scatter."""


class Settling(Stateful):
    """The age of one series, and its levels and rises from block to block. Memory: 2 KB."""

    STATE: ClassVar[str] = (
        "_age _step _block _last _rises _ratios _history _blocks _blocks_apart lowest lowest_step highest"
    )

    def __init__(self, config: SettlingConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget everything: the curve begins anew, or changes intentionally."""
        self._age = 0
        self._rises: list[float] = []
        self.lowest = math.inf
        """The level of the lowest block."""
        self.lowest_step = 0
        self.highest = 0.0
        """The level of the highest block; 0 before the first is full."""
        self._history: list[list[float]] = []
        """Last step and level of every block or, of a long curve, of every so many."""
        self._blocks = 0
        self._blocks_apart = 1
        self.interrupt()

    def interrupt(self) -> None:
        """The next point does not continue the last block, though the curve is the same."""
        self._step: int | None = None
        self._block: list[float] = []
        self._last: float | None = None
        self._ratios: list[float] = []
        """Of each of the newest blocks to the one before."""

    def advance(self, step: int) -> None:
        """Increase the curve's age by a point, whether the point is learned or not."""
        if self._step is not None:
            self._age += max(step - self._step, 0)
        self._step = step

    def learn(self, point: float) -> None:
        """Add a finite point that is not under suspicion."""
        self._block.append(point)
        if len(self._block) < self._config.block_points:
            return
        block = np.asarray(self._block)
        level = median(block)
        if self._last is not None:
            self._rises = [*self._rises, max(level - self._last, 0.0)][-self._config.rises_kept :]
            self._ratios = [*self._ratios, level / self._last if self._last > 0.0 else math.inf][-3:]
        changes = np.diff(block)  # a steady growth is no scatter
        proper = level > self._config.away_sigmas * SIGMAS_OF_MIDDLE * median(np.abs(changes - median(changes)))
        self.highest = max(self.highest, level)
        if level < self.lowest:
            self.lowest, self.lowest_step = level if proper else -math.inf, self._step or 0
        self._block, self._last = [], level
        self._remember(level)

    def _remember(self, level: float) -> None:
        self._blocks += 1
        if self._blocks % self._blocks_apart == 0 and self._step is not None:
            self._history.append([self._step, level])
        if len(self._history) > self._config.history_kept:
            del self._history[::2]
            self._blocks_apart *= 2

    def resume(self, step: int) -> float | None:
        """The curve goes on at a step that it may have passed; returns its level just before, if that is known.

        What came afterwards is forgotten.
        """
        if self.lowest_step >= step:
            self.lowest, self.lowest_step = math.inf, 0
        self._history = [one for one in self._history if one[0] < step]
        if not self._history:
            return None
        self._age = min(self._age, step)
        return self._history[-1][1]

    @property
    def runs_away(self) -> bool:
        """Whether the curve has grown exponentially since its lowest block, which may be its first."""
        config, ratios = self._config, self._ratios
        if self._last is None or len(ratios) < 3 or self._block:
            return False
        grows = all(config.away_rise <= ratio < math.inf for ratio in ratios)
        slows = any(later < config.away_slowing * ratio for ratio, later in pairwise(ratios))
        return grows and not slows and self._last >= config.away_ratio * self.lowest > 0.0

    @property
    def young(self) -> bool:
        """Whether the curve is in its first `young_steps`, in which findings are only information."""
        return self._age < self._config.young_steps

    @property
    def least(self) -> float:
        """The least rise of the level that is reported; infinite while the curve has no level."""
        if self.young or len(self._rises) < self._config.rises_min:
            return math.inf
        mean_square = sum(rise * rise for rise in self._rises) / len(self._rises)
        return self._config.rise_factor * math.sqrt(mean_square)


@dataclass(frozen=True, slots=True)
class ExcursionConfig:
    """Which excursions are the character of a series."""

    usual: int = 3
    """At least so many excursions that came back ..."""
    height_ratio: float = 1.5
    """... of which each was so high that this multiple of it reaches the new one, ..."""
    length_ratio: float = 2.0
    """... and so long that this multiple of it does."""
    kept: int = 16
    """The highest are remembered, ..."""
    points: int = 5_000
    """... for so many points."""


class Excursions(Stateful):
    """Excursions of one series that came back by themselves. Memory: the highest."""

    STATE: ClassVar[str] = "_points _kept count"

    def __init__(self, config: ExcursionConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget all: another curve begins."""
        self._points = 0
        self._kept: list[list[float]] = []
        """Point of the end, height and length in points of each, by height."""
        self.count = 0
        """How many came back since the last time that none was remembered."""

    def advance(self) -> None:
        """The series has one more point."""
        self._points += 1
        if self._kept:
            self._kept = [one for one in self._kept if self._points - one[0] <= self._config.points]
            self.count = self.count if self._kept else 0

    def came_back(self, height: float, length: int) -> None:
        """Add one that is over."""
        self.count += 1
        self._kept.append([self._points, height, length])
        self._kept = sorted(self._kept, key=lambda one: -one[1])[: self._config.kept]

    def like(self, height: float, length: int) -> int:
        """How many of those remembered were as high and as long as this."""
        config = self._config
        return sum(
            height <= config.height_ratio * known and length <= config.length_ratio * points
            for _, known, points in self._kept
        )

    def is_usual(self, height: float, length: int) -> bool:
        """Whether an excursion of this height and length is in character."""
        return self.like(height, length) >= self._config.usual


def last_digit(value: float) -> float:
    """The unit of the last digit of a value as it is printed, at most 1; of a value that is not printed, tiny."""
    printed, _, exponent = f"{value:.6g}".partition("e")
    return 10.0 ** min(int(exponent or 0) - len(printed.partition(".")[2]), 0)


VALUE_MAX = 1e100
"""Larger values are cut to this: no real curve has them, and their sums would overflow."""
SIGMAS_OF_MIDDLE = 1.4826
"""Standard deviations of a normal distribution in the median distance from its middle."""
LEVEL_SIGMAS = 10.0
REACH_SIGMAS = 5.0
"""Largest distance from the level, in sigmas, that a point adds to the scale."""


@dataclass(frozen=True, slots=True)
class LevelConfig:
    """How a series is judged. Points are logged steps; sigmas are in units of the series' own scale."""

    logarithmic: bool = False
    """Judge the logarithm: for positive series whose scatter grows with their level."""
    level_points: int = 32
    """Long enough to ignore a bad batch, short enough to follow the falling early curve."""
    scatter_points: int = 256
    warm_points: int = 32
    jump_sigmas: float = 13.0
    """One point this far out is reported at once. Single bad batches of clean public runs are up to 12 scales out."""
    ratio_jump: float = 2.0
    ratio_sigmas: float = 8.0
    """A point this far out that is `ratio_jump` times the level is reported at once too: no batch doubles a loss."""
    ratio_level_sigmas: float = 4.0
    """Multiples of the level are used only if it is at least this many sigmas above zero."""
    ratio_sure: float = 1000.0
    """In logarithmic series, a point this many times the level is reported whatever the scatter."""
    drift_allowance: float = 1.5
    drift_limit: float = 9.0
    drift_clip: float = 5.0
    """A shift of 5 sigmas adds 3.5 per point and is reported at the third; two stray points in a row are not enough."""
    drift_run_points: int = 8
    """A sum that takes longer than this to reach its limit is a slow climb and not a spike."""
    drift_effect_min: float = 0.05
    """Verification of a sum: the mean of its newest `drift_run_points` must be this share above the level (in
    logarithmic series, this much in logarithms). Real curves wander by a few percent for hundreds of points."""
    lasting_points: int = 16
    """A jump that has not come back after this many points is lasting."""
    clear_points: int = 3
    """An episode is over when the mean of this many points is within chance (the allowance)."""
    clear_lasting_points: int = 8
    """The same for a lasting one, which a few good batches must not end."""
    settle_points: int = 128
    """A lasting change that does not grow over this many points is the new level."""
    scale_floor_ratio: float = 0.005
    """The scale is at least this share of the level (of 1 for logarithms) and one last digit: rounding cannot score."""
    settling: SettlingConfig = field(default_factory=SettlingConfig)
    excursions: ExcursionConfig = field(default_factory=ExcursionConfig)


class Turn(StrEnum):
    """What changed with a point."""

    JUMP = "jump"
    LASTING = "lasting"
    BACK = "back"
    SETTLED = "settled"


class LevelWatch(Stateful):
    """Judges one series point by point. Memory: its windows, some ten kilobytes."""

    STATE: ClassVar[str] = (
        "_recent _drift _scatter settling excursions minimized level scale score onset_step _digit _goes_back ran_away "
        "_sum _sum_points _sum_step _run _episode _height _length _in_character lasting"
    )

    def __init__(self, config: LevelConfig) -> None:
        self._config = config
        self._recent = RollingQuantiles(config.level_points, (0.5,))
        self._drift = RollingQuantiles(config.level_points, (0.5,))
        self._scatter = RollingQuantiles(config.scatter_points, (0.5, 0.95, 0.99))
        self.settling = Settling(config.settling)
        self.excursions = Excursions(config.excursions)
        self.minimized = True
        """Whether the curve should fall, so that a climb is a finding; otherwise only points far out are."""
        self.level = 0.0
        """The usual value (in logarithmic series its logarithm), as it was before the open episode."""
        self.scale = 0.0
        self.score = 0.0
        """How far the newest point lies above the level, in scales."""
        self.onset_step: int | None = None
        """First step of the open episode."""
        self.lasting = False
        self.ran_away = False
        """The open episode is exponential growth, however young the curve is."""
        self._digit = 1.0
        """The smallest last digit of all values."""
        self._goes_back = False
        """The next point is the first of an attempt, which may begin at an earlier step."""
        self._sum = 0.0
        self._sum_points = 0
        self._sum_step = 0
        self._run: list[float] = []
        """The newest points of the current sum, at most `level_points`."""
        self._episode: list[float] = []
        self._height = 0.0
        """How far the highest point of the open episode lies above the level."""
        self._length = 0
        self._in_character = False
        """The open episode is not reported, since the series is known for such."""

    @property
    def ready(self) -> bool:
        """Whether enough points are known to judge the next one."""
        return bool(self.scale) and len(self._recent) >= self._config.warm_points

    @property
    def recent(self) -> list[tuple[float, float]]:
        """Value and distance in scales of the points from which the level was learned, oldest first."""
        points = self._recent.window
        values = [math.exp(point) for point in points] if self._config.logarithmic else points
        return [(value, (point - self.level) / self.scale) for value, point in zip(values, points, strict=True)]

    @property
    def high_sum(self) -> float:
        """The sum of moderately high points, in scales."""
        return self._sum

    @property
    def high_points(self) -> int:
        """Points of that sum."""
        return self._sum_points if self._sum > 0.0 else 0

    @property
    def episode_points(self) -> int:
        """Points of the open episode."""
        return len(self._episode)

    @property
    def is_open(self) -> bool:
        """Whether an episode is open."""
        return self.onset_step is not None

    @property
    def usual(self) -> float:
        """The level as a value of the series."""
        return math.exp(self.level) if self._config.logarithmic else self.level

    @property
    def newest(self) -> float:
        """Median of the newest points of the open episode, as a value of the series; robust to single batches."""
        middle = float(np.median(self._episode[-self._config.clear_lasting_points :]))
        return math.exp(middle) if self._config.logarithmic else middle

    @property
    def peak(self) -> float:
        """The highest point of the newest episode, as a value of the series."""
        highest = self.level + self._height
        return math.exp(highest) if self._config.logarithmic else highest

    @property
    def measure(self) -> float:
        """The unit for shares of the level: the level itself, or ten scales if it is near zero."""
        return max(abs(self.usual), LEVEL_SIGMAS * self.scale)

    @property
    def rising(self) -> bool:
        """Whether the later half of the open episode is clearly above its earlier half."""
        half = len(self._episode) // 2
        if half < self._config.clear_points:
            return False
        later, earlier = self._episode[half:], self._episode[:half]
        return float(np.median(later) - np.median(earlier)) > self.scale

    def restart(self, *, fresh: bool = False) -> None:
        """A new attempt: the level is that before its first step, if that is known; the scatter stays what it was.

        Args:
            fresh: the curve begins anew, with an untrained network.
        """
        if fresh:
            self.settling.clear()
            self.excursions.clear()
            self._digit = 1.0
        else:
            self.settling.interrupt()
        self._goes_back = not fresh
        self._recent.reset([])
        self._drift.reset([])
        self._end()

    def accept(self) -> None:
        """Make the newest points of the open episode the level from now on."""
        if self.is_open:
            self._recent.reset(self._episode[-self._config.level_points :])
            self._end()

    def push(self, value: float, step: int) -> Turn | None:
        """Score, decide, then learn one finite point.

        Returns:
            What changed, or None.
        """
        value = min(max(value, -VALUE_MAX), VALUE_MAX)
        point = math.log(max(value, 1 / VALUE_MAX)) if self._config.logarithmic else value
        self._digit = min(self._digit, last_digit(value))
        if self._goes_back:
            self._goes_back = False
            before = self.settling.resume(step)
            if before is not None and self.scale:
                self._recent.reset([before] * self._config.warm_points)
        self.settling.advance(step)
        self.excursions.advance()
        if self.is_open:
            return self._follow(point)
        if len(self._recent) < self._config.warm_points:
            self._learn(point)
            return None
        if self.scale:
            self._measure()
        else:
            self._bound_first()
            self._measure()
            self._learn_first()
        self.score = (point - self.level) / self.scale
        self._accumulate(point, step)
        if self._jumps(point):
            return self._begin(point, step, lasting=False)
        if self._sum >= self._config.drift_limit:
            if self._matters():
                slow = self._sum_points > self._config.drift_run_points
                return self._begin(point, self._sum_step, lasting=slow)
            self._sum = self._config.drift_limit
            if self._sum_points >= self._config.level_points:
                # A real change that is too small to report: it becomes the level.
                self._recent.reset(self._run)
                self._sum = 0.0
        self._learn(point)
        if self.settling.runs_away and self.minimized and not self._config.logarithmic:
            self.level, self.ran_away = self.settling.lowest, True
            return self._begin(point, self.settling.lowest_step, lasting=True)
        return None

    def least_jump(self) -> float:
        """The smallest value of one point that is reported at once; call it only if `ready`."""
        config, scale = self._config, self.scale
        far = self.level + config.jump_sigmas * scale
        ratio = self.level + config.ratio_sigmas * scale
        if config.logarithmic:
            ratio = max(ratio, self.level + math.log(config.ratio_jump))
            return math.exp(min(far, ratio, self.level + math.log(config.ratio_sure)))
        proper = self.level >= config.ratio_level_sigmas * scale
        return min(far, max(ratio, config.ratio_jump * self.level)) if proper else far

    def least_rise(self, points: int) -> float | None:
        """The smallest mean of this many points in a row that is reported with the last of them, as a sum.

        None: none, however large; or the curve need not fall or has no level yet, so that no sum is reported.
        """
        config = self._config
        each = config.drift_allowance + config.drift_limit / points
        if each > config.drift_clip or not self.minimized:
            return None
        unit = 1.0 if config.logarithmic else abs(self.level)
        rise = max(each * self.scale, config.drift_effect_min * unit, self.settling.least)
        if not math.isfinite(rise):
            return None
        return math.exp(self.level + rise) if config.logarithmic else self.level + rise

    def _jumps(self, point: float) -> bool:
        """Whether this point alone is enough."""
        config = self._config
        if self.score >= config.jump_sigmas:
            return True
        excess = point - self.level
        if config.logarithmic:
            far = self.score >= config.ratio_sigmas and excess >= math.log(config.ratio_jump)
            return far or excess >= math.log(config.ratio_sure)
        # For a level near zero, a multiple of it is meaningless.
        proper = self.level >= config.ratio_level_sigmas * self.scale
        return proper and self.score >= config.ratio_sigmas and excess >= (config.ratio_jump - 1.0) * self.level

    def _matters(self) -> bool:
        """Whether the current sum comes from a change that is large enough to report."""
        if not self.minimized:
            return False
        newest = self._run[-self._config.drift_run_points :]
        unit = 1.0 if self._config.logarithmic else abs(self.level)
        least = self.level + max(self._config.drift_effect_min * unit, self.settling.least)
        if sum(newest) / len(newest) < least or self._sum_points <= self._config.drift_run_points:
            return sum(newest) / len(newest) >= least
        # Of a climb most points are high; a few of another level are none.
        return float(np.median(newest)) >= least and _quartile(self._run) >= self.level + self.scale / 2

    def _bound_first(self) -> None:
        """Bound outliers among the first distances, which were learned before there was a scale."""
        reach = REACH_SIGMAS * SIGMAS_OF_MIDDLE * self._scatter.get()[0]
        self._scatter.reset([min(distance, reach) for distance in self._scatter.window])

    def _learn_first(self) -> None:
        """Learn excursions among the first points; a curve that begins high and falls has none at its begin."""
        far = self.level + self._config.jump_sigmas * self.scale
        length, height, fallen = 0, 0.0, False
        for point in self._recent.window:
            if point < far:
                if fallen and length:
                    self.excursions.came_back(height - self.level, length + self._config.clear_points)
                length, height, fallen = 0, 0.0, True
            else:
                length, height = length + 1, max(height, point)

    def _measure(self) -> None:
        config = self._config
        (self.level,) = self._recent.get()
        middle, high, extreme = self._scatter.get()
        # Three estimates of the same scatter. The outermost assumes Student's t with 5 degrees of freedom: such tails
        # are usual, and only heavier ones widen the scale.
        spread = max(SIGMAS_OF_MIDDLE * middle, high / 1.96, extreme / 3.1)
        unit = 1.0 if config.logarithmic else abs(self.level)
        digit = self._digit / math.exp(self.level) if config.logarithmic else self._digit
        self.scale = max(spread, config.scale_floor_ratio * unit, min(digit, 1.0), 1e-12)

    def _accumulate(self, point: float, step: int) -> None:
        config = self._config
        if self._sum <= 0.0:
            self._sum, self._sum_points, self._sum_step, self._run = 0.0, 0, step, []
        self._sum = max(0.0, self._sum + min(self.score, config.drift_clip) - config.drift_allowance)
        self._sum_points += 1
        self._run = [*self._run, point][-config.level_points :]

    def _learn(self, point: float) -> None:
        self.settling.learn(point)
        if len(self._recent) >= self._config.level_points // 4:
            residual = point - self._recent.get()[0]
            self._drift.learn(residual)
            # A falling curve is always below its own median; this drift is subtracted, as it is no scatter.
            distance = abs(residual - self._drift.get()[0])
            # Bounded, so that an outlier widens the scale only by its rank among the distances, not by its size.
            self._scatter.learn(min(distance, REACH_SIGMAS * self.scale) if self.scale else distance)
        # A suspected climb must not raise the level that it is judged against.
        if self._sum < self._config.drift_limit / 6:
            self._recent.learn(point)

    def _begin(self, point: float, onset_step: int, *, lasting: bool) -> Turn | None:
        self.onset_step, self.lasting = onset_step, lasting
        self._episode = [point] * self._config.clear_points
        self._height, self._length = point - self.level, max(self._sum_points, 1)
        self._in_character = self.excursions.is_usual(self._height, self._length)
        return None if self._in_character else Turn.LASTING if lasting else Turn.JUMP

    @property
    def repeats(self) -> bool:
        """Whether the newest episode is like one that came back by itself."""
        return self.excursions.like(self._height, self._length) > 0

    @property
    def is_usual(self) -> bool:
        """Whether the newest episode is in character by now."""
        return self.excursions.is_usual(self._height, self._length)

    def _follow(self, point: float) -> Turn | None:
        config = self._config
        self.score = (point - self.level) / self.scale
        self._height, self._length = max(self._height, point - self.level), self._length + 1
        self._episode = [*self._episode, point][-config.settle_points :]
        newest = self._episode[-(config.clear_lasting_points if self.lasting else config.clear_points) :]
        excess = (sum(newest) / len(newest) - self.level) / self.scale
        reported = not self._in_character
        if excess < config.drift_allowance:
            self.excursions.came_back(self._height, self._length)
            self._end()
            return Turn.BACK if reported else None
        # Between the two limits the series may still be coming back. Of what lasts most points are high: of a series
        # with several levels, more of them, as they may come in a row.
        if not self.lasting and len(self._episode) >= config.lasting_points * (1 if reported else 2):
            usual = (_quartile(self._episode[-config.level_points :]) - self.level) / self.scale
            self.lasting = min(excess, usual) >= 2 * config.drift_allowance
            if self.lasting and reported:
                return Turn.LASTING
        if len(self._episode) >= config.settle_points and not self.rising:
            self._recent.reset(self._episode[-config.level_points :])
            self._end()
            return Turn.SETTLED if reported else None
        return None if reported else self._out_of_character()

    def _out_of_character(self) -> Turn | None:
        """Report the open episode now, if it has become more than the series is known for."""
        if self.excursions.is_usual(self._height, self._length):
            return None
        self._in_character = False
        return Turn.LASTING if self.lasting else Turn.JUMP

    def _end(self) -> None:
        self.onset_step, self.lasting, self.ran_away = None, False, False
        self._episode = []
        self._sum, self._sum_points, self._run = 0.0, 0, []


def _quartile(points: list[float]) -> float:
    """Three quarters of the points are at least so high."""
    return sorted(points)[len(points) // 4]
