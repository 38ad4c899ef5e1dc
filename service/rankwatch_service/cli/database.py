"""The database of commands that access it directly."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rankwatch_service.cli.errors import CliError, Status

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from rankwatch_service.settings import Settings


def database_in_force(configured: Settings) -> str:
    """The URL of the database to use.

    Options, environment and `rankwatch.toml` come first. If none of them names a database or a data folder, it is the
    database of the service that `rankwatch up` last started for this user.
    """
    from rankwatch_service.cli.endpoint import local_database_url

    if configured.model_fields_set & {"data_dir", "database_url"}:
        return configured.database_url
    return local_database_url(os.environ) or configured.database_url


@contextmanager
def existing_database(data: str | None, database_url: str | None) -> Iterator[Engine]:
    """Open the database to use, until the end of the block. It is never created.

    Raises:
        CliError: it does not exist.
    """
    from rankwatch_service.cli.configuration import configured_settings
    from rankwatch_service.store.engine import address_of, open_engine

    url = database_in_force(configured_settings(data_dir=data, database_url=database_url))
    address = address_of(url)
    if address.get_backend_name() == "sqlite" and not Path(address.database or "").is_file():
        raise CliError(
            Status.FINDINGS,
            f"there is no database {address.database}: start `rankwatch up` first, or use --data or --database-url",
        )
    engine = open_engine(url, "command line")
    try:
        yield engine
    finally:
        engine.dispose()
