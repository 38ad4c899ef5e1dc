"""Noise that remembers, and single values far out.

What slows a computer down lasts: a hot room for hours, a neighbour's traffic for seconds. Every series here goes on in
seconds and not in steps, so that jobs of short steps see the same disturbance over more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rankwatch_detectors.base import Floats

PINK_S: Final = tuple(4.0**power for power in range(7))
"""Time constants from a second to an hour, each four times the one before. The sum of such AR(1) series is 1/f noise:
its power falls with the frequency between the inverses of the longest and the shortest of them."""


class CorrelatedNoise:
    """Independent stationary series, each a sum of AR(1) series with equal variances.

    With one time constant it is AR(1), with `PINK_S` 1/f noise. Values that lie t seconds apart have the correlation
    mean(e^(-t / constant)).
    """

    def __init__(self, random: np.random.Generator, count: int, sigma: float, constants_s: Sequence[float]) -> None:
        """Draw the values of `count` series at the beginning.

        Args:
            random: where the values come from.
            count: the number of series.
            sigma: standard deviation of a series.
            constants_s: time constants of its parts, in seconds.
        """
        self._random = random
        self._constants_s = np.asarray(constants_s)[:, np.newaxis]
        self._sigma = sigma / len(constants_s) ** 0.5
        self._parts = self._sigma * random.standard_normal((len(constants_s), count))

    def after(self, seconds: float) -> Floats:
        """The values so many seconds after those before, float64 [count]."""
        kept = np.exp(-seconds / self._constants_s)
        fresh = self._random.standard_normal(self._parts.shape)
        self._parts = kept * self._parts + self._sigma * np.sqrt(1 - kept**2) * fresh
        return np.asarray(self._parts.sum(axis=0))


def tails(random: np.random.Generator, count: int, probability: float, median: float, sigma: float) -> Floats:
    """Mostly 0; with the given probability log-normal with this median and, of its logarithm, standard deviation."""
    size = median * np.exp(sigma * random.standard_normal(count))
    return np.where(random.random(count) < probability, size, 0.0)
