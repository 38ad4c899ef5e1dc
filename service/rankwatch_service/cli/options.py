"""Options that many commands share, and the client that they configure."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

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
    from rankwatch_service.cli.client import CliClient
    from rankwatch_service.cli.endpoint import find_endpoint

    return CliClient(find_endpoint(url, token, os.environ, user_places(os.environ)))
