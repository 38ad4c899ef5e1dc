"""What means over a run of rows differed by in the past: how far chance alone has carried as long a run before.

No model of the noise is needed, so that it holds for noise that lasts, however long: a disturbance that is as long as
the run counts in full.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import anyone, everyone

RUNS_MIN = 8
"""So many runs one after the other must have been kept before their means are known."""


class RunHistory(Stateful):
    """The newest residuals of U units. Memory: 8 bytes for each kept row and unit."""

    STATE: ClassVar[tuple[str, ...]] = ("_kept", "_next")

    def __init__(self, rows: int) -> None:
        """Keep so many rows."""
        self._rows = rows
        self.begin(np.zeros(0, dtype=np.int64))

    def begin(self, came_from: Ints) -> None:
        """Set the units: the index of each among those before, or -1 if it is new."""
        before = getattr(self, "_kept", np.zeros((self._rows, 0)))
        kept = np.full((self._rows, came_from.size), np.nan)
        known = came_from >= 0
        if before.shape[1]:
            kept[:, known] = before[:, came_from[known]]
        self._kept: Floats = kept
        self._next = getattr(self, "_next", 0)

    def push(self, residual: Floats, usable: Bools) -> None:
        """Add a row."""
        self._kept[self._next] = residual if everyone(usable) else np.where(usable, residual, np.nan)
        self._next = (self._next + 1) % self._rows

    def spread(self, unit: int, rows: int) -> float:
        """Root mean square of means over so many neighbouring rows, before the newest of as many.

        It is that of all units together, or of this one if that is more. Of longer runs than are known it is that of
        the longest that are, which is no less. It is widened for what lasts longer than the rows that are kept, the
        more the fewer they are. Infinite as long as nothing is known.
        """
        past = np.roll(self._kept, -self._next, axis=0)[:-rows]
        past_rows = int(np.count_nonzero(np.isfinite(past[:, unit])))
        window = min(rows, past_rows // RUNS_MIN)
        if not window:
            return math.inf
        means = np.lib.stride_tricks.sliding_window_view(past, window, axis=0).mean(axis=2)
        known = np.isfinite(means)
        if not anyone(known[:, unit]):
            return math.inf
        squares = np.where(known, means, 0.0) ** 2
        of_all = float(squares.sum()) / np.count_nonzero(known)
        own = float(squares[:, unit].sum()) / np.count_nonzero(known[:, unit])
        return math.sqrt(max(of_all, own) * (1 + self._rows / past_rows))
