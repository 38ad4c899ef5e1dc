"""How often the total gradient norm is measured, so that it takes at most a given part of the training time.

On a long step it is measured each time. Ranks decide by their own clocks, so the interval is a power of two and counts
from step 0: ranks that come to different intervals still measure in common steps.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Final

OVERHEAD_MAX: Final = 0.01
"""Default part of the training time: a tenth of what a user would notice."""
EVERY_MAX: Final = 64
"""Longest interval in steps; the detectors of gradient norms still learn a baseline within some thousand steps."""
STEPS_REMEMBERED: Final = 16
"""Steps and measurements whose median counts, so that an evaluation or a busy core does not change the interval."""
MEASURED_FIRST: Final = 4
"""Measurements before the first choice: the first steps of a job are slower than others."""
_SHRINKS_BELOW: Final = 0.4
"""The interval is halved only when less than this part of it is needed, so that it does not alternate."""


class Sampling:
    """Says in which steps to measure. `every` is the interval in steps."""

    def __init__(self, overhead_max: float, now: Callable[[], int] = time.monotonic_ns) -> None:
        """Measure in each step at first.

        Args:
            overhead_max: largest part of the training time that measurements may take.
            now: monotonic nanoseconds.
        """
        self.every = 1
        self.due = True
        """Whether to measure in this step."""
        self.now = now
        self._overhead_max = overhead_max
        self._begun_ns = 0
        self._spent_ns = 0
        self._steps_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._costs_ns: deque[int] = deque(maxlen=STEPS_REMEMBERED)

    def step_begins(self, step: int) -> None:
        """The next step begins."""
        now_ns = self.now()
        if self._begun_ns:
            self._steps_ns.append(now_ns - self._begun_ns)
        self._begun_ns = now_ns
        if self._spent_ns and self._steps_ns:
            self._costs_ns.append(self._spent_ns)
            if len(self._costs_ns) >= MEASURED_FIRST:
                self._choose()
        self._spent_ns = 0
        self.due = step % self.every == 0

    def took(self, spent_ns: int) -> None:
        """A measurement of this step took so long; there are several if gradients accumulate."""
        self._spent_ns += spent_ns

    def _choose(self) -> None:
        step_ns = statistics.median(self._steps_ns)
        needed = statistics.median(self._costs_ns) / max(step_ns * self._overhead_max, 1.0)
        while self.every < min(needed, EVERY_MAX):
            self.every *= 2
        while self.every > 1 and needed < self.every * _SHRINKS_BELOW:
            self.every //= 2
