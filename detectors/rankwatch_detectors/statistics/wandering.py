"""How far a job's pace wanders by itself: what is no farther off than that is no slowdown.

Two things tell: the spread of its level from block to block, and slowdowns that came and went. The first needs some
thousand rows; the second speaks when the same has happened three times.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.blocks import BlockSpread


@dataclass(frozen=True, slots=True)
class WanderingConfig:
    """What counts as a job's own way."""

    spreads: float = 3.0
    """A level no farther off than so many spreads between blocks is one of the job's own."""
    bouts: int = 3
    """What came and went so often is a pattern ..."""
    bout_ratio_max: float = 1.3
    """... unless it takes a quarter of the job: that is told each time, however the job wanders ..."""
    pattern_share: float = 1.25
    """... and what is hardly larger belongs to it ..."""
    bout_rows: int = 5_000
    """... until it has stayed away for so many rows."""
    kept: int = 8
    """Bouts remembered, the newest: the largest of them is how large the pattern is."""


class Wandering(Stateful):
    """Of one series of logarithms within one launch. Memory: constant."""

    STATE: ClassVar[tuple[str, ...]] = ("_blocks", "_bouts", "_rows")

    def __init__(self, config: WanderingConfig) -> None:
        self._config = config
        self._blocks = BlockSpread()
        self.clear()

    def clear(self) -> None:
        """Another launch may have another way."""
        self._blocks.clear()
        self._bouts: list[list[float]] = []
        """Row of the end and size in logarithms."""
        self._rows = 0

    def push(self, value: float) -> None:
        """Add one row."""
        self._rows += 1
        self._blocks.push(value)
        if self._bouts and self._rows - self._bouts[-1][0] > self._config.bout_rows:
            self._bouts.clear()

    def newest(self, rows: int) -> list[float]:
        """Levels of the blocks of the newest `rows` rows and of the one just before them, oldest first."""
        return self._blocks.newest(rows)

    def came_and_went(self, effect: float) -> None:
        """A slowdown of this size has passed by itself, or was seen as part of the pattern."""
        if 0.0 < effect < math.log(self._config.bout_ratio_max):
            self._bouts.append([float(self._rows), effect])
            del self._bouts[: -self._config.kept]

    @property
    def bouts(self) -> list[float]:
        """Sizes of what came and went, in logarithms, oldest first."""
        return [effect for _, effect in self._bouts]

    @property
    def is_pattern(self) -> bool:
        """Whether it happened often enough to be the job's own way."""
        return len(self._bouts) >= self._config.bouts

    @property
    def reach(self) -> float:
        """How far off, in logarithms, a level of the job's own may be."""
        of_bouts = self._config.pattern_share * max(self.bouts) if self.is_pattern else 0.0
        return min(max(self._config.spreads * self._blocks.spread, of_bouts), math.log(self._config.bout_ratio_max))

    @property
    def range(self) -> float:
        """How far above its lowest level the highest may be: one change on top of another, where that is its way."""
        return 2.0 * self.reach if self.is_pattern else self.reach
