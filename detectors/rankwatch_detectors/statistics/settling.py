"""Whether a curve has a level yet, and how far it rises from block to block by itself.

A new network moves: norms grow eightfold in some tens of steps, losses of adversaries climb and fall in turn. So
nothing is said about the level of a curve before it is 256 steps old and four blocks of 32 points are known, and from
then on only about what exceeds three times the usual rise from one block's median to the next. That rise is the root
mean square over the newest blocks: of noise alone it is the standard deviation of a median, of a climb its slope.
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
    """When a curve has a level. Points are what is logged, which may be every hundredth step."""

    young_steps: int = 256
    """Where new networks of a dozen kinds, with and without warm-up, have found their course."""
    block_points: int = 32
    """As many as the level itself is the median of: a rise that it would follow is a rise between blocks."""
    rises_min: int = 3
    rises_kept: int = 7
    """One old rise is forgotten after as many points as teach the scatter."""
    rise_factor: float = 3.0


class Settling(Stateful):
    """The age of one series, and its rises from block to block. Memory: a block and its neighbours, 400 bytes."""

    STATE: ClassVar[tuple[str, ...]] = ("_age", "_step", "_block", "_last", "_rises")

    def __init__(self, config: SettlingConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget everything: the curve begins anew, or moves because somebody wanted it to."""
        self._age = 0
        self._rises: list[float] = []
        self.interrupt()

    def interrupt(self) -> None:
        """What comes next does not follow on what came before, but it is the same curve."""
        self._step: int | None = None
        self._block: list[float] = []
        self._last: float | None = None

    def advance(self, step: int) -> None:
        """Let it grow older: a point came, whether it teaches anything or not."""
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
        """Whether the curve is in its first hundreds of steps, when nobody is woken up."""
        return self._age < self._config.young_steps

    @property
    def least(self) -> float:
        """The least rise of the level that is worth a word; infinite while the curve has none."""
        if self.young or len(self._rises) < self._config.rises_min:
            return math.inf
        mean_square = sum(rise * rise for rise in self._rises) / len(self._rises)
        return self._config.rise_factor * math.sqrt(mean_square)
