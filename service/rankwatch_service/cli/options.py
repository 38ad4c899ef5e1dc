"""Options and arguments that many commands share, with what a shell offers for them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
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
JSON = Annotated[bool, typer.Option("--json", help="Print JSON: one object per line.")]
LIMIT = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Most items to print.")]
PROJECTS = Annotated[list[str] | None, typer.Option("--project", help="Only jobs of this project; may be repeated.")]
DATABASE_URL = Annotated[
    str | None, typer.Option("--database-url", help="Database: sqlite:///PATH or postgresql://HOST/NAME.")
]
KAFKA = Annotated[str | None, typer.Option("--kafka", metavar="HOST:PORT", help="Kafka brokers for telemetry.")]
INSECURE = Annotated[
    bool, typer.Option("--insecure", help="Allow plain http with other machines. Default: RANKWATCH_INSECURE.")
]
DATA = Annotated[str | None, typer.Option("--data", metavar="DIR", help="Folder of the SQLite database.")]


def connect(url: str | None, token: str | None, timeout_s: float | None = None) -> CliClient:
    """A client of the service that the options, the environment or the user's files name."""
    from rankwatch.client.connection import TIMEOUT_S, user_places
    from rankwatch_service.cli.client import CliClient, find_endpoint

    return CliClient(find_endpoint(url, token, os.environ, user_places(os.environ)), timeout_s or TIMEOUT_S)


OFFERED_MAX: Final = 50
"""Newest things that are looked at."""
OFFERED_WITHIN_S: Final = 1.0
"""Whoever presses Tab waits no longer for a service that does not answer."""


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


def offer_checkpoints(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of the job's checkpoints that begin so, newest first."""
    from rankwatch_service.cli.client import job_path

    job = context.params.get("job") or next(iter(context.args), "")  # unparsed while an option lacks its value
    found = _found(context, f"{job_path(job)}/checkpoints")
    return [(one["id"], f"step {one['step']}, {one['verdict']}") for one in found if one["id"].startswith(incomplete)]


def offer_receivers(context: typer.Context, incomplete: str) -> list[str]:
    """Names of receivers that begin so."""
    return [one["name"] for one in _found(context, "/api/v1/receivers") if one["name"].startswith(incomplete)]


def offer_rules(context: typer.Context, incomplete: str) -> list[str]:
    """Names of rules on metrics that begin so."""
    return [one["name"] for one in _found(context, "/api/v1/rules", None) if one["name"].startswith(incomplete)]


def offer_silences(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Ids of silences that begin so, each with its comment."""
    found = _found(context, "/api/v1/silences")
    return [(one["short_id"], one["comment"]) for one in found if one["short_id"].startswith(incomplete)]


def offer_kinds(incomplete: str) -> list[str]:
    """Kinds of incidents that begin so."""
    from rankwatch_detectors.base import Kind

    return [kind for kind in Kind if kind.startswith(incomplete)]


def offer(*words: str) -> Callable[[str], list[str]]:
    """Offers those of a few words that begin as what is typed."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def _found(
    context: typer.Context, path: str, limit: int | None = OFFERED_MAX, **wanted: str
) -> Iterator[dict[str, str]]:
    try:
        client = connect(context.params.get("url"), context.params.get("token"), OFFERED_WITHIN_S)
        yield from client.get(path, limit=limit, **wanted)["items"]
    except CliError:
        return


JOB = Annotated[str, typer.Argument(metavar="JOB", help="Name of the job.", autocompletion=offer_jobs)]
INCIDENT = Annotated[str, typer.Argument(help="Id of the incident, or a prefix of it.", autocompletion=offer_incidents)]
RECEIVER = Annotated[str, typer.Argument(metavar="NAME", help="Name of the receiver.", autocompletion=offer_receivers)]
JOBS = Annotated[
    list[str] | None, typer.Option("--job", help="Only this job; may be repeated.", autocompletion=offer_jobs)
]
KINDS = Annotated[
    list[str] | None,
    typer.Option(
        "--kind", help="Only this kind, such as straggler or hang; may be repeated.", autocompletion=offer_kinds
    ),
]
SEVERITIES = Annotated[
    list[str] | None,
    typer.Option(
        "--severity",
        help="critical, warning or info; may be repeated.",
        autocompletion=offer("critical", "warning", "info"),
    ),
]
COMMAND = Annotated[str, typer.Argument(help="Id of the command, or a prefix of it.", autocompletion=offer_commands)]
