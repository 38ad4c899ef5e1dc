"""Whether the ranks of an attempt march together: finds out where they do not and nobody has said so. Pure.

Synchronous training keeps all ranks within a step or a few of each other. Blocks are up to some seconds old, so that a
rank may look as many steps behind as the job makes in that time; more than that, and ranks do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Presence
from rankwatch_detectors.dispatch import which

FRESH_S: Final = 5.0
"""Older blocks, and blocks that came so much later or sooner than before, say nothing about now."""

APART_STEPS: Final = 8.0
"""Ranks may be this many steps apart ..."""

APART_S: Final = 10.0
"""... and as many more as the fastest makes in this time: twice what blocks are old at most."""

LOOKS: Final = 10
"""So often in a row, about once a second."""


class March:
    """Counts each rank's steps since all that are heard were seen together. Memory: 24 bytes for each rank."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._step: Floats = np.zeros(0)
        self._told_s: Floats = np.zeros(0)
        self._last: Floats = np.zeros(0)
        self._looks = 0

    def has_come_apart(self, seen: Presence, now_s: float) -> bool:
        """Whether ranks go at their own pace, as far as the newest blocks show."""
        running = seen.heard & (now_s - seen.heard_s <= FRESH_S)
        running &= which(seen.state, "running")
        # A rank that was not heard before, or a loop that counts anew.
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
    def restored(cls, state: Mapping[str, Any]) -> March:
        """The march that gave this state."""
        march = cls()
        march._since_s, march._looks = state["since_s"], state["looks"]
        march._step, march._told_s, march._last = state["step"], state["told_s"], state["last"]
        return march
