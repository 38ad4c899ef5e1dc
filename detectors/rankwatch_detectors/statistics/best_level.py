"""The best level that a series has kept, which no trend moves.

A baseline that follows its series learns a slow change and never reports it. The anchor is the lowest median over some
blocks; it follows the series down and never up. If the series is above it by more than it wanders from block to block,
the best level was lost, however slowly. After an intended or accepted change the anchor starts anew.

Beside it stands how far a series wanders by itself, from block to block at several block lengths. Scatter from row to
row does not show a level that stays for some hundred rows and then changes. So the spread is the upper quartile of the
changes between neighbouring blocks, around their median: a single lasting shift is one change of many and does not
widen it, and a steady trend, whose changes are equal, has no spread.

Changes within the range in which a job's pace wanders are not reported as slowdowns. That has two measures: the spread
of the level from block to block, and slowdowns that came and went. The first needs about a thousand rows; the second is
used once three such slowdowns were seen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Floats
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import median

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

    STATE: ClassVar[str] = "_block _levels spread"

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


@dataclass(frozen=True, slots=True)
class BestLevelConfig:
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


class BestLevel(Stateful):
    """One series compared with the best level it has kept. Memory: 2 KB."""

    STATE: ClassVar[str] = "_spread _block _levels _known _measure best now onset_step"

    def __init__(self, config: BestLevelConfig) -> None:
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


@dataclass(frozen=True, slots=True)
class FollowedConfig:
    """When a change of an open shift is reported."""

    clear_share: float = 0.4
    """The shift is over when the smoothed excess stays below this share of the reported one ..."""
    clear_rows: int = 16
    """... for this many rows."""
    rise_ratio: float = 1.05
    """It has risen when the excess is larger by this ratio, and by `rise_share` of the reported one, ..."""
    rise_share: float = 0.3
    rise_rows: int = 16
    """... for this many rows. The rise is another shift if its second half took at most ..."""
    sharp_rows: int = 48
    """... this many rows; a slower rise is growth of the same shift, ..."""
    growing_rows: int = 64
    """... as is one within this many rows of the report."""


class Followed(Stateful):
    """One open shift of a series of logarithms."""

    STATE: ClassVar[str] = "excess normal_rows risen_rows _reported _half_risen_rows _rows"

    def __init__(self, config: FollowedConfig) -> None:
        self._config = config
        self.begin(0.0)

    def begin(self, effect: float) -> None:
        """Start following a shift of this size."""
        self._reported = self.excess = effect
        self.normal_rows = self.risen_rows = self._half_risen_rows = self._rows = 0

    def push(self, residual: float, reach: float) -> None:
        """Add a row.

        Args:
            residual: how far it is above the level before the shift.
            reach: how far the level wanders by itself.
        """
        config = self._config
        self._rows += 1
        self.excess += (residual - self.excess) / config.clear_rows
        self.normal_rows = self.normal_rows + 1 if self.excess < config.clear_share * self._reported else 0
        rise, least = (
            self.excess - self._reported,
            max(math.log(config.rise_ratio) + reach, config.rise_share * self._reported),
        )
        self.risen_rows = self.risen_rows + 1 if rise > least else 0
        self._half_risen_rows = self._half_risen_rows + 1 if rise > least / 2 else 0

    @property
    def is_over(self) -> bool:
        """Whether the level is back where it was."""
        return self.normal_rows >= self._config.clear_rows

    @property
    def has_risen(self) -> bool:
        """Whether the shift has become larger."""
        return self.risen_rows >= self._config.rise_rows

    @property
    def is_another(self) -> bool:
        """Whether the rise came at once, on top of a shift that was stable."""
        sharp = self._half_risen_rows <= self.risen_rows + self._config.sharp_rows
        return sharp and self._rows > self._config.growing_rows + self.risen_rows


@dataclass(frozen=True, slots=True)
class RandomWalkConfig:
    """What counts as wandering."""

    spreads: float = 3.0
    """A level within this many spreads between blocks is wandering."""
    bouts_reported: int = 2
    """After this many slowdowns that came and went, further ones are reported as recurring, with their number ..."""
    bouts: int = 3
    """... and this many are a pattern, of which further ones are expected ..."""
    bout_ratio_max: float = 1.3
    """... unless they exceed this ratio: such a slowdown is reported each time."""
    pattern_share: float = 1.25
    """A slowdown up to this many times the largest bout belongs to the pattern ..."""
    bout_rows: int = 5_000
    """... until no bout has come for this many rows."""
    kept: int = 8
    """Newest bouts that are remembered; the largest of them is the size of the pattern."""


class RandomWalk(Stateful):
    """The wandering of one series of logarithms within one launch. Memory: constant."""

    STATE: ClassVar[str] = "_blocks _bouts _rows"

    def __init__(self, config: RandomWalkConfig) -> None:
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
    def recurs(self) -> bool:
        """Whether there were enough bouts to speak of them together."""
        return len(self._bouts) >= self._config.bouts_reported

    def is_like_before(self, effect: float) -> bool:
        """Whether a slowdown is about as large as one that has passed by itself."""
        return bool(self._bouts) and effect <= self._config.pattern_share * max(self.bouts)

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
