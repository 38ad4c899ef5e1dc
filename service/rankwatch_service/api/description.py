"""The error responses and the examples in the API's description (problem+json, RFC 9457)."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

MEDIA_TYPE: Final = "application/problem+json"

PROBLEM: Final = {
    "type": "object",
    "description": "Why a request was refused (RFC 9457)",
    "required": ["type", "title", "status", "detail", "request_id"],
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string", "description": "The status in words"},
        "status": {"type": "integer"},
        "detail": {"type": "string", "description": "What is wrong, and what to do, for the person who sent it"},
        "request_id": {"type": "string", "description": "Finds the request in the log of the service"},
        "errors": {
            "type": "array",
            "description": "What is wrong with which part of the request",
            "items": {"type": "object"},
        },
    },
}

EVERYWHERE: Final = {
    400: "The request is not well-formed",
    421: "The service does not answer to this name: see RANKWATCH_ALLOWED_HOSTS",
    500: "Internal error; the log of the service has the details, under the request_id",
    503: "The database does not answer, or too much is being done; the same request may succeed later",
}
WITH_TOKEN: Final = {
    401: "No token, or one that has expired, was revoked or is unknown",
    403: "The token lacks the scope, or is restricted to other jobs",
    429: "Too many requests with an invalid token came from this address",
}
WITH_PARAMETERS: Final = {422: "A parameter is unknown, repeated or out of its range, or the body is not valid"}
WITH_NAME: Final = {404: "There is nothing of this name that the token may see"}
WITH_IF_MATCH: Final = {412: "Somebody has changed it since it was read"}
WITH_BODY: Final = {413: "The body is too long"}

CONFLICT: Final[Mapping[tuple[str, str], str]] = {
    (
        "POST",
        "/api/v1/agents/view",
    ): "The agent that signed is not enrolled for this job on this host: it should enrol again",
    ("POST", "/api/v1/commands/{command_id}/approve"): "It does not wait, has expired, or you requested it yourself",
    ("POST", "/api/v1/commands/{command_id}/cancel"): "A rank has already acted on it",
    ("POST", "/api/v1/commands/{command_id}/refuse"): "It does not wait, has expired, or you requested it yourself",
    ("DELETE", "/api/v1/jobs/{job}"): "The job has reported too recently, or has an open order",
    ("POST", "/api/v1/jobs/{job}/commands"): "The job cannot do this now; the detail says why",
    ("POST", "/api/v1/notifications/{notification_id}/resend"): "It is not one that was given up",
    ("POST", "/api/v1/receivers"): "There is one of this name, or the limit is reached",
    ("PUT", "/api/v1/receivers/{name}"): "Its type cannot be changed",
    ("POST", "/api/v1/receivers/{name}/test"): "It is switched off, or a test is under way",
    ("POST", "/api/v1/silences"): "The limit of silences is reached",
    (
        "POST",
        "/api/v1/telemetry",
    ): "The agent that signed is not enrolled for this job on this host: it should enrol again",
    ("PUT", "/api/v1/tuning"): "Another version is in force",
}
"""Why an operation is refused with 409. Where an id is accepted, one that several begin with is refused with it too."""
AMBIGUOUS: Final = "Several ids begin with this text"
BY_PREFIX: Final = ("{incident_id}", "{command_id}", "{silence_id}")


SHARED: Final = EVERYWHERE | WITH_TOKEN | WITH_PARAMETERS | WITH_NAME | WITH_IF_MATCH | WITH_BODY
"""Refusals that mean the same in all operations."""


def shared_refusals() -> dict[str, Any]:
    """The refusals that operations share, by name."""
    return {name_of(status): _refusal(description, status) for status, description in SHARED.items()}


def name_of(status: int) -> str:
    """The name of a refusal that operations share: NotFound."""
    return HTTPStatus(status).phrase.title().replace(" ", "")


def add_refusals(
    answers: dict[str, Any], method: str, path: str, operation: Mapping[str, Any], *, needs_token: bool
) -> None:
    """Add to the answers of an operation each status by which it may be refused.

    Args:
        answers: by status; those that are there stay.
        method: in capital letters.
        path: with the names of its parameters in braces.
        operation: as described so far.
        needs_token: whether it requires a scope.
    """
    found = dict(EVERYWHERE)
    headers = {one["name"].lower() for one in operation.get("parameters", ()) if one["in"] == "header"}
    if path.startswith("/api/"):
        found |= WITH_PARAMETERS
    if needs_token or path.startswith("/api/"):
        found |= WITH_TOKEN
    if "{" in path:
        found |= WITH_NAME
    if "if-match" in headers and method != "GET":
        found |= WITH_IF_MATCH
    if "requestBody" in operation:
        found |= WITH_BODY
    if path == "/api/v1/telemetry":
        found[415] = "The Content-Type or Content-Encoding is not supported"
    whys = [CONFLICT.get((method, path), ""), AMBIGUOUS if any(one in path for one in BY_PREFIX) else ""]
    if why := "; ".join(filter(None, whys)):
        found[409] = why
    for status, description in sorted(found.items()):
        own = _refusal(description, status)
        answers.setdefault(
            str(status), own if status not in SHARED else {"$ref": f"#/components/responses/{name_of(status)}"}
        )
    answers["default"] = _refusal("Refused")


def _refusal(description: str, status: int | None = None) -> dict[str, Any]:
    content: dict[str, Any] = {"schema": {"$ref": "#/components/schemas/Problem"}}
    if status is not None:
        content["example"] = {
            "type": "about:blank",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": description,
            "request_id": "5f2c8e0d9b3a4c17",
        }
    return {"description": description, "content": {MEDIA_TYPE: content}}


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
