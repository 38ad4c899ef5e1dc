"""Numbers in answers: JSON has no NaN and no infinities, a loss has. They are the strings NaN, Inf and -Inf."""

from __future__ import annotations

from math import isfinite, isnan
from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema


def as_json(value: float) -> float | str:
    """The number, or its name where it is not finite."""
    if isfinite(value):
        return value
    return "NaN" if isnan(value) else "Inf" if value > 0 else "-Inf"


Number = Annotated[
    float,
    PlainSerializer(as_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Inf", "-Inf"]}]}),
]
