"""How long something must be so before it is told, and be over before it ends: for one value, or for each rank."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful


class HeldCells(Stateful):
    """The state of each cell. A cell that is neither bad nor good in an observation stays as it is."""

    STATE: ClassVar[tuple[str, ...]] = ("open", "since_s", "since_step", "_good_s", "_accepted")

    def __init__(self, cells: int = 1) -> None:
        self.resize(cells)

    def resize(self, cells: int) -> None:
        """Begin anew with so many cells."""
        self.open: Bools = np.zeros(cells, dtype=np.bool_)
        self.since_s: Floats = np.full(cells, np.nan)
        """Time from which on the cell has been bad; NaN: it is not."""
        self.since_step: Ints = np.full(cells, -1, dtype=np.int64)
        self._good_s: Floats = np.full(cells, np.nan)
        """Time from which on an open cell has been good; NaN: it is bad."""
        self._accepted: Bools = np.zeros(cells, dtype=np.bool_)
        """A person has accepted that it is bad: it opens again only after it was good."""

    @property
    def any_open(self) -> bool:
        """Whether any cell is open."""
        return bool(self.open.any())

    def update(self, bad: Bools, good: Bools, step: int, now_s: float, hold_s: float, calm_s: float) -> None:
        """Take an observation.

        Args:
            bad: cells that are so now.
            good: cells that are not.
            step: of the observation.
            now_s: its time.
            hold_s: seconds for which a cell must be bad to open.
            calm_s: seconds for which an open cell must be good to close.
        """
        begins = bad & np.isnan(self.since_s)
        self.since_s[begins], self.since_step[begins] = now_s, step
        self._good_s[bad] = np.nan
        self.open |= bad & ~self._accepted & (now_s - self.since_s >= hold_s)
        self._good_s[good & np.isnan(self._good_s)] = now_s
        waits = self.open | self._accepted
        over = good & (~waits | (now_s - self._good_s >= calm_s))
        self.open[over] = self._accepted[over] = False
        self.since_s[over], self.since_step[over] = np.nan, -1

    def accept(self) -> None:
        """Close all open cells until they have been good."""
        self._accepted |= self.open
        self.open[:] = False
