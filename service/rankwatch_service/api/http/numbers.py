"""Numbers in answers: those that JSON does not have are the strings NaN, Inf and -Inf."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema

from rankwatch_service.numbers import as_json

Number = Annotated[
    float,
    PlainSerializer(as_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Inf", "-Inf"]}]}),
]
