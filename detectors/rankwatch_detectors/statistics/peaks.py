"""Short peaks of a curve within a divergence, or just before it.

While an episode is open, points are compared with the level before it, so a spike during a climb opens no other one.
Here a point is compared with the median of the points just before it, in units of their scatter, so that a climb alone
is no peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.median import median

SIGMAS_OF_MIDDLE = 1.4826


@dataclass(frozen=True, slots=True)
class PeakConfig:
    """What a peak is, and how many are kept."""

    points: int = 16
    sigmas: float = 8.0
    """As for a point that doubles a loss (`LevelConfig.ratio_sigmas`)."""
    kept: int = 16


class Peaks(Stateful):
    """The newest peaks of one series. Memory: its window and the peaks."""

    STATE: ClassVar[tuple[str, ...]] = ("_window", "_inside", "_peaks")

    def __init__(self, config: PeakConfig) -> None:
        self._config = config
        self.clear()

    def clear(self) -> None:
        """Forget all points and peaks, for a new attempt."""
        self._window: list[float] = []
        self._inside = False
        self._peaks: list[dict[str, Any]] = []

    def push(self, step: int, value: float, scale: float) -> bool:
        """Add one finite point; return whether a peak has begun or become higher."""
        config, window = self._config, np.asarray(self._window)
        usual = median(window) if window.size == config.points else value
        around = SIGMAS_OF_MIDDLE * median(np.abs(window - usual)) if window.size else 0.0
        self._window = [*self._window, value][-config.points :]
        before, self._inside = self._inside, value - usual >= config.sigmas * max(scale, around, 1e-12)
        if not self._inside:
            return False
        if before and value <= self._peaks[-1]["value"]:
            return False
        if not before:
            self._peaks = [*self._peaks, {"step": step}][-config.kept :]
        self._peaks[-1] |= {"value": value, "height": value - usual}
        return True

    def since(self, step: int) -> list[dict[str, Any]]:
        """The peaks from a step on, oldest first: the step in which each began, its highest value, and its height
        above the points before it.
        """
        return [dict(peak) for peak in self._peaks if peak["step"] >= step]
