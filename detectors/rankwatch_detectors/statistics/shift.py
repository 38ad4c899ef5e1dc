"""A bank of one-sided CUSUMs: whether a rank has shifted by at least a level, and since when.

For each level (a supposed shift in logarithms, of either sign) and each rank the log-likelihood ratio of "shifted by
the level" against "as usual" is summed and never falls below zero. It crosses `threshold` at the stated rate
of false firings, and after a real shift about as early as any test could (Lorden's bound). Values are clipped at three
sigmas, so that no single row decides; a minimum of slow rows excludes bursts, which are common and harmless.

A CUSUM over log-likelihood ratios that fires at h has a mean time between false firings of at least exp(h) rows
(Lorden, 1971). With `tests` of them side by side the expected number of false firings in n rows is at most
tests * n / exp(h); solved for h this is `threshold`. So the same budget holds for 8 and for 16,384 ranks.

Lorden's bound holds for any noise and is loose: with normal noise, a level of d sigmas has a mean time of about
2 / d² * exp(h + 1.166 d) rows (Siegmund, 1985), which is at least 5 exp(h) whatever d is (`ROWS_BETWEEN`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone

WEEK_S = 7 * 24 * 3600.0
# A step below 1 ms means that the clock stands still (replay without times); it must not raise the threshold.
STEP_MIN_S = 1e-3
# A broken clock with steps of days must not lower it either.
STEP_MAX_S = 3600.0
# Evaluations and saves make a step tens of times as long, which is not the usual step time.
STEP_RATIO_MAX = 10.0
# Mean rows between false firings of one CUSUM as a multiple of exp(h): the least of 2 / d² * exp(1.166 d) over all d.
ROWS_BETWEEN = 5.0


def threshold(tests: int, step_s: float, budget: float) -> float:
    """Log-likelihood threshold at which `tests` parallel CUSUMs raise `budget` false firings per job-week.

    Args:
        tests: ranks times levels that are watched at once.
        step_s: usual seconds between rows.
        budget: false firings allowed per job-week, more than 0.

    >>> round(threshold(tests=4096, step_s=1.0, budget=1.0), 1)
    21.6
    """
    return math.log(max(tests, 1) * WEEK_S / min(max(step_s, STEP_MIN_S), STEP_MAX_S) / budget)


def usual_step_s(before_s: float, step_s: float, rows: int) -> float:
    """Running mean of seconds between rows, over about 64 of them.

    Args:
        before_s: the mean so far.
        step_s: the newest row's seconds, bounded, so that a jump of the clock changes the mean only a little.
        rows: number of rows so far, this one included.
    """
    bounded = min(max(step_s, STEP_MIN_S), STEP_MAX_S)
    if rows > 1:
        bounded = min(bounded, STEP_RATIO_MAX * before_s)
    return before_s + (bounded - before_s) / min(rows, 64)


# A crossing takes one row more than `rows_min`, however far out they are: with five of them a third of the threshold is
# missing after a burst of four, which chance adds rarely. Not an integer, to avoid ties.
ROWS_BEYOND_MIN = 0.9
# From so many ranks on a crossing takes one row more: somewhere a burst of four meets other slow rows every week.
MANY_RANKS = 4_096
# A value speaks for a level from half of it on, so values are not cut below this share of the least level, however
# small their noise is.
REACH_MIN_SHARE = 0.6
# Onset if there is no run.
NO_RUN = -1.0


@dataclass(frozen=True, slots=True)
class Crossing:
    """One rank whose evidence crossed the threshold."""

    rank: int
    effect: float
    """Mean shift over the run, in logarithms."""
    onset_step: int
    rows: int
    evidence: float
    """The log-likelihood ratio reached."""


class TestedLevels(Stateful):
    """Base of CUSUMs: the shifts that they test."""

    def __init__(self, levels: tuple[float, ...], clip_sigmas: float, rows_min: int) -> None:
        """Build the bank.

        Args:
            levels: tested shifts in logarithms; negative ones find values that fall.
            clip_sigmas: larger values are cut to this many sigmas, or `REACH_MIN_SHARE` of the least level.
            rows_min: rows beyond half a level that a run needs before it counts as a crossing.
        """
        self.tested = levels
        """The tested shifts in logarithms."""
        self.clip_sigmas = clip_sigmas
        self._reach_min = REACH_MIN_SHARE * min(map(abs, levels))
        self._rows_min = rows_min

    @property
    def levels(self) -> int:
        """How many levels are tested in parallel."""
        return len(self.tested)

    @property
    def rows_needed(self) -> float:
        """A run needs more rows than this to reach the threshold, however far out they are."""
        return self._rows_min + ROWS_BEYOND_MIN


class ShiftBank(TestedLevels):
    """CUSUMs of L levels over R ranks; 40 bytes for each level and rank."""

    STATE: ClassVar[str] = "_sums _rows _moved _total _onset"

    def __init__(self, levels: tuple[float, ...], clip_sigmas: float, rows_min: int) -> None:
        super().__init__(levels, clip_sigmas, rows_min)
        self._level: Floats = np.array(levels)[:, np.newaxis]
        self._half = self._level / 2
        self._falling = min(levels) < 0
        self._sign: Floats = np.sign(self._level)
        self.clear(0)

    @property
    def rows_needed(self) -> float:
        """As every `TestedLevels`."""
        return super().rows_needed + (self._strongest.size >= MANY_RANKS)

    def clear(self, ranks: int) -> None:
        """Forget all evidence, for a new attempt of `ranks` ranks."""
        self._hold(np.zeros((4, self.levels, ranks)))
        self._onset: Floats = np.full((self.levels, ranks), NO_RUN)
        """Valid only where a run lasts."""

    def _hold(self, runs: Floats) -> None:
        self._runs = runs
        """[what, level, rank]: what a run has added up, all zero where there is none."""
        self._sums, self._rows, self._moved, self._total = runs
        self._strongest: Floats = self._sums.max(axis=0, initial=0.0)
        self._lively = self.levels
        """Levels, from the first on, beyond which there is no run."""
        self.near: list[int] = []
        """Ranks whose evidence was beyond half of the threshold in the newest row, until they are taken."""

    def clear_rank(self, rank: int) -> None:
        """Forget the evidence about one rank."""
        self._runs[:, :, rank] = 0.0
        self._strongest[rank] = 0.0

    def strongest(self) -> Floats:
        """The highest evidence of each rank over the levels."""
        return self._strongest

    def push(self, residual: Floats, sigma: Floats, judged: Bools, step: int, threshold: float) -> None:
        """Add one row. Ranks not in `judged` keep their evidence.

        However far out a rank is, it needs more than `rows_needed` rows to reach the threshold.
        """
        reach = np.maximum(self.clip_sigmas * sigma, self._reach_min)
        clipped = np.minimum(np.maximum(residual, -reach), reach)
        levels = self._lively = self._count_lively(clipped)
        if not levels:
            self._strongest = np.zeros(residual.size)
            return
        level, half = self._level[:levels], self._half[:levels]
        gain: Floats = clipped - half
        gain *= level
        gain /= sigma * sigma
        np.minimum(gain, threshold / self.rows_needed, out=gain)
        # Usually all ranks are judged, and no masking is needed.
        everywhere = everyone(judged)
        shift = residual if everywhere else np.where(judged, residual, 0.0)
        sign = self._sign[:levels]
        moved = shift * sign > half * sign if self._falling else shift > half
        here: Floats | float = 1.0
        if not everywhere:
            here = judged.astype(np.float64)
            gain *= here
            moved &= judged
        runs = self._runs[:, :levels]
        sums, rows, of_moved, total = runs
        np.putmask(self._onset[:levels], rows == 0.0, step)
        sums += gain
        rows += here
        total += shift
        of_moved += moved
        # About half of all runs end with each row; multiplying by 0 or 1 is several times faster than `np.where`.
        runs *= (sums > 0.0).astype(np.float64)
        self._strongest = np.maximum.reduce(sums, axis=0)

    def _count_lively(self, clipped: Floats) -> int:
        """Number of levels, from the first on, with a current or new run; sums of the others are zero anyway."""
        high = float(np.maximum.reduce(clipped, initial=0.0))
        low = float(np.minimum.reduce(clipped, initial=0.0)) if self._falling else 0.0
        for number in range(self.levels, 0, -1):
            half = self.tested[number - 1] / 2
            if high > half > 0 or low < half < 0:
                return number
            if number <= self._lively and np.count_nonzero(self._sums[number - 1]):
                return number
        return 0

    def crossings(self, threshold: float) -> list[Crossing]:
        """Ranks whose evidence is beyond `threshold` (from `threshold()`), in rank order."""
        strongest, found = self._strongest, list[Crossing]()
        near = strongest >= threshold / 2
        self.near = np.flatnonzero(near).tolist() if anyone(near) else []
        for rank in self.near:
            if strongest[rank] < threshold:
                continue
            # Among the levels with strong evidence, the shortest run includes the fewest usual rows at its start.
            speaking = self._sums[:, rank] >= threshold / 2
            level = int(np.argmin(np.where(speaking, self._rows[:, rank], np.inf)))
            rows = self._rows[level, rank]
            effect = float(self._total[level, rank] / rows)
            if self._moved[level, rank] >= self._rows_min:
                onset = int(self._onset[level, rank])
                found.append(Crossing(rank, effect, onset, int(rows), float(strongest[rank])))
        return found

    def take_near(self) -> list[int]:
        """The ranks in `near`, once."""
        near, self.near = self.near, []
        return near

    def run(self, rank: int) -> Crossing:
        """The run of a rank with the highest evidence, which need not be beyond any threshold."""
        level = int(np.argmax(self._sums[:, rank]))
        rows = int(self._rows[level, rank])
        effect = float(self._total[level, rank]) / max(rows, 1)
        return Crossing(rank, effect, int(self._onset[level, rank]), rows, max(float(self._sums[level, rank]), 0.0))

    def snapshot(self) -> dict[str, Any]:
        """As every `Stateful`; an onset without a run is `NO_RUN`."""
        return {**super().snapshot(), "_onset": np.where(self._rows > 0.0, self._onset, NO_RUN)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As every `Stateful`."""
        super().restore(state)
        self._hold(np.stack([self._sums, self._rows, self._moved, self._total]))
