"""How far a job's pace wanders by itself; changes within that range are not reported as slowdowns.

It has two measures: the spread of the level from block to block, and slowdowns that came and went. The first needs
about a thousand rows; the second is used once three such slowdowns were seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.blocks import BlockSpread


@dataclass(frozen=True, slots=True)
class WanderingConfig:
    """What counts as wandering."""

    spreads: float = 3.0
    """A level within this many spreads between blocks is wandering."""
    bouts: int = 3
    """This many slowdowns that came and went are a pattern ..."""
    bout_ratio_max: float = 1.3
    """... unless they exceed this ratio: such a slowdown is reported each time."""
    pattern_share: float = 1.25
    """A slowdown up to this many times the largest bout belongs to the pattern ..."""
    bout_rows: int = 5_000
    """... until no bout has come for this many rows."""
    kept: int = 8
    """Newest bouts that are remembered; the largest of them is the size of the pattern."""


class Wandering(Stateful):
    """The wandering of one series of logarithms within one launch. Memory: constant."""

    STATE: ClassVar[tuple[str, ...]] = ("_blocks", "_bouts", "_rows")

    def __init__(self, config: WanderingConfig) -> None:
        self._config = config
        self._blocks = BlockSpread()
        self.clear()

    def clear(self) -> None:
        """Forget everything, for a new launch."""
        self._blocks.clear()
        self._bouts: list[list[float]] = []
        """Row of the end and size in logarithms of each bout."""
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
        """Add a slowdown of this size that has passed by itself, or belonged to the pattern."""
        if 0.0 < effect < math.log(self._config.bout_ratio_max):
            self._bouts.append([float(self._rows), effect])
            del self._bouts[: -self._config.kept]

    @property
    def bouts(self) -> list[float]:
        """Sizes of the bouts in logarithms, oldest first."""
        return [effect for _, effect in self._bouts]

    @property
    def is_pattern(self) -> bool:
        """Whether there were enough bouts for a pattern."""
        return len(self._bouts) >= self._config.bouts

    @property
    def reach(self) -> float:
        """How far the level wanders, in logarithms."""
        of_bouts = self._config.pattern_share * max(self.bouts) if self.is_pattern else 0.0
        return min(max(self._config.spreads * self._blocks.spread, of_bouts), math.log(self._config.bout_ratio_max))

    @property
    def range(self) -> float:
        """How far the highest level may be above the lowest; in a pattern, two changes may add up."""
        return 2.0 * self.reach if self.is_pattern else self.reach
