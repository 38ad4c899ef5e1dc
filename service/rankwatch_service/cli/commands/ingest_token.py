"""`rankwatch token ingest`: the token of the collectors, kept in a file that they can read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.database import existing_database
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL


def ingest(
    file: Annotated[Path, typer.Argument(help="File for the token; only its owner can read it.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Make sure that a file contains a valid ingest token: keep the one in it, or create a new one."""
    from rankwatch_service.access.token_files import ensure_token_file
    from rankwatch_service.access.tokens import TokenKind
    from rankwatch_service.clock import SystemClock

    try:
        with existing_database(data, database_url) as engine:
            ensure_token_file(engine, file, SystemClock(), TokenKind.INGEST)
    except OSError as error:
        raise CliError(Status.USAGE, f"{file}: {error.strerror}") from error
    output.note(f"{file} contains a valid ingest token")
