"""`rankwatch login`, `rankwatch token` and `rankwatch db`: access, and the database."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.database import existing_database
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL, JSON, KAFKA

if TYPE_CHECKING:
    from rankwatch_service.settings import Settings

token = typer.Typer(help="Create, list and revoke access tokens, directly in the database.", no_args_is_help=True)
db = typer.Typer(help="Upgrade, downgrade or check the tables of the database.", no_args_is_help=True)


def login(
    url: Annotated[str, typer.Argument(help="URL of the service, such as http://127.0.0.1:8770.")],
    secret: Annotated[
        str, typer.Option("--token", prompt="Token", hide_input=True, help="Access token; prompted for if not given.")
    ],
) -> None:
    """Store the URL and token of a service for other commands, in the user's configuration folder."""
    import os

    from rankwatch_service.cli.client import Client
    from rankwatch_service.cli.endpoint import ServiceEndpoint, store_endpoint, user_places

    endpoint = ServiceEndpoint(url.rstrip("/"), secret.strip())
    Client(endpoint).get("/api/v1/jobs", limit=1)
    config = user_places(os.environ).login
    store_endpoint(endpoint, config)
    output.note(f"stored in {config}")


@token.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Owner or purpose.")],
    scope: Annotated[list[str], typer.Option(help="ingest, read, operate, command or admin; may be repeated.")],
    job: Annotated[str, typer.Option(help="The only job it may access. Default: every job.")] = "",
    lasting: Annotated[
        str | None, typer.Option("--for", help="Lifetime, such as 90s, 30m, 2h or 1d. Default: unlimited.")
    ] = None,
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Create a token and print it. It cannot be shown again."""
    from rankwatch_service.access.scopes import Scope
    from rankwatch_service.access.tokens import issue_token
    from rankwatch_service.cli.durations import seconds
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import write

    try:
        scopes = {Scope(one) for one in scope}
    except ValueError as error:
        raise CliError(Status.USAGE, f"{error}; scopes are {', '.join(Scope)}") from error
    now = SystemClock().unix_ns()
    expires = None if lasting is None else now + seconds(lasting) * 1_000_000_000
    with existing_database(data, database_url) as engine, write(engine) as connection:
        _, text = issue_token(connection, "command line", name, scopes, now, job=job, expires_unix_ns=expires)
    print(text)


@token.command("login")
def login_link(data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """Print a link that logs a browser in, once and within 10 minutes, with scope admin."""
    import os

    from rankwatch_service.access.sessions import issue_login
    from rankwatch_service.cli.endpoint import find_endpoint, user_places
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store.engine import write

    url = find_endpoint(None, None, os.environ, user_places(os.environ)).url
    with existing_database(data, database_url) as engine, write(engine) as connection:
        text = issue_login(connection, "command line", SystemClock().unix_ns())
    print(f"{url}/login#{text}")


@token.command("list")
def list_tokens(as_json: JSON = False, data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """List tokens, newest first, without their secrets."""
    from sqlalchemy import select

    from rankwatch_service.store.engine import read
    from rankwatch_service.store.models import Token

    columns = [column for column in Token.__table__.columns if column.key != "secret_sha256"]
    with existing_database(data, database_url) as engine, read(engine) as connection:
        rows = connection.execute(select(*columns).order_by(Token.created_unix_ns.desc())).mappings().all()
    output.show(
        (dict(row) for row in rows),
        as_json,
        {
            "id": lambda one: output.identifier(one["id"]),
            "kind": lambda one: output.plain(one["kind"]),
            "name": lambda one: output.plain(one["name"]),
            "scopes": lambda one: output.plain(one["scopes"]),
            "job": lambda one: output.plain(one["job"] or "every job"),
            "expires": lambda one: output.moment(one["expires_unix_ns"]),
            "last used": lambda one: output.moment(one["last_used_unix_ns"]),
            "": lambda one: output.plain("revoked" if one["revoked"] else "valid"),
        },
        "no tokens",
    )


@token.command("revoke")
def revoke(
    token_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the token (not its text).")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Revoke a token, and the sessions that it opened."""
    from rankwatch_service.access.tokens import revoke_token
    from rankwatch_service.clock import SystemClock
    from rankwatch_service.store import audit_trail
    from rankwatch_service.store.engine import write

    with existing_database(data, database_url) as engine, write(engine) as connection:
        if not revoke_token(connection, token_id):
            raise CliError(Status.USAGE, f"there is no token {token_id!r}")
        audit_trail.append(connection, SystemClock().unix_ns(), "command line", "token.revoke", token_id, "ok")
    output.note(f"revoked {token_id}")


@db.command("upgrade")
def upgrade_database(data: DATA = None, database_url: DATABASE_URL = None, kafka: KAFKA = None) -> None:
    """Upgrade the database to this version's tables; if Kafka is configured, also create its topics."""
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import open_engine
    from rankwatch_service.store.migrate import upgrade

    configured = configured_settings(data_dir=data, database_url=database_url, kafka=kafka)
    engine = open_engine(configured.database_url, "command line")
    try:
        upgrade(engine)
    finally:
        engine.dispose()
    output.note(f"{engine.url.render_as_string(hide_password=True)} is up to date")
    if configured.kafka:
        _make_topics(configured)


@db.command("downgrade")
def downgrade_database(
    revision: Annotated[str, typer.Argument(help="Revision of the earlier version, such as 0003.")],
    data: DATA = None,
    database_url: DATABASE_URL = None,
) -> None:
    """Downgrade the database to an earlier version's tables. Data that later versions added is dropped."""
    from rankwatch_service.store.migrate import downgrade

    with existing_database(data, database_url) as engine:
        downgrade(engine, revision)
        output.note(f"{engine.url.render_as_string(hide_password=True)} is at revision {revision}")


@db.command("check")
def check_database(data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """Check that the database has exactly this version's tables; exit with 1 if not."""
    from rankwatch_service.store.migrate import check

    with existing_database(data, database_url) as engine:
        check(engine)
        output.note(f"{engine.url.render_as_string(hide_password=True)} is up to date")


def _make_topics(configured: Settings) -> None:
    from rankwatch.kafka.client import KafkaAwayError
    from rankwatch_service.log.kafka_topics import ensure_topics

    try:
        partitions = ensure_topics(configured)
    except KafkaAwayError as error:
        raise CliError(Status.UNREACHABLE, str(error)) from error
    output.note(f"the topics at {configured.kafka} are there; telemetry has {partitions} partitions")
