"""The median of finite values, as numpy gives it, at a third of the cost for the small arrays of one step."""

from __future__ import annotations

import numpy as np

from rankwatch_detectors.base import Floats


def median(values: Floats) -> float:
    """The middle value, or the mean of the two middle ones. At least one value, none of them NaN."""
    half = values.size // 2
    if values.size % 2:
        return float(np.partition(values, half)[half])
    parted = np.partition(values, half)
    # Halved first: two of the largest numbers have a middle, and no sum.
    return float(np.maximum.reduce(parted[:half]) / 2 + parted[half] / 2)
