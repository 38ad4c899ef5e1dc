"""Detects ranks that go at their own pace although they are reported to train in lockstep. Pure.

Synchronous training keeps all ranks within a few steps of each other. A progress block is up to some seconds old, so a
rank may seem to be behind by as many steps as the job makes in that time. A larger distance means that the ranks do not
wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Presence

FRESH_S: Final = 5.0
"""Blocks that are older, or whose delay changed by more than this, are ignored."""

APART_STEPS: Final = 8.0
"""Ranks in lockstep may seem this many steps apart ..."""

APART_S: Final = 10.0
"""... and as many more as the fastest rank makes in this time: twice `FRESH_S`."""

LOOKS: Final = 10
"""How many checks in a row, about one a second, must find the ranks apart."""


class LockstepCheck:
    """Counts the steps of each rank from a common start. Memory: 24 bytes for each rank."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._step: Floats = np.zeros(0)
        self._told_s: Floats = np.zeros(0)
        self._last: Floats = np.zeros(0)
        self._looks = 0

    def has_failed(self, seen: Presence, now_s: float) -> bool:
        """Whether the newest blocks show that ranks go at their own pace; call it once for each tick."""
        running = seen.heard & (now_s - seen.heard_s <= FRESH_S)
        running &= seen.where("state", "running")
        # Begin again if a rank reports for the first time, or its loop counts from the start.
        if self._last.size != running.size or not (seen.step >= self._last)[running].all():
            self._begin(seen, running, now_s)
            return False
        self._last = np.where(running, seen.step, self._last)
        passed_s = now_s - self._since_s
        in_time = running & (np.abs(seen.told_s - self._told_s - passed_s) <= FRESH_S)
        made = seen.step[in_time] - self._step[in_time]
        if passed_s < APART_S or made.size < 2:
            return False
        apart = made.max() - made.min() > APART_STEPS + APART_S * made.max() / passed_s
        self._looks = self._looks + 1 if apart else 0
        return self._looks >= LOOKS

    def _begin(self, seen: Presence, running: Bools, now_s: float) -> None:
        self._since_s, self._looks = now_s, 0
        self._step = self._last = np.where(running, seen.step, math.nan)
        self._told_s = np.where(running, seen.told_s, math.nan)

    def state(self) -> dict[str, Any]:
        """Everything that decides the future."""
        arrays = {"step": self._step, "told_s": self._told_s, "last": self._last}
        return {"since_s": self._since_s, "looks": self._looks, **arrays}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> LockstepCheck:
        """The check that gave this state."""
        check = cls()
        check._since_s, check._looks = state["since_s"], state["looks"]
        check._step, check._told_s, check._last = state["step"], state["told_s"], state["last"]
        return check
