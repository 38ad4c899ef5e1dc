"""How much longer than independent noise would the noise of ranks last: what means over blocks of rows still scatter.

The mean of n independent rows has an n-th of a row's variance. Where a disturbance lasts for many rows, as a host that
is hot for a minute, it has more; the ratio of both is by how much a sum over a run of rows must be trusted less.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats
from rankwatch_detectors.state import Stateful

# Weight of what was known before, in blocks of single ranks: few ranks change it slowly, many at once.
PRIOR_BLOCKS = 32.0


class BlockCorrelation(Stateful):
    """The correlation of noise within blocks of one length. Memory: 8 bytes for each rank."""

    STATE: ClassVar[tuple[str, ...]] = ("ratio", "_sum", "_row")

    def __init__(self, rows: int) -> None:
        """Build it for blocks of so many rows."""
        self._rows = rows
        # Until blocks are measured: 1.5 times the variance of independent rows, as in step times of shared hosts.
        self.ratio = 1.5
        """Variance of a block's sum over that of as many independent rows: 1 to `rows`."""
        self.begin(0)

    def begin(self, ranks: int) -> None:
        """Begin a block of so many ranks; what was measured is kept."""
        self._sum: Floats = np.zeros(ranks)
        self._row = 0

    def add(self, noise: Floats, calm: Bools, variance: float) -> None:
        """Add one row.

        Args:
            noise: each rank's deviation; 0 for ranks that are not calm.
            calm: ranks that count if the block ends with this row.
            variance: of a row.
        """
        self._sum += noise
        self._row += 1
        if self._row < self._rows:
            return
        count = int(np.count_nonzero(calm))
        if count:
            measured = float((self._sum[calm] ** 2).mean()) / self._rows / variance
            # 1: independent rows; `rows`: all rows of a block move together. Values beyond are chance.
            bounded = min(max(measured, 1.0), float(self._rows))
            self.ratio += (bounded - self.ratio) * count / (count + PRIOR_BLOCKS)
        self._sum[:] = 0.0
        self._row = 0
