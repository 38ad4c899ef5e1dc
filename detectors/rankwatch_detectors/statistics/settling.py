"""Whether a curve has a level yet, and how far it rises from block to block by itself.

Curves of a new network move: norms grow eightfold within tens of steps, losses of adversaries climb and fall in turn.
So a curve's level is not judged before it is 256 steps old and four blocks of 32 points are known. From then on only a
rise of more than three times the usual one from block median to block median is reported. The usual rise is the root
mean square over the newest blocks: for noise alone the standard deviation of a median, for a climb its slope.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.median import median


@dataclass(frozen=True, slots=True)
class SettlingConfig:
    """When a curve has a level. Points are logged values, which may come every hundredth step."""

    young_steps: int = 256
    """Steps after which new networks of a dozen kinds, with and without warm-up, have settled."""
    block_points: int = 32
    """The number of points in the level's median: a rise that the level would follow is a rise between blocks."""
    rises_min: int = 3
    rises_kept: int = 7
    """Together with the current block as many points as the scatter is learned from."""
    rise_factor: float = 3.0


class Settling(Stateful):
    """The age of one series, and its rises from block to block. Memory: a block and its neighbours, 400 bytes."""

    STATE: ClassVar[tuple[str, ...]] = ("_age", "_step", "_block", "_last", "_rises")

    def __init__(self, config: SettlingConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget everything: the curve begins anew, or changes intentionally."""
        self._age = 0
        self._rises: list[float] = []
        self.interrupt()

    def interrupt(self) -> None:
        """The next point does not continue the last block, though the curve is the same."""
        self._step: int | None = None
        self._block: list[float] = []
        self._last: float | None = None

    def advance(self, step: int) -> None:
        """Increase the curve's age by a point, whether the point is learned or not."""
        if self._step is not None:
            self._age += max(step - self._step, 0)
        self._step = step

    def learn(self, point: float) -> None:
        """Add a finite point that is not under suspicion."""
        self._block.append(point)
        if len(self._block) < self._config.block_points:
            return
        level = median(np.asarray(self._block))
        if self._last is not None:
            self._rises = [*self._rises, max(level - self._last, 0.0)][-self._config.rises_kept :]
        self._block, self._last = [], level

    @property
    def young(self) -> bool:
        """Whether the curve is in its first `young_steps`, in which findings are only information."""
        return self._age < self._config.young_steps

    @property
    def least(self) -> float:
        """The least rise of the level that is reported; infinite while the curve has no level."""
        if self.young or len(self._rises) < self._config.rises_min:
            return math.inf
        mean_square = sum(rise * rise for rise in self._rises) / len(self._rises)
        return self._config.rise_factor * math.sqrt(mean_square)
