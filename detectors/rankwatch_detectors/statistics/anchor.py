"""The best level that a series has kept, which no trend moves.

A baseline that follows its series learns a slow change and never reports it. The anchor is the lowest median over some
blocks; it follows the series down and never up. If the series is above it by more than it wanders from block to block,
the best level was lost, however slowly. After an intended or accepted change the anchor starts anew.
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
    """When a level counts as lost. Shares are relative to the caller's `measure` (1 for logarithms)."""

    block_rows: int = 32
    sustained_blocks: int = 4
    """A level is the median of this many block medians: 128 rows, long compared with short excursions."""
    steady_share: float = math.inf
    """A level counts as kept only if the same number of blocks before it was not lower by more than this share and the
    spread between blocks: a series that rises from its first row has no level to lose."""
    known_blocks: int = 14
    """Blocks before anything is reported, so that the spread between them is known."""
    share_min: float = 0.05
    spread_factor: float = 3.0
    clear_share: float = 0.5
    """The series is back when its excess is below this share of the least one that opens an episode."""
    near_share: float = 0.25
    """Within this share of the least excess the series is still at its best level; the last such step is the onset."""
    blocks: BlockConfig = field(default_factory=BlockConfig)


class Anchor(Stateful):
    """One series compared with the best level it has kept. Memory: 2 KB."""

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
        """Forget level and spread: the series begins anew, or changed intentionally."""
        self._spread.clear()
        self._known = 0
        self.accept()

    def accept(self) -> None:
        """Forget the best level, so that the next one counts as such; the spread between blocks is kept."""
        self._block: list[float] = []
        self._levels: list[float] = []
        self._measure = 1.0
        self.best = math.inf
        """The lowest level that lasted, in the unit of the series; infinite if none has."""
        self.now = math.inf
        self.onset_step: int | None = None
        """Last step in which the series was near its best level."""

    def push(self, value: float, step: int, measure: float = 1.0) -> None:
        """Add one row's value, which must be finite; shares are relative to `measure`."""
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
        """Discard the newest blocks: they were an excursion, which is over."""
        self._block, self._levels = [], []
        self.now = self.best

    @property
    def excess(self) -> float:
        """How far the current level is above the best; 0 if there is no best level."""
        return self.now - self.best if math.isfinite(self.best) else 0.0

    @property
    def share(self) -> float:
        """The excess as a share of the measure."""
        return self.excess / self._measure

    @property
    def least(self) -> float:
        """The least excess that is reported."""
        return max(self._config.share_min * self._measure, self._config.spread_factor * self._spread.spread)

    @property
    def near(self) -> bool:
        """Whether the level has just moved, and is beyond half of the least excess."""
        return not self._block and self.excess >= self.least / 2 > 0.0

    @property
    def ready(self) -> bool:
        """Whether there is a best level, and enough is known to report that it was left."""
        return self._known >= self._config.known_blocks and math.isfinite(self.best)

    @property
    def sustained_rows(self) -> int:
        """Rows of a level."""
        return self._config.sustained_blocks * self._config.block_rows

    @property
    def left(self) -> bool:
        """Whether the best level was lost."""
        return self._known >= self._config.known_blocks and self.excess >= self.least

    @property
    def back(self) -> bool:
        """Whether the series is back near its best level."""
        return self.excess < self._config.clear_share * self.least
