"""Which parts of a step are measured where it has many."""

from __future__ import annotations

import math
from typing import Final

MEASURED_SHARE: Final = 0.5
"""Of the most that may be measured, aimed at where parts are left out: the next step may have more of them."""


class SpanSampling:
    """Chooses among the parts of one kind: all, or every n-th where the step before had too many of them.

    Another one is the first in each step, so that over some steps all are measured.
    """

    def __init__(self, most: int) -> None:
        """`most`: parts that a step may have without any being left out."""
        self._most = most
        self._every = 1
        self._steps = 0
        self._seen = self._measured = 0

    def step_begins(self) -> None:
        """Choose by how many parts the step before had."""
        many = self._seen > self._most
        self._every = math.ceil(self._seen / (self._most * MEASURED_SHARE)) if many else 1
        self._steps += 1
        self._seen = self._measured = 0

    def takes(self) -> bool:
        """Whether the next part is measured."""
        taken = (self._seen + self._steps) % self._every == 0
        self._seen += 1
        self._measured += taken
        return taken

    @property
    def each(self) -> float:
        """How many parts of this step each measured one stands for."""
        return self._seen / self._measured if self._every > 1 and self._measured else 1.0
