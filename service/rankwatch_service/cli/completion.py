"""What a shell offers after a Tab: names of jobs, and ids of incidents and commands of the service.

Nothing where the service cannot be asked: a shell has no place for an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import typer

from rankwatch_service.cli.errors import CliError
from rankwatch_service.cli.options import connect

OFFERED_MAX: Final = 50
"""Newest things that are looked at."""


def jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs that begin so, newest first."""
    return [one["name"] for one in _found(context, "/api/v1/jobs") if one["name"].startswith(incomplete)]


def incidents(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of unresolved incidents that begin so, each with its summary."""
    found = _found(context, "/api/v1/incidents", state="unresolved")
    return [(one["short_id"], one["summary"]) for one in found if one["short_id"].startswith(incomplete)]


def commands(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of commands that begin so, each with what it is."""
    found = _found(context, "/api/v1/commands")
    said = ((one["short_id"], f"{one['action']} {one['job']}: {one['state']}") for one in found)
    return [(short_id, what) for short_id, what in said if short_id.startswith(incomplete)]


def _found(context: typer.Context, path: str, **wanted: str) -> Iterator[dict[str, str]]:
    try:
        client = connect(context.params.get("url"), context.params.get("token"))
        yield from client.get(path, limit=OFFERED_MAX, **wanted)["items"]
    except CliError:
        return
