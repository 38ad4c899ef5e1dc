"""Rolling quantiles of one series of a job. The only file that imports River.

River's rolling quantile panics on some non-finite input and stops working after other, so only finite values are passed
on. Its state is its window, so a snapshot is the window, and restoring learns it again with the same result.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from river import stats

from rankwatch_detectors.state import Stateful


class RollingQuantiles(Stateful):
    """Quantiles over the newest `points` finite values; 30 bytes for each point and quantile."""

    def __init__(self, points: int, quantiles: tuple[float, ...]) -> None:
        self._points = points
        self._quantiles = quantiles
        self._fill([])

    def _fill(self, values: list[float]) -> None:
        self._window: deque[float] = deque(maxlen=self._points)
        self._estimators = [stats.RollingQuantile(quantile, self._points) for quantile in self._quantiles]
        for value in values:
            self.learn(value)

    def __len__(self) -> int:
        return len(self._window)

    def learn(self, value: float) -> None:
        """Add a value.

        Raises:
            ValueError: the value is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"only finite values are learned, not {value}")
        self._window.append(value)
        for estimator in self._estimators:
            estimator.update(value)

    @property
    def window(self) -> list[float]:
        """The values in the window, oldest first."""
        return list(self._window)

    def get(self) -> tuple[float, ...]:
        """The quantiles, in the order of the constructor's argument; 0 while nothing has been learned."""
        return tuple(float(estimator.get() or 0.0) for estimator in self._estimators)

    def reset(self, values: list[float]) -> None:
        """Forget everything and learn these."""
        self._fill(values)

    def snapshot(self) -> dict[str, Any]:
        """The window, oldest value first."""
        return {"window": self.window}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Learn a saved window."""
        self._fill(list(state["window"]))
