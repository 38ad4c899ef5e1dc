"""Numbers in replies. Those that JSON cannot express are the strings NaN, Inf and -Inf, never null."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainSerializer, WithJsonSchema

from rankwatch_service.numbers import as_json, plain

Number = Annotated[
    float,
    PlainSerializer(as_json),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string", "enum": ["NaN", "Inf", "-Inf"]}]}),
]

Contents = Annotated[dict[str, Any], PlainSerializer(plain, return_type=dict[str, Any])]
"""An object whose fields depend on what it is about."""
