"""Where a step's work ends: after as many optimizer steps as usually end one, what the loop does is no part of it.

A loop over `watch.steps()` reaches its boundary only after it has evaluated, saved and logged. The optimizer tells
sooner that the step itself is done.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from rankwatch.meter import Sink

STEPS_REMEMBERED: Final = 32
"""Steps with an update whose number of updates is remembered: a loop that trains two models in turns, one of them five
times as often, shows all its habits in them."""


class Updates:
    """Counts the optimizer steps of each step of the loop, and tells the sink when the last one is done.

    The fewest of the remembered steps count as usual, so that a pause after any of them is seen as one. Where steps
    differ, work that goes on all the same is taken up again with its backward.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seen: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._count = 0
        self._usual = 0
        self._vary = False

    def step_begins(self) -> None:
        """The next step of the loop begins. Steps without an update, of accumulation or overflow, tell nothing."""
        if self._count:
            self._seen.append(self._count)
            self._usual = min(self._seen)
            self._vary = self._usual < max(self._seen)
            self._count = 0

    def begins(self) -> None:
        """An optimizer step begins: the work was not done."""
        if self._outside:
            self._sink.inside()

    def ends(self) -> None:
        """An optimizer step is done."""
        self._count += 1
        if self._outside:
            self._sink.outside()

    def gradients_are_computed(self) -> None:
        """A backward is nearly through: in a loop whose steps differ there is one more update to come."""
        if self._outside and self._vary:
            self._sink.inside()

    @property
    def _outside(self) -> bool:
        return 0 < self._usual <= self._count
