"""Finds where a step's work ends: after the usual number of optimizer steps, the loop is outside of the step.

A loop over `watch.steps()` reaches its boundary only after it has evaluated, saved and logged. The optimizer steps show
earlier that the step itself is done.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rankwatch.sink import Sink

STEPS_REMEMBERED: Final = 32
"""Steps with an update whose number of updates is remembered: enough for a loop that alternates between two models, one
of them five times as often."""


class Updates:
    """Counts the optimizer steps of each step of the loop, and calls `outside` of the sink after the last one.

    The smallest remembered count is the usual one, so that a pause after any step is seen. If steps differ, a step that
    goes on after the usual count is taken up again with its next backward.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seen: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._count = 0
        self._usual = 0
        self._vary = False

    def step_begins(self) -> None:
        """The next step of the loop begins. Steps without an update (accumulation, overflow) are not counted."""
        if self._count:
            self._seen.append(self._count)
            self._usual = min(self._seen)
            self._vary = self._usual < max(self._seen)
            self._count = 0

    def begins(self) -> None:
        """An optimizer step begins, so the step's work goes on."""
        if self._outside:
            self._sink.inside()

    def ends(self) -> None:
        """An optimizer step is done."""
        self._count += 1
        if self._outside:
            self._sink.outside()

    def gradients_are_computed(self) -> None:
        """A backward has computed its gradients: in a loop whose steps differ, another update follows."""
        if self._outside and self._vary:
            self._sink.inside()

    @property
    def _outside(self) -> bool:
        return 0 < self._usual <= self._count
