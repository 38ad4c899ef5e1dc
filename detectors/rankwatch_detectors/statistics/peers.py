"""Medians of small arrays, and of peer groups in one pass over all ranks.

The lower median is used because it stays with the healthy half when exactly half of an even group is slow. The lower
quartile of a group is high only if all members but a quarter are: 7 of 8, or all of 4.
"""

from __future__ import annotations

from typing import ClassVar, Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful

SORTED_MAX: Final = 1_024
"""Up to so many values, sorting all of them takes less time than finding the middle ones."""


def median(values: Floats | list[float]) -> float:
    """The middle value, or the mean of the two middle ones. Needs at least one value, and no NaN."""
    if isinstance(values, list):  # of a few numbers, for which NumPy takes longer
        half, in_order = len(values) // 2, sorted(values)
        return in_order[half] if len(values) % 2 else in_order[half - 1] / 2 + in_order[half] / 2
    half = values.size // 2
    ordered = values.copy()
    if values.size <= SORTED_MAX:
        ordered.sort()
    else:
        ordered.partition((half - 1, half))
    if values.size % 2:
        return ordered.item(half)
    # Halved before adding, because the sum of two very large numbers overflows.
    return ordered.item(half - 1) / 2 + ordered.item(half) / 2


# Two ranks have no majority. Ranks of smaller groups are compared with all such ranks of the job instead, which is fair
# once each rank's own baseline is subtracted.
GROUP_MIN = 3


def everyone(which: Bools) -> bool:
    """Whether all flags are set. Looking for a zero byte is several times faster than NumPy's tests."""
    return 0 not in which.tobytes()


def anyone(which: Bools) -> bool:
    """Whether any flag is set, as fast as `everyone`."""
    return 1 in which.tobytes()


class PeerGroups(Stateful):
    """Groups of ranks that are compared with each other."""

    STATE: ClassVar[str] = "number proper _order _starts _sizes _width"

    def __init__(self) -> None:
        self.regroup(np.zeros(0, dtype=np.int64))

    def regroup(self, groups: Ints) -> None:
        """Set the group number of each rank; groups below `GROUP_MIN` are joined into one."""
        _, number = np.unique(groups, return_inverse=True)
        number = np.asarray(number).reshape(-1).astype(np.int64)
        small = np.bincount(number)[number] < GROUP_MIN if number.size else np.zeros(0, dtype=np.bool_)
        number = np.where(small, -1, number)
        self.proper: Bools = ~small
        """Ranks whose group does the same work; the others are compared across groups."""
        _, compact = np.unique(number, return_inverse=True)
        self.number: Ints = np.asarray(compact).reshape(-1).astype(np.int64)
        self._order: Ints = np.argsort(self.number, kind="stable").astype(np.int64)
        self._sizes: Ints = np.bincount(self.number).astype(np.int64)
        self._starts: Ints = (np.cumsum(self._sizes) - self._sizes).astype(np.int64)
        equal = self._sizes.size > 0 and bool((self._sizes == self._sizes[0]).all())
        self._width = int(self._sizes[0]) if equal else 0

    @property
    def count(self) -> int:
        """How many groups there are."""
        return int(self._sizes.size)

    def size_of(self, rank: int) -> int:
        """How many ranks the group of this rank has, itself included."""
        return int(self._sizes[self.number[rank]])

    def members(self, rank: int) -> Ints:
        """All ranks of this rank's group, itself included."""
        group = self.number[rank]
        start = int(self._starts[group])
        return self._order[start : start + int(self._sizes[group])]

    def location(self, values: Floats, usable: Bools) -> Floats:
        """Lower median of the usable values of each rank's group, spread back over the ranks.

        A group without a usable value gets 0.
        """
        if values.size == 0:
            return np.zeros(0)
        if self._width and everyone(usable):
            middle = (self._width - 1) // 2
            rows = values[self._order].reshape(-1, self._width)
            rows.partition(middle, axis=1)
            spread: Floats = rows[:, middle][self.number]
            return spread
        filled = np.where(usable, values, np.inf)
        sorted_values = filled[np.lexsort((filled, self.number))]
        counts = np.bincount(self.number, weights=usable).astype(np.int64)
        middles = self._starts + np.maximum(counts - 1, 0) // 2
        medians = np.where(counts > 0, sorted_values[middles], 0.0)
        return np.asarray(medians[self.number], dtype=np.float64)


class GroupQuartiles(Stateful):
    """G groups of members. Memory: 16 bytes for each member."""

    STATE: ClassVar[str] = "group sizes _order _starts _width"

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
