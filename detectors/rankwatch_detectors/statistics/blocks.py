"""How far a series wanders by itself: the spread of its level from block to block, at several block lengths.

Scatter from row to row does not show a level that stays for some hundred rows and then changes. So the spread is the
upper quartile of the changes between neighbouring blocks, around their median: a single lasting shift is one change of
many and does not widen it, and a steady trend, whose changes are equal, has no spread.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Floats
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.median import median

# The upper quartile of the size of a difference of two standard normals.
QUARTILE_OF_CHANGES = 1.1503 * math.sqrt(2.0)


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """Which blocks are compared."""

    rows: int = 32
    """Rows of the shortest block, which is represented by its median: evaluations and saves are single rows."""
    lengths: tuple[int, ...] = (1, 2, 4, 8)
    """Lengths compared, in shortest blocks: tens to hundreds of rows."""
    kept: int = 128
    """Shortest blocks remembered, which are sixteen of the longest length."""
    changes_min: int = 12
    """Changes before a length is used: the upper quartile of twelve is robust to the three of a single bout."""


class BlockSpread(Stateful):
    """The spread of one series between blocks, in its own unit. Memory: 1.3 KB."""

    STATE: ClassVar[tuple[str, ...]] = ("_block", "_levels", "spread")

    def __init__(self, config: BlockConfig | None = None) -> None:
        self._config = config or BlockConfig()
        self.clear()

    def clear(self) -> None:
        """Forget the series: another one begins."""
        self._block: list[float] = []
        self._levels: list[float] = []
        self.spread = 0.0
        """Standard deviation of a block's level around its neighbours'; 0 until enough blocks are known."""

    def push(self, value: float) -> None:
        """Add one row's value, which must be finite."""
        self._block.append(value)
        if len(self._block) < self._config.rows:
            return
        self._levels.append(median(np.asarray(self._block)))
        self._block = []
        del self._levels[: -self._config.kept]
        levels = np.asarray(self._levels)
        self.spread = max(self._between(levels, length) for length in self._config.lengths)

    def newest(self, rows: int) -> list[float]:
        """Levels of the shortest blocks of the newest `rows` rows and of the one just before them, oldest first.

        A block that is only partly within them is left out. Empty if not enough rows are remembered.
        """
        within, left_out = divmod(max(rows - len(self._block), 0), self._config.rows)
        blocks = within + (left_out > 0) + 1
        if blocks > len(self._levels):
            return []
        return [self._levels[-blocks], *self._levels[len(self._levels) - within :]]

    def _between(self, levels: Floats, length: int) -> float:
        """The spread between blocks that consist of `length` shortest ones."""
        count = levels.size // length
        if count - 1 < self._config.changes_min:
            return 0.0
        means = levels[levels.size - count * length :].reshape(count, length).mean(axis=1)
        changes = np.diff(means)
        around = np.sort(np.abs(changes - median(changes)))
        return float(around[3 * (around.size - 1) // 4]) / QUARTILE_OF_CHANGES
