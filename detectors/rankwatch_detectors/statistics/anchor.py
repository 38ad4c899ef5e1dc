"""The best level that a series has kept up, which no trend moves.

A baseline that follows its series learns a slow change and never tells it. The anchor is the lowest median over some
blocks; it goes down with the series and never up. What lies above it by more than the series wanders from block to
block by itself has been lost, however slowly. A change that people wanted, or accept, lets it begin anew.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.blocks import BlockConfig, BlockSpread
from rankwatch_detectors.statistics.median import median


@dataclass(frozen=True, slots=True)
class AnchorConfig:
    """When a level has been left. Shares are of the measure that the caller gives (of 1 for logarithms)."""

    block_rows: int = 32
    sustained_blocks: int = 4
    """A level is the median of as many block medians: 128 rows, long against what comes and goes by itself."""
    steady_share: float = math.inf
    """A level counts as kept up only if the same number of blocks before it lies no lower, but for this share and the
    spread between blocks: what rises from its first row on has no level that it could have left."""
    known_blocks: int = 14
    """Nothing is said before the spread between blocks is known."""
    share_min: float = 0.05
    spread_factor: float = 3.0
    clear_share: float = 0.5
    """It is back when it has lost half of what opened the episode."""
    near_share: float = 0.25
    """Within this share of the least excess it is still at its best level: the last such step is the onset."""
    blocks: BlockConfig = field(default_factory=BlockConfig)


class Anchor(Stateful):
    """One series against the best level it has kept up. Memory: 2 KB."""

    STATE: ClassVar[tuple[str, ...]] = (
        "_spread",
        "_block",
        "_levels",
        "_known",
        "_measure",
        "best",
        "now",
        "onset_step",
    )

    def __init__(self, config: AnchorConfig) -> None:
        self._config = config
        self._spread = BlockSpread(config.blocks)
        self.clear()

    def clear(self) -> None:
        """The series begins anew, or somebody wanted it to change: what it wanders by itself is learned anew, too."""
        self._spread.clear()
        self._known = 0
        self.accept()

    def accept(self) -> None:
        """The level from now on is the best that is known; how far the series wanders stays known."""
        self._block: list[float] = []
        self._levels: list[float] = []
        self._measure = 1.0
        self.best = math.inf
        """The lowest level that lasted, in the unit of the series; infinite while none has."""
        self.now = math.inf
        self.onset_step: int | None = None
        """Where the series was last seen near its best level."""

    def push(self, value: float, step: int, measure: float = 1.0) -> None:
        """Add one row's value, which must be finite; `measure` is what shares are taken of."""
        self._spread.push(value)
        self._block.append(value)
        if len(self._block) < self._config.block_rows:
            return
        count = self._config.sustained_blocks
        self._levels = [*self._levels, median(np.asarray(self._block))][-2 * count :]
        self._block, self._measure = [], measure
        self._known = min(self._known + 1, self._config.known_blocks)
        if len(self._levels) < count:
            return
        self.now = median(np.asarray(self._levels[-count:]))
        if self._is_steady():
            self.best = min(self.best, self.now)
        if self.excess < self._config.near_share * self.least:
            self.onset_step = step

    def _is_steady(self) -> bool:
        config = self._config
        if math.isinf(config.steady_share):
            return True
        before = self._levels[: -config.sustained_blocks]
        if len(before) < config.sustained_blocks:
            return False
        tolerance = max(config.steady_share * self._measure, self._spread.spread)
        return self.now <= median(np.asarray(before)) + tolerance

    def pass_over(self) -> None:
        """What came lately was no level of the series: an excursion, and it is over."""
        self._block, self._levels = [], []
        self.now = self.best

    @property
    def excess(self) -> float:
        """How far the level of now lies above the best; 0 while there is none."""
        return self.now - self.best if math.isfinite(self.best) else 0.0

    @property
    def share(self) -> float:
        """The excess as a share of the measure."""
        return self.excess / self._measure

    @property
    def least(self) -> float:
        """The least excess that is worth a word."""
        return max(self._config.share_min * self._measure, self._config.spread_factor * self._spread.spread)

    @property
    def left(self) -> bool:
        """Whether the best level has been left for good."""
        return self._known >= self._config.known_blocks and self.excess >= self.least

    @property
    def back(self) -> bool:
        """Whether it is kept again."""
        return self.excess < self._config.clear_share * self.least
