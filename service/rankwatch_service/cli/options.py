"""Options that many commands share, and the client they lead to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rankwatch_service.cli.client import Client

URL = Annotated[
    str | None, typer.Option("--url", help="The service; else RANKWATCH_URL, `rankwatch login`, `rankwatch up`.")
]
TOKEN = Annotated[
    str | None, typer.Option("--token", help="Access token; else RANKWATCH_TOKEN, or what goes with the service.")
]
JSON = Annotated[bool, typer.Option("--json", help="Print one JSON object a line.")]
LIMIT = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Print at most so many.")]
JOBS = Annotated[list[str] | None, typer.Option("--job", help="Only of this job; may be repeated.")]
DATABASE_URL = Annotated[
    str | None, typer.Option("--database-url", help="Where the state is: sqlite:///PATH or postgresql://HOST/NAME.")
]
KAFKA = Annotated[
    str | None, typer.Option("--kafka", metavar="HOST:PORT", help="Kafka brokers that telemetry flows through.")
]
DATA = Annotated[str | None, typer.Option("--data", metavar="DIR", help="Folder of the SQLite database.")]


def connect(url: str | None, token: str | None) -> Client:
    """A client for the service that these options, the environment or the user's files name."""
    from rankwatch_service.cli.client import Client
    from rankwatch_service.cli.endpoint import find_endpoint, user_places

    return Client(find_endpoint(url, token, os.environ, user_places(os.environ)))
