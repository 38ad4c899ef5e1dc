"""`rankwatch audit`: export the audit trail, and verify it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.database import existing_database, has_database
from rankwatch_service.cli.errors import CliError, Status, file_exists
from rankwatch_service.cli.options import DATA, DATABASE_URL

if TYPE_CHECKING:
    from rankwatch_service.store.audit_trail import Flaw

app = typer.Typer(help="Export or verify the audit trail, directly in the database.", no_args_is_help=True)


@app.command("export")
def export_trail(
    file: Annotated[Path | None, typer.Argument(help="File to write; it must not exist. Default: stdout.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Only what happened from this ISO 8601 time on, such as 2026-04-01 or 2026-04-01T09:30+02:00; "
            "without an offset it is in UTC.",
        ),
    ] = None,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Export the audit trail as JSON lines, oldest first, with its hashes."""
    from rankwatch_service.store.audit_trail import export

    since_unix_ns = 0 if since is None else _unix_ns(since)
    with existing_database(data, database_url) as engine, _written(file) as out:
        output.print_json(export(engine, since_unix_ns), out)
    if file:
        output.note(f"{file} has the audit trail; `rankwatch audit verify {file}` compares it with the database")


@app.command("verify")
def verify_trail(
    file: Annotated[Path | None, typer.Argument(help="File that `rankwatch audit export` wrote.")] = None,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Verify that no row of the audit trail was changed or removed; exit with 1 and the first row that does not fit.

    A file is compared with the database too, if there is one: this also finds an audit trail that was written anew as a
    whole, or cut at its end, after the export.
    """
    from rankwatch_service.store.audit_trail import exported_rows, verify, verify_export

    if file is None:
        with existing_database(data, database_url) as engine:
            _report("the audit trail", verify(engine))
        return
    try:
        with file.open() as lines:
            if not has_database(data, database_url):
                _report(str(file), verify_export(exported_rows(lines), None))
                output.note("there is no database to compare it with: name one with --data or --database-url")
                return
            with existing_database(data, database_url) as engine:
                _report(f"{file}, compared with the database,", verify_export(exported_rows(lines), engine))
    except ValueError as error:
        raise CliError(Status.FINDINGS, f"{file}: {error}") from error
    except OSError as error:
        raise CliError(Status.USAGE, f"{file} cannot be read: {error.strerror}") from error


def _unix_ns(time: str) -> int:
    """An ISO 8601 time, or the nearest one that can be stored."""
    try:
        given = datetime.fromisoformat(time)
    except ValueError as error:
        raise CliError(
            Status.USAGE, f"--since: {time!r} is not an ISO 8601 time such as 2026-04-01 or 2026-04-01T09:30+02:00"
        ) from error
    since = (given if given.tzinfo else given.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    return max(0, min(since // timedelta(microseconds=1) * 1_000, 2**63 - 1))


def _report(what: str, flaw: Flaw | None) -> None:
    if flaw:
        raise CliError(Status.FINDINGS, f"{what} is not whole: row {flaw.id} {flaw.reason}")
    output.note(f"{what} is whole")


@contextmanager
def _written(file: Path | None) -> Iterator[TextIO]:
    """A new file for the output, which only its owner may read; without one, stdout."""
    if file is None:
        yield sys.stdout
        return
    try:
        out = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w")
    except FileExistsError as error:
        raise file_exists(file) from error
    except OSError as error:
        raise CliError(Status.USAGE, f"{file} cannot be written: {error.strerror}") from error
    with out:
        yield out
