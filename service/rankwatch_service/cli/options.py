"""Options and arguments that many commands share, with what a shell offers for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankwatch_service.cli.errors import CliError

if TYPE_CHECKING:
    from rankwatch_service.cli.client import CliClient

URL = Annotated[
    str | None,
    typer.Option(
        "--url", help="URL of the service. Default: RANKWATCH_URL, then `rankwatch login`, then `rankwatch up`."
    ),
]
TOKEN = Annotated[
    str | None,
    typer.Option("--token", help="Access token. Default: RANKWATCH_TOKEN, or the stored token of the service."),
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")]
LIMIT = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Most items to print.")]
JOBS = Annotated[list[str] | None, typer.Option("--job", help="Only this job; may be repeated.")]
PROJECTS = Annotated[list[str] | None, typer.Option("--project", help="Only jobs of this project; may be repeated.")]
DATABASE_URL = Annotated[
    str | None, typer.Option("--database-url", help="Database: sqlite:///PATH or postgresql://HOST/NAME.")
]
KAFKA = Annotated[str | None, typer.Option("--kafka", metavar="HOST:PORT", help="Kafka brokers for telemetry.")]
INSECURE = Annotated[
    bool, typer.Option("--insecure", help="Allow plain http with other machines. Default: RANKWATCH_INSECURE.")
]
DATA = Annotated[str | None, typer.Option("--data", metavar="DIR", help="Folder of the SQLite database.")]


def connect(url: str | None, token: str | None) -> CliClient:
    """A client of the service that the options, the environment or the user's files name."""
    from rankwatch.client.connection import user_places
    from rankwatch_service.cli.client import CliClient, find_endpoint

    return CliClient(find_endpoint(url, token, os.environ, user_places(os.environ)))


OFFERED_MAX: Final = 50
"""Newest things that are looked at."""


def offer_jobs(context: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs that begin so, newest first."""
    return [one["name"] for one in _found(context, "/api/v1/jobs") if one["name"].startswith(incomplete)]


def offer_incidents(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of unresolved incidents that begin so, each with its summary."""
    found = _found(context, "/api/v1/incidents", state="unresolved")
    return [(one["short_id"], one["summary"]) for one in found if one["short_id"].startswith(incomplete)]


def offer_commands(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
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


JOB = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=offer_jobs)]
INCIDENT = Annotated[str, typer.Argument(help="Id of the incident, or a prefix of it.", autocompletion=offer_incidents)]
COMMAND = Annotated[str, typer.Argument(help="Id of the command, or a prefix of it.", autocompletion=offer_commands)]
