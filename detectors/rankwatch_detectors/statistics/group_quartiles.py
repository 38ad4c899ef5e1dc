"""The lower quartile of the values of each group, in one pass over all of them.

It is high only if all members but a quarter are: 7 of 8, or all of 4.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import everyone


class GroupQuartiles(Stateful):
    """G groups of members. Memory: 16 bytes for each member."""

    STATE: ClassVar[tuple[str, ...]] = ("group", "sizes", "_order", "_starts", "_width")

    def __init__(self, group: Ints, groups: int) -> None:
        """Set the group of each member, a number below `groups`."""
        self.group = group
        self.sizes: Ints = np.bincount(group, minlength=groups).astype(np.int64)
        self._order: Ints = np.argsort(group, kind="stable").astype(np.int64)
        self._starts: Ints = (np.cumsum(self.sizes) - self.sizes).astype(np.int64)
        equal = bool(groups) and bool((self.sizes == self.sizes[0]).all())
        self._width = int(self.sizes[0]) if equal else 0
        """Members of each group, if all have as many."""

    def counts(self, among: Bools) -> Ints:
        """How many members of each group are among these."""
        return np.bincount(self.group[among], minlength=self.sizes.size).astype(np.int64)

    def whole(self, among: Bools) -> Bools:
        """Groups of which no more than a quarter is not among these members; none without members."""
        whole: Bools = self.counts(among) >= np.maximum(self.sizes - (self.sizes - 1) // 4, 1)
        return whole

    def of(self, values: Floats, usable: Bools) -> Floats:
        """The lower quartile of each group's usable values; NaN if not more than half of them are."""
        if self._width and everyone(usable):
            rows = values[self._order].reshape(-1, self._width)
            quarter = (self._width - 1) // 4
            rows.partition(quarter, axis=1)
            return rows[:, quarter]
        counts = self.counts(usable)
        filled = np.where(usable, values, np.inf)
        in_order = filled[np.lexsort((filled, self.group))]
        quarters = np.minimum(self._starts + np.maximum(counts - 1, 0) // 4, values.size - 1)
        return np.where(2 * counts > self.sizes, in_order[quarters], np.nan)
