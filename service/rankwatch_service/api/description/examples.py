"""An example for each body and answer, made from its schema and from usual values of its fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

JSON: Final = "application/json"
DEPTH_MAX: Final = 8
"""Deepest nesting of an example; schemas that contain themselves end there."""

VALUES: Final[Mapping[str, Any]] = {
    "action": "rollback",
    "acknowledged_by": "ann",
    "actor": "token:ann",
    "answer": "useful",
    "attempt": "7f3a9c.0",
    "cause": "device",
    "comment": "the node is being replaced",
    "devices": ["GPU-5d1c0a2e"],
    "device_uuid": "GPU-5d1c0a2e",
    "direction": "both",
    "evidence": {"ratio": 1.9},
    "fields": {"text": "looking into it"},
    "host": "node-17",
    "hosts": ["node-17"],
    "id": "inc_2f6d1c0a9b3e4f58a7c6d5e4",
    "incident": "inc_2f6d1c0a9b3e4f58a7c6d5e4",
    "incident_id": "inc_2f6d1c0a9b3e4f58a7c6d5e4",
    "job": "gpt-7b",
    "jobs": ["gpt-7b"],
    "kind": "straggler",
    "metric": "reward",
    "name": "gpt-7b",
    "next_cursor": None,
    "owner": "ann",
    "params": {},
    "project": "nlp",
    "projects": ["nlp"],
    "ranks": [3],
    "reason": "rank 3 is slow since step 1200",
    "receiver": "pager",
    "scope": "rank:3",
    "secret": None,
    "severities": ["critical", "warning"],
    "severity": "warning",
    "short_id": "inc_2f6d1c",
    "state": "open",
    "step": 1_200,
    "summary": "Rank 3 needs 1.9 times as long as its peers.",
    "text": "looking into it",
    "url": "https://hooks.example.com/rankwatch",
    "world_size": 64,
}
"""Usual values by name of the field; used where they fit its schema."""
UNIX_NS: Final = 1_777_627_800_000_000_000
"""2026-05-01T09:30:00Z."""
TIME: Final = "2026-05-01T09:30:00.000000Z"


def add_examples(operation: dict[str, Any], schemas: Mapping[str, Any]) -> None:
    """Add an example to the body and to each answer of an operation that has a schema in JSON.

    Args:
        operation: as described so far.
        schemas: by name, those that it refers to.
    """
    for part in (operation.get("requestBody", {}), *operation["responses"].values()):
        content = part.get("content", {}).get(JSON, {})
        if content.get("schema") and "example" not in content:
            content["example"] = example_of(content["schema"], schemas)


def example_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
    """A value of a schema.

    Args:
        schema: of the value.
        schemas: by name, those that it refers to.
        name: of the field whose value it is; empty: of none.
        depth: of nesting.
    """
    if "$ref" in schema:
        return example_of(schemas[schema["$ref"].rpartition("/")[2]], schemas, name, depth)
    if "examples" in schema:
        return schema["examples"][0]
    if "const" in schema or "enum" in schema:
        choices = schema.get("enum") or [schema["const"]]
        return VALUES[name] if VALUES.get(name) in choices else choices[0]
    if "anyOf" in schema:
        return _first_of(schema["anyOf"], schemas, name, depth)
    usual = VALUES.get(name)
    match schema.get("type"):
        case "object":
            return usual if isinstance(usual, dict) else _object_of(schema, schemas, depth)
        case "array":
            return usual if isinstance(usual, list) and _fits(schema, usual) else _array_of(schema, schemas, depth)
        case "string":
            return usual if isinstance(usual, str) else _text_of(schema, name)
        case "integer" | "number" as kind:
            return usual if isinstance(usual, int) else _number_of(schema, name, kind)
        case "boolean":
            return bool(schema.get("default", False))
        case "null":
            return None
    return {} if depth else None


def _first_of(choices: list[Mapping[str, Any]], schemas: Mapping[str, Any], name: str, depth: int) -> Any:
    if name in VALUES and VALUES[name] is None:
        return None
    return example_of(choices[0], schemas, name, depth)


def _fits(schema: Mapping[str, Any], usual: list[Any]) -> bool:
    """Whether the elements have the type that the schema of an array says."""
    types = {"string": str, "integer": int}
    wanted = types.get(schema.get("items", {}).get("type", ""))
    return wanted is not None and all(isinstance(one, wanted) for one in usual)


def _object_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> dict[str, Any]:
    if depth >= DEPTH_MAX:
        return {}
    fields = schema.get("properties", {})
    return {name: example_of(field, schemas, name, depth + 1) for name, field in fields.items()}


def _array_of(schema: Mapping[str, Any], schemas: Mapping[str, Any], depth: int) -> list[Any]:
    if depth >= DEPTH_MAX or "default" in schema:
        return list(schema.get("default", ()))
    return [example_of(schema.get("items", {}), schemas, "", depth + 1)]


def _text_of(schema: Mapping[str, Any], name: str) -> str:
    if schema.get("format") == "date-time":
        return TIME
    if schema.get("maxLength") == 0:
        return ""
    return str(schema.get("default") or name or "text")


def _number_of(schema: Mapping[str, Any], name: str, kind: str) -> float:
    if name.endswith("_unix_ns"):
        return UNIX_NS
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 1)
    value = schema.get("default") or min(max(1, low), high)
    return int(value) if kind == "integer" else float(value)
