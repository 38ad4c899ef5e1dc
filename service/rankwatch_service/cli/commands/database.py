"""`rankwatch db`, and the database that commands open directly."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.configuration import configured_settings
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL, JSON, KAFKA

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from rankwatch_service.settings import Settings

_NAME_A_DATABASE: Final = frozenset(("data_dir", "database_url"))
"""Settings of which one names the database."""


def database_in_force(configured: Settings) -> str:
    """The URL of the database to use.

    Options, environment and `rankwatch.toml` come first. If none of them names a database or a data folder, it is the
    database of the service that `rankwatch up` last started for this user.
    """
    from rankwatch_service.cli.client import local_database_url

    if configured.model_fields_set & _NAME_A_DATABASE:
        return configured.database_url
    return local_database_url(os.environ) or configured.database_url


def data_dir_in_force(configured: Settings) -> Path:
    """The data folder that goes with the database to use (`database_in_force`)."""
    from rankwatch_service.cli.client import local_data_dir

    local = local_data_dir(os.environ)
    return Path(local) if local and not configured.model_fields_set & _NAME_A_DATABASE else configured.data_dir


def service_in_force(data: str | None, database_url: str | None) -> str:
    """The database to use, for people, and the service that has it, if `rankwatch up` last started that one."""
    from rankwatch_service.cli.client import local_database_url, local_url
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import address_of

    url = database_in_force(configured_settings(data_dir=data, database_url=database_url))
    address = address_of(url)
    named = address.database if address.get_backend_name() == "sqlite" else address.render_as_string(hide_password=True)
    served = f" of the service at {local_url(os.environ)}" if url == local_database_url(os.environ) else ""
    return f"the database {named}{served}"


def token_pin_in_force(data: str | None, database_url: str | None) -> str:
    """The pin that tokens for agents end with; empty without TLS, or if an authority vouches for the certificate.

    The certificate is that of options, environment and `rankwatch.toml`, else of the service that `rankwatch up` last
    started for this user, if it has the database to use.

    Raises:
        CliError: the certificate cannot be read.
    """
    from rankwatch_service.certificate import CertificateError, token_pin
    from rankwatch_service.cli.client import local_certificate, local_database_url
    from rankwatch_service.cli.configuration import configured_settings

    configured = configured_settings(data_dir=data, database_url=database_url)
    certificate = configured.tls_cert
    if certificate is None and database_in_force(configured) == local_database_url(os.environ):
        certificate = local_certificate(os.environ)
    try:
        return "" if certificate is None else token_pin(certificate)
    except CertificateError as error:
        raise CliError(Status.USAGE, str(error)) from error


@contextmanager
def existing_database(data: str | None, database_url: str | None) -> Iterator[Engine]:
    """Open the database to use, until the end of the block. It is never created.

    Raises:
        CliError: it does not exist.
    """
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import open_engine

    url = database_in_force(configured_settings(data_dir=data, database_url=database_url))
    if missing := _missing_file(url):
        raise CliError(
            Status.FINDINGS,
            f"there is no database {missing}: start `rankwatch up` first, or use --data or --database-url",
        )
    engine = open_engine(url, "command line")
    try:
        yield engine
    finally:
        engine.dispose()


def _missing_file(url: str) -> str | None:
    """The file of a database that does not exist; None if it exists or is on a server."""
    from rankwatch_service.store.engine import address_of

    address = address_of(url)
    is_there = address.get_backend_name() != "sqlite" or Path(address.database or "").is_file()
    return None if is_there else str(address.database)


app = typer.Typer(help="Upgrade, check or copy the database.", no_args_is_help=True)
BACKUP_PAGES: Final = 1_000
"""Copied at a time: then the bar moves on."""


@app.command("upgrade")
def upgrade_database(
    data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None, as_json: JSON = False
) -> None:
    """Upgrade the database to this version's tables; if Kafka is configured, also create its topics."""
    from rankwatch_service.store.engine import open_engine
    from rankwatch_service.store.migrate import upgrade

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    engine = open_engine(configured.database_url, "command line")
    try:
        with output.progress("migrating the database"):
            upgrade(engine)
    finally:
        engine.dispose()
    database = engine.url.render_as_string(hide_password=True)
    said, result = f"{database} is up to date", {"database": database}
    if configured.kafka:
        partitions = _make_topics(configured)
        said += f"\nthe topics at {configured.kafka} are there; telemetry has {partitions} partitions"
        result |= {"kafka": str(configured.kafka), "partitions": str(partitions)}
    output.done(said, result, as_json)


@app.command("check")
def check_database(data: DATA = None, database_url: DATABASE_URL = None, as_json: JSON = False) -> None:
    """Check that the database has exactly this version's tables; exit with 1 if not."""
    from rankwatch_service.store.migrate import check

    with existing_database(data, database_url) as engine:
        check(engine)
        database = engine.url.render_as_string(hide_password=True)
        output.done(f"{database} is up to date", {"database": database}, as_json)


@app.command("backup")
def back_up_database(
    file: Annotated[Path, typer.Argument(help="A new file.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
    as_json: JSON = False,
) -> None:
    """Copy an SQLite database as of one moment into a new file, while the service runs."""
    with existing_database(data, database_url) as engine:
        if engine.dialect.name != "sqlite":
            raise CliError(Status.USAGE, "only SQLite is copied by this command: use pg_dump")
        try:
            os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            raise CliError(Status.USAGE, f"{file} cannot be written: {error.strerror}") from error
        try:
            _copy(str(engine.url.database), file)
        except sqlite3.Error as error:
            file.unlink()
            raise CliError(Status.FINDINGS, f"the database could not be copied: {error}") from error
    said = f"{file} has the database; the data folder's secret.key and tokens belong to it"
    output.done(said, {"file": str(file), "bytes": file.stat().st_size}, as_json)


def _copy(database: str, file: Path) -> None:
    with closing(sqlite3.connect(database)) as source, closing(sqlite3.connect(file)) as target:
        # Without this moment to read as of, the copy would begin anew at each write of the service.
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        ((page_bytes,),) = source.execute("PRAGMA page_size")
        with output.progress(f"copying {database}", Path(database).stat().st_size) as show:

            def copied(_status: int, left: int, total: int) -> None:
                done = (total - left) * page_bytes
                show(done, output.megabytes(done))

            source.backup(target, pages=BACKUP_PAGES, progress=copied)


@app.command("forget-key")
def forget_key(data: DATA = None, database_url: DATABASE_URL = None, as_json: JSON = False) -> None:
    """Make the next start create a new secret key. All receivers, which the old key encrypted, are removed."""
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.notify.receivers import forget_secret_key
    from rankwatch_service.store import audit_trail
    from rankwatch_service.store.engine import write

    clock = SystemClock()
    with existing_database(data, database_url) as engine, write(engine) as connection:
        names = forget_secret_key(connection)
        audit_trail.append(connection, clock.unix_ns(), "command line", "secret_key.forget", "", "ok")
    said = f"the secret key is forgotten; receivers to add again: {', '.join(names) or 'none'}"
    output.done(said, {"receivers": names}, as_json)


def _make_topics(configured: Settings) -> int:
    from rankwatch.kafka.client import KafkaAwayError
    from rankwatch_service.log.kafka_topics import ensure_topics

    try:
        return ensure_topics(configured)
    except KafkaAwayError as error:
        raise CliError(Status.UNREACHABLE, str(error)) from error
