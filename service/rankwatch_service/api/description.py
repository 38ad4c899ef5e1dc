"""The error responses in the API's description (problem+json, RFC 9457)."""

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
    return {name_of(status): _refusal(description) for status, description in SHARED.items()}


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
        shared = {"$ref": f"#/components/responses/{name_of(status)}"}
        answers.setdefault(str(status), shared if status in SHARED else _refusal(description))
    answers["default"] = _refusal("Refused")


def _refusal(description: str) -> dict[str, Any]:
    return {"description": description, "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}}
