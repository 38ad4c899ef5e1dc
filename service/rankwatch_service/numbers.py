"""Numbers that JSON does not have: a loss may be NaN or infinite. They are the strings NaN, Inf and -Inf."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan
from typing import Any


def as_json(value: float) -> float | str:
    """The number, or its name where it is not finite."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"


def plain(value: Any) -> Any:
    """A copy in JSON types alone: keys are strings, tuples are lists, and numbers that are not finite their names."""
    if isinstance(value, float):
        return as_json(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
