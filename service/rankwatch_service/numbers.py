"""Numbers that JSON cannot express, since a loss may be NaN or infinite: they become the strings NaN, Inf and -Inf."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite, isnan
from typing import Any


def as_json(value: float) -> float | str:
    """The number, or its name if it is not finite."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"


def plain(value: Any) -> Any:
    """A copy that has only JSON types: keys become strings, tuples lists, and non-finite numbers their names."""
    if isinstance(value, float):
        return as_json(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
