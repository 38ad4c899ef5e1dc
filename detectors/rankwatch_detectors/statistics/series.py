"""Rolling quantiles and tests for drift of one series of a job. The only file that imports River.

River's estimators panic on some non-finite input and stop working after other, so only finite values are passed on.
Their state follows from a window of values, so a snapshot is the window, and restoring learns it again with the same
result.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from rankwatch_detectors.state import Stateful

DRIFT_POINTS_MAX: Final = 512
"""Points that a drift is looked for in; beyond, the newer half of them."""

ADWIN_DELTA: Final = 1e-6
"""ADWIN's significance: how likely a false alarm is at most, at each of its checks."""

PAGE_HINKLEY_THRESHOLD: Final = 25.0
PAGE_HINKLEY_DELTA: Final = 0.5
"""In standard deviations: a change of the mean below `delta` is none, and one of 1 is found after 50 points."""


DRIFT_POINTS_MIN: Final = 16
"""Points before either test speaks."""


class RollingQuantiles(Stateful):
    """Quantiles over the newest `points` finite values, between two of them in proportion; 16 bytes for each point."""

    def __init__(self, points: int, quantiles: tuple[float, ...]) -> None:
        self._points = points
        self._quantiles = quantiles
        self._fill([])

    def _fill(self, values: list[float]) -> None:
        self._window: deque[float] = deque(maxlen=self._points)
        self._ordered: list[float] = []
        for value in values:
            self.learn(value)
        self._known: tuple[float, ...] | None = None

    def __len__(self) -> int:
        return len(self._window)

    def learn(self, value: float) -> None:
        """Add a value.

        Raises:
            ValueError: the value is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"only finite values are learned, not {value}")
        window, ordered = self._window, self._ordered
        if len(window) == self._points:
            del ordered[bisect_left(ordered, window[0])]
        window.append(value)
        insort(ordered, value)
        self._known = None

    @property
    def window(self) -> list[float]:
        """The values in the window, oldest first."""
        return list(self._window)

    def get(self) -> tuple[float, ...]:
        """The quantiles, in the order of the constructor's argument; 0 while nothing has been learned."""
        if self._known is None:
            self._known = tuple([self._at(quantile) for quantile in self._quantiles])
        return self._known

    def _at(self, quantile: float) -> float:
        ordered = self._ordered
        if not ordered:
            return 0.0
        place = quantile * (len(ordered) - 1)
        below = int(place)
        low = ordered[below]
        return low + (place - below) * (ordered[below + 1] - low) if below < place else low

    def reset(self, values: list[float]) -> None:
        """Forget everything and learn these."""
        self._fill(values)

    def snapshot(self) -> dict[str, Any]:
        """The window, oldest value first."""
        return {"window": self.window}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved window."""
        self._fill(list(state["window"]))


class DriftTest(Stateful):
    """ADWIN and Page-Hinkley side by side, over residuals of mean 0 and deviation 1; 4 KB."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, values: list[float] | None = None) -> None:
        """Forget everything, and learn these residuals."""
        self._fill(values or [])

    def _fill(self, values: list[float]) -> None:
        # Imports SciPy, for which every process would wait as long as for all else; only rules on changes need it.
        from river import drift  # noqa: PLC0415

        self._window: list[float] = []
        self._adwin: Any = drift.ADWIN(  # type: ignore[no-untyped-call]
            delta=ADWIN_DELTA, clock=4, grace_period=DRIFT_POINTS_MIN
        )
        self._page_hinkley: Any = drift.PageHinkley(
            min_instances=DRIFT_POINTS_MIN, delta=PAGE_HINKLEY_DELTA, threshold=PAGE_HINKLEY_THRESHOLD
        )
        for value in values:
            self._learn(value)

    def _learn(self, value: float) -> bool:
        self._window.append(value)
        self._adwin.update(value)
        self._page_hinkley.update(value)
        return bool(self._adwin.drift_detected or self._page_hinkley.drift_detected)

    def push(self, value: float) -> bool:
        """Add a residual; returns whether either test finds a drift.

        Raises:
            ValueError: the value is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"only finite values are learned, not {value}")
        if len(self._window) >= DRIFT_POINTS_MAX:
            self._fill(self._window[DRIFT_POINTS_MAX // 2 :])
        return self._learn(value)

    def snapshot(self) -> dict[str, Any]:
        """The window, oldest value first."""
        return {"window": list(self._window)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a saved window."""
        self._fill(list(state["window"]))
