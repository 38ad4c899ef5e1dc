"""Numbers that JSON does not have: a loss may be NaN or infinite. They are the strings NaN, Inf and -Inf."""

from __future__ import annotations

from math import isfinite, isnan


def as_json(value: float) -> float | str:
    """The number, or its name where it is not finite."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"
