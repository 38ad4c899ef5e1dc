"""Each rank's own time in blocks of rows, and whether its newest blocks are slower than the earlier ones.

Durations of work that differs from row to row have heavy tails and come in runs, so neither one row nor the scatter
of rows says much. A block is the mean logarithm of some rows. The newest 2, 4, 8 or 16 blocks are compared with the
median of the earlier ones, and what they may exceed it by is learned from the rank itself: how far means over as many
earlier blocks lie from that median. So a trend, or bouts that come and go, widen what is expected by themselves.
Every block teaches, the slow ones too: medians stand them until there are many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Ints
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.median import median

WINDOWS = (2, 4, 8, 16)
"""Newest blocks that are judged together: a tripled time shows in two, a third more needs up to sixteen."""
# Variance of a median over that of a mean, of a normal distribution.
MEDIAN_VARIANCE = math.pi / 2


@dataclass(frozen=True, slots=True)
class OwnBlocksConfig:
    """What makes a block, and what makes newer ones slower."""

    rows: int = 16
    """Rows of a block, at least ..."""
    seconds: float = 15.0
    """... and what they took, at least: who is slow for some seconds has a neighbour, or a long piece of work."""
    kept: int = 64
    """Earlier blocks that are remembered besides the newest."""
    known_min: int = 8
    """Earlier blocks before anything is said ..."""
    known_windows: int = 3
    """... and so many times the blocks that are judged."""
    ratio_min: float = 1.25
    sigmas: float = 2.5
    """Counts where most ranks are slower at once. A steady trend comes to 1.7 of its own spread."""
    row_ratio_max: float = 7.4
    """One row counts as no more than so many times the block before it."""
    sigma_floor: float = 0.02


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank whose newest blocks are slower than it was."""

    rank: int
    effect: float
    """Logarithm of the ratio to its usual time."""
    usual_s: float
    sigma: float
    """What means over so many blocks differ by."""
    blocks: int
    onset_step: int

    @property
    def score(self) -> float:
        """How many times what such means differ by."""
        return self.effect / self.sigma


class OwnBlocks(Stateful):
    """Blocks of R ranks that go at their own pace. Memory: 820 bytes for each rank."""

    STATE: ClassVar[tuple[str, ...]] = ("_sum", "_rows", "_took_s", "_begun", "_levels", "_steps", "_known", "_sigma")

    def __init__(self, config: OwnBlocksConfig) -> None:
        self._config = config
        self.begin(0)

    def begin(self, ranks: int) -> None:
        """Know nothing of so many ranks."""
        kept = self._config.kept + WINDOWS[-1]
        self._sum: Floats = np.zeros(ranks)
        self._rows: Floats = np.zeros(ranks)
        self._took_s: Floats = np.zeros(ranks)
        """The block that each rank is filling, and the step in which it begins."""
        self._begun: Ints = np.zeros(ranks, dtype=np.int64)
        self._levels: Floats = np.full((ranks, kept), math.nan)
        """Full blocks, the newest last ..."""
        self._steps: Ints = np.zeros((ranks, WINDOWS[-1]), dtype=np.int64)
        """... and the steps in which the newest of them begin."""
        self._known: Ints = np.zeros(ranks, dtype=np.int64)
        self._sigma: Floats = np.full((len(WINDOWS), ranks), math.nan)
        """What means over windows of each length differ by; NaN until enough is known."""

    def forget(self, rank: int, blocks: int) -> None:
        """Keep only the newest blocks of a rank: what was before them is no longer what is usual."""
        self._known[rank] = min(int(self._known[rank]), blocks)
        self._sigma[:, rank] = math.nan

    def push(self, ranks: Ints, seconds: Floats, step: int) -> list[int]:
        """Add the rows of one frame.

        Args:
            ranks: who made the step.
            seconds: what it took each of them; positive and finite.
            step: its number.

        Returns:
            Ranks whose block is full.
        """
        config = self._config
        first = ranks[self._rows[ranks] == 0]
        self._begun[first] = step
        logs = np.log(seconds)
        before, reach = self._levels[ranks, -1], math.log(config.row_ratio_max)
        known = self._known[ranks] > 0
        logs[known] = np.clip(logs[known], before[known] - reach, before[known] + reach)
        self._sum[ranks] += logs
        self._rows[ranks] += 1
        self._took_s[ranks] += seconds
        full = ranks[(self._rows[ranks] >= config.rows) & (self._took_s[ranks] >= config.seconds)]
        for rank in full.tolist():
            self._close(rank)
        return [int(rank) for rank in full]

    def _close(self, rank: int) -> None:
        self._levels[rank, :-1] = self._levels[rank, 1:]
        self._levels[rank, -1] = self._sum[rank] / self._rows[rank]
        self._steps[rank, :-1] = self._steps[rank, 1:]
        self._steps[rank, -1] = self._begun[rank]
        self._known[rank] = min(self._known[rank] + 1, self._levels.shape[1])
        self._sum[rank] = self._rows[rank] = self._took_s[rank] = 0.0

    def slower(self, rank: int) -> SlowRank | None:
        """Whether a rank whose block is full is slower than it was, by the window that shows it best."""
        found = [slower for number, window in enumerate(WINDOWS) if (slower := self._slower(rank, number, window))]
        return max(found, key=lambda slower: slower.score, default=None)

    def _slower(self, rank: int, number: int, window: int) -> SlowRank | None:
        config = self._config
        earlier = int(min(self._known[rank] - window, config.kept))
        if earlier < max(config.known_min, config.known_windows * window):
            return None
        past = self._levels[rank, -window - earlier : -window]
        usual = median(past)
        means = np.convolve(past, np.full(window, 1 / window), "valid") - usual
        single = float(np.square(past - usual).mean()) / window
        self._sigma[number, rank] = own = math.sqrt(max(float(np.square(means).mean()), single))
        newest = np.sort(self._levels[rank, -window:]) - usual
        effect = float(newest.mean())
        # A quarter of the blocks may be as fast as before, no more: one long piece of work makes no slow rank.
        if effect < math.log(config.ratio_min) or newest[window // 4] < effect / 3:
            return None
        of_all = self._sigma[number]
        sigma = max(own, median(of_all[np.isfinite(of_all)]), config.sigma_floor)
        sigma *= math.sqrt(1 + MEDIAN_VARIANCE * window / earlier)
        if effect < config.sigmas * sigma:
            return None
        return SlowRank(rank, effect, math.exp(usual), sigma, window, int(self._steps[rank, -window]))

    @property
    def judged(self) -> Bools:
        """Ranks of which enough is known to say what is usual."""
        return self._known >= self._config.known_min

    def usual(self, ranks: Ints) -> Floats:
        """The logarithm of what a step of each of these ranks usually takes; NaN where too little is known."""
        usual = np.full(ranks.size, math.nan)
        for index, rank in enumerate(ranks.tolist()):
            known = int(self._known[rank])
            if known >= self._config.known_min:
                usual[index] = median(self._levels[rank, -known:])
        return usual

    def newest(self, ranks: Ints) -> Floats:
        """The same of their newest rows: of the block that they are filling once it is half full, else of the last."""
        config = self._config
        half = (self._rows[ranks] * 2 >= config.rows) & (self._took_s[ranks] * 2 >= config.seconds)
        return np.where(half, self._sum[ranks] / np.maximum(self._rows[ranks], 1.0), self._levels[ranks, -1])

    def newest_two(self, rank: int) -> float:
        """The same of the newest two blocks of one rank."""
        return float(self._levels[rank, -2:].mean())
