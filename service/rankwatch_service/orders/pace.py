"""How long a step takes, from agents' views alone: for orders on an attempt that stream has not measured yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankwatch_service.orders.order import HostView
from rankwatch_service.orders.running_attempt import Training

STEP_TIME_S_MIN: Final = 0.001
"""Shorter steps are taken to last this long: the margin in steps stays finite."""

STILL_S: Final = 3.0
"""After watching for so long without a new step, a step is taken to last as long as was watched."""

PACES_MAX: Final = 256
"""Attempts remembered; each has an order open. Forgetting them all costs one of them a second look."""


class Paces:
    """Remembers the first view of each attempt that was asked about, and compares later ones with it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, str], tuple[int, int]] = {}

    def step_time_s(self, training: Training, views: Mapping[str, HostView]) -> float | None:
        """Seconds of one step: what stream measured, else what the views show; None until they show something."""
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
