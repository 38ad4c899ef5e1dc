"""`rankwatch login`, `rankwatch token` and `rankwatch db`: access, and the database underneath."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from rankwatch_service.cli import output
from rankwatch_service.cli.errors import CliError, Status
from rankwatch_service.cli.options import DATA, DATABASE_URL

if TYPE_CHECKING:
    from sqlalchemy import Engine

token = typer.Typer(help="Access tokens, straight in the database: for whoever runs the service.", no_args_is_help=True)
db = typer.Typer(help="The database's tables.", no_args_is_help=True)


def login(
    url: Annotated[str, typer.Argument(help="The service, for instance http://127.0.0.1:8770.")],
    secret: Annotated[
        str, typer.Option("--token", prompt="Token", hide_input=True, help="Access token; asked for if not given.")
    ],
) -> None:
    """Keep a service and a token for the other commands, in the user's configuration folder."""
    from platformdirs import user_config_path

    from rankwatch_service.cli.client import Client
    from rankwatch_service.cli.endpoint import CONFIG_NAME, Endpoint, store_endpoint

    endpoint = Endpoint(url.rstrip("/"), secret.strip())
    Client(endpoint).get("/api/v1/jobs", limit=1)
    config = user_config_path("rankwatch") / CONFIG_NAME
    store_endpoint(endpoint, config)
    output.note(f"kept in {config}")


@db.command("upgrade")
def upgrade_database(data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """Bring the database to this version's tables."""
    from rankwatch_service.store.migrate import SchemaError, upgrade

    engine = _engine(data, database_url)
    try:
        upgrade(engine)
    except SchemaError as error:
        raise CliError(Status.FINDINGS, str(error)) from error
    output.note(f"{engine.url.render_as_string(hide_password=True)} is at this version")


@db.command("check")
def check_database(data: DATA = None, database_url: DATABASE_URL = None) -> None:
    """Exit with 1 unless the database has exactly this version's tables."""
    from rankwatch_service.store.migrate import SchemaError, check

    engine = _engine(data, database_url)
    try:
        check(engine)
    except SchemaError as error:
        raise CliError(Status.FINDINGS, str(error)) from error
    output.note(f"{engine.url.render_as_string(hide_password=True)} is at this version")


def _engine(data: str | None, database_url: str | None) -> Engine:
    from rankwatch_service.cli.roles import settings
    from rankwatch_service.store.engine import open_engine

    return open_engine(settings(data_dir=data, database_url=database_url).database_url)
