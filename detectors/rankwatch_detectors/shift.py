"""A bank of one-sided CUSUMs: has this rank moved by at least so much, and since when?

For each level (a supposed shift in logarithms, of either sign) and each rank the log-likelihood ratio of "shifted by
the level" against "as usual" is summed and never falls below zero. It crosses `budget.threshold` at the stated rate
of false firings, and after a real shift about as soon as any test could (Lorden's bound). Values are clipped at three
sigmas, so that no single row can decide; a minimum of slow rows stops bursts, which are common and harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats
from rankwatch_detectors.peers import everyone
from rankwatch_detectors.state import Stateful

# Runs of two to four slow steps are common and harmless: however far out, it takes a sixth row. After four a third of
# the threshold is missing, which chance adds the less often the more ranks there are. Not a whole number, for no tie.
ROWS_NEEDED = 5.9
# Onset while no run lasts.
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
            levels: supposed shifts in logarithms; negative ones look for ranks that fall.
            clip_sigmas: values beyond count as this many sigmas.
            rows_min: rows beyond half a level that a run needs before it may be told.
        """
        self._levels = levels
        self._falling = min(levels) < 0
        self._clip_sigmas = clip_sigmas
        self._rows_min = rows_min
        self.clear(0)

    @property
    def levels(self) -> int:
        """How many levels are tested side by side."""
        return len(self._levels)

    def clear(self, ranks: int) -> None:
        """Forget all evidence, for a new attempt of `ranks` ranks."""
        shape = (self.levels, ranks)
        self._sums: Floats = np.zeros(shape)
        self._rows: Floats = np.zeros(shape)
        self._moved: Floats = np.zeros(shape)
        self._total: Floats = np.zeros(shape)
        self._onset: Floats = np.full(shape, NO_RUN)
        """Counts only where a run lasts."""
        self._strongest: Floats = np.zeros(ranks)

    def clear_rank(self, rank: int) -> None:
        """Forget the evidence about one rank."""
        for of_run in (self._sums, self._rows, self._moved, self._total):
            of_run[:, rank] = 0.0
        self._strongest[rank] = 0.0

    def strongest(self) -> Floats:
        """The highest evidence of each rank over the levels."""
        return self._strongest

    def push(self, residual: Floats, sigma: Floats, judged: Bools, step: int, threshold: float) -> None:
        """Add one row. Ranks not in `judged` keep their evidence as it is.

        However far out they lie, more than `ROWS_NEEDED` rows are needed to reach the threshold.
        """
        reach = self._clip_sigmas * sigma
        clipped = np.minimum(np.maximum(residual, -reach), reach)
        variance = sigma * sigma
        gain_max = threshold / ROWS_NEEDED
        # In the usual case, everyone judged, nothing has to be held back.
        held_back = None if everyone(judged) else judged.astype(np.float64)
        shift = residual if held_back is None else np.where(judged, residual, 0.0)
        self._strongest = np.zeros(residual.size)
        high = float(np.maximum.reduce(clipped, initial=0.0))
        low = float(np.minimum.reduce(clipped, initial=0.0)) if self._falling else 0.0
        for number, level in enumerate(self._levels):
            half = level / 2
            sums = self._sums[number]
            # Where this row begins no run and none lasts, everyone loses what is zero.
            if not (high > half > 0 or low < half < 0) and not np.count_nonzero(sums):
                continue
            gain: Floats = clipped - half
            gain *= level
            gain /= variance
            np.minimum(gain, gain_max, out=gain)
            moved = shift > half if level > 0 else shift < half
            if held_back is not None:
                gain *= held_back
                moved &= judged
            self._extend(number, gain, shift, moved, 1.0 if held_back is None else held_back, step)
            np.maximum(self._strongest, sums, out=self._strongest)

    def _extend(self, number: int, gain: Floats, shift: Floats, moved: Bools, here: Floats | float, step: int) -> None:
        """Add a row to the runs of one level; those whose evidence is gone end."""
        sums, rows, total = self._sums[number], self._rows[number], self._total[number]
        of_moved = self._moved[number]
        np.putmask(self._onset[number], rows == 0.0, step)
        sums += gain
        rows += here
        total += shift
        of_moved += moved
        # Multiplying is several times faster than choosing: about half of all runs end with each row.
        lasts = (sums > 0.0).astype(np.float64)
        for of_run in (sums, rows, of_moved, total):
            np.multiply(of_run, lasts, out=of_run)

    def crossings(self, threshold: float) -> list[Crossing]:
        """Ranks whose evidence is beyond `threshold` (from `budget.threshold`), in rank order."""
        strongest = self.strongest()
        found = []
        for rank in np.flatnonzero(strongest >= threshold).tolist():
            # Of the levels that speak the one whose run is shortest has the fewest usual rows at its beginning.
            speaking = self._sums[:, rank] >= threshold / 2
            level = int(np.argmin(np.where(speaking, self._rows[:, rank], np.inf)))
            rows = self._rows[level, rank]
            effect = float(self._total[level, rank] / rows)
            if self._moved[level, rank] >= self._rows_min:
                onset = int(self._onset[level, rank])
                found.append(Crossing(rank, effect, onset, int(rows), float(strongest[rank])))
        return found

    def snapshot(self) -> dict[str, Any]:
        """As every `Stateful`; an onset without a run is `NO_RUN`."""
        return {**super().snapshot(), "_onset": np.where(self._rows > 0.0, self._onset, NO_RUN)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """As every `Stateful`."""
        super().restore(state)
        self._strongest = self._sums.max(axis=0, initial=0.0)
