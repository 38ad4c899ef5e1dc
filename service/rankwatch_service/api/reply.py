"""What all replies have in common: times in text beside those in nanoseconds."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pydantic import BaseModel, GetJsonSchemaHandler, SerializerFunctionWrapHandler, model_serializer
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

NANOSECONDS: Final = "_unix_ns"
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
TIME_SCHEMA: Final = {"type": "string", "format": "date-time"}


def text_name(name: str) -> str:
    """The field that has in text what the field `name` has in nanoseconds: `created_unix_ns` has `created_at` beside
    it, `at_unix_ns` has `at`. Empty if `name` is no time.
    """
    if not name.endswith(NANOSECONDS):
        return ""
    moment = name.removesuffix(NANOSECONDS)
    return moment if moment == "at" else f"{moment}_at"


def time_text(unix_ns: int) -> str:
    """A time as RFC 3339 writes it, in UTC and to the microsecond: 2026-05-01T09:30:00.000000Z."""
    moment = EPOCH + timedelta(microseconds=unix_ns // 1_000)
    return moment.isoformat(timespec="microseconds").removesuffix("+00:00") + "Z"


def with_time_texts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, and beside each time in nanoseconds the same in text. Lists of times, as charts have, stay alone."""
    content: dict[str, Any] = {}
    for name, value in fields.items():
        content[name] = value
        if (text := text_name(name)) and not isinstance(value, list):
            content[text] = None if value is None else time_text(value)
    return content


class ApiReply(BaseModel):
    """Base of all that the api replies with. In JSON, a time `*_unix_ns` is followed by the same in text, `*_at`."""

    @model_serializer(mode="wrap", when_used="json")
    def _with_time_texts(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return with_time_texts(fields(self))

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """The schema of the fields, with the times in text if it is that of replies."""
        found = handler(_without_serializer(core_schema))
        if handler.mode != "serialization":
            return found
        schema = handler.resolve_ref_schema(found)
        fields = schema.get("properties", {})
        properties: dict[str, Any] = {}
        for name, field in fields.items():
            properties[name] = field
            if (text := text_name(name)) and field.get("type") != "array":
                properties[text] = _text_schema(field)
        schema["properties"] = properties
        if added := [name for name in properties if name not in fields]:
            schema["required"] = [*schema.get("required", ()), *added]
        return found


def _without_serializer(core_schema: CoreSchema) -> CoreSchema:
    """The schema of the model itself: the serializer that adds the texts would make it an object of anything."""
    plain: Any = {name: part for name, part in core_schema.items() if name != "serialization"}
    if "schema" in plain and core_schema["type"] != "model":  # validators of the model, or definitions around it
        plain["schema"] = _without_serializer(plain["schema"])
    return plain  # type: ignore[no-any-return]


def _text_schema(field: Mapping[str, Any]) -> dict[str, Any]:
    """Schema of a time in text, null where the one in nanoseconds is."""
    about = {"description": "The same time as RFC 3339 writes it, in UTC"}
    if any(one.get("type") == "null" for one in field.get("anyOf", ())):
        return {"anyOf": [TIME_SCHEMA, {"type": "null"}], **about}
    return {**TIME_SCHEMA, **about}
