"""Estimates the step time from agents' views, for orders on an attempt that stream has not measured yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwatch_service.orders.order import HostView
from rankwatch_service.orders.running_attempt import Training

STEP_TIME_S_MIN: Final = 0.001
"""Lower bound of the estimate, so that an order's margin in steps stays finite."""

STILL_S: Final = 3.0
"""If no new step is seen for this long, the time watched so far is taken as the step time."""

PACES_MAX: Final = 256
"""Attempts remembered, each with an open order. A full map is emptied; the estimates then begin again."""


class Paces:
    """Remembers the first view of each attempt, and compares later ones with it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[int, int]] = {}

    def step_time_s(self, training: Training, views: Mapping[str, HostView]) -> float | None:
        """Seconds per step: as stream measured it, else as the views show it; None until they do."""
        if training.step_time_s:
            return max(training.step_time_s, STEP_TIME_S_MIN)
        newest = [(view.at_unix_ns, rank.step) for view in views.values() for rank in view.ranks]
        if not newest:
            return None
        at_unix_ns, step = max(at for at, _ in newest), max(step for _, step in newest)
        if len(self._first) >= PACES_MAX:
            self._first.clear()
        first_unix_ns, first_step = self._first.setdefault((training.job, training.attempt), (at_unix_ns, step))
        watched_s = (at_unix_ns - first_unix_ns) / 1e9
        if step > first_step:
            return max(watched_s / (step - first_step), STEP_TIME_S_MIN)
        return watched_s if watched_s >= STILL_S else None
