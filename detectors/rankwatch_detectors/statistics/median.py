"""The median of finite values, equal to numpy's, at a tenth of its cost for the small arrays of one step."""

from __future__ import annotations

from typing import Final

from rankwatch_detectors.base import Floats

SORTED_MAX: Final = 1_024
"""Up to so many values, sorting all of them takes less time than finding the middle ones."""


def median(values: Floats) -> float:
    """The middle value, or the mean of the two middle ones. Needs at least one value, and no NaN."""
    half = values.size // 2
    ordered = values.copy()
    if values.size <= SORTED_MAX:
        ordered.sort()
    else:
        ordered.partition((half - 1, half))
    if values.size % 2:
        return ordered.item(half)
    # Halved before adding, because the sum of two very large numbers overflows.
    return ordered.item(half - 1) / 2 + ordered.item(half) / 2
