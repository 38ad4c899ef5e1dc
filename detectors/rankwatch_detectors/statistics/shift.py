"""A bank of one-sided CUSUMs: whether a rank has shifted by at least a level, and since when.

For each level (a supposed shift in logarithms, of either sign) and each rank the log-likelihood ratio of "shifted by
the level" against "as usual" is summed and never falls below zero. It crosses `budget.threshold` at the stated rate
of false firings, and after a real shift about as early as any test could (Lorden's bound). Values are clipped at three
sigmas, so that no single row decides; a minimum of slow rows excludes bursts, which are common and harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone

# A crossing takes one row more than `rows_min`, however far out they are: with five of them a third of the threshold is
# missing after a burst of four, which chance adds rarely. Not an integer, to avoid ties.
ROWS_BEYOND_MIN = 0.9
# From so many ranks on a crossing takes one row more: somewhere a burst of four meets other slow rows every week.
MANY_RANKS = 4_096
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


class ShiftBank(Stateful):
    """CUSUMs of L levels over R ranks; 40 bytes for each level and rank."""

    STATE: ClassVar[tuple[str, ...]] = ("_sums", "_rows", "_moved", "_total", "_onset")

    def __init__(self, levels: tuple[float, ...], clip_sigmas: float, rows_min: int) -> None:
        """Build the bank.

        Args:
            levels: tested shifts in logarithms; negative ones find values that fall.
            clip_sigmas: larger values are cut to this many sigmas.
            rows_min: rows beyond half a level that a run needs before it counts as a crossing.
        """
        self._levels = levels
        self._level: Floats = np.array(levels)[:, np.newaxis]
        self._half = self._level / 2
        self._falling = min(levels) < 0
        self._sign: Floats = np.sign(self._level)
        self.clip_sigmas = clip_sigmas
        self._rows_min = rows_min
        self.clear(0)

    @property
    def levels(self) -> int:
        """How many levels are tested in parallel."""
        return len(self._levels)

    @property
    def rows_needed(self) -> float:
        """A run needs more rows than this to reach the threshold, however far out they are."""
        return self._rows_min + ROWS_BEYOND_MIN + (self._strongest.size >= MANY_RANKS)

    @property
    def tested(self) -> tuple[float, ...]:
        """The tested shifts in logarithms."""
        return self._levels

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
        reach = self.clip_sigmas * sigma
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
            half = self._levels[number - 1] / 2
            if high > half > 0 or low < half < 0:
                return number
            if number <= self._lively and np.count_nonzero(self._sums[number - 1]):
                return number
        return 0

    def crossings(self, threshold: float) -> list[Crossing]:
        """Ranks whose evidence is beyond `threshold` (from `budget.threshold`), in rank order."""
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
