"""Numbers in replies. Those that JSON cannot express are the strings NaN, Inf and -Inf."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainSerializer, WithJsonSchema

from rankwatch_service.numbers import as_json

Number = Annotated[
    float,
    PlainSerializer(as_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Inf", "-Inf"]}]}),
]
