"""Migrates a database to this version's tables, and refuses one that has others. Waits for one that is away at a start.

The migrations lie at the repository's root and, in an installed wheel, inside the package.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine

from rankwatch_service.clock import Clock
from rankwatch_service.store import postgres
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.errors import SchemaError, StoreBusyError

_PACKAGE: Final = Path(__file__).parents[1]


def upgrade(engine: Engine) -> None:
    """Migrate the database to this version's tables. Several processes may call it at once: one does the work.

    Raises:
        SchemaError: the database was made by a newer version.
    """
    config = configuration()
    head = ScriptDirectory.from_config(config).get_current_head()
    if current_revision(engine) == head:
        return
    with write(engine) as connection:
        if engine.dialect.name == "postgresql":
            postgres.lift_limits(connection)
        _refuse_newer(MigrationContext.configure(connection).get_current_revision(), config)
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def check(engine: Engine) -> None:
    """Check that the database has exactly this version's tables.

    Raises:
        SchemaError: it is older, newer or empty.
    """
    config = configuration()
    head, revision = ScriptDirectory.from_config(config).get_current_head(), current_revision(engine)
    if revision == head:
        return
    _refuse_newer(revision, config)
    found = "has no tables yet" if revision is None else f"is at revision {revision}"
    raise SchemaError(f"the database {found}, this version needs {head}: run `rankwatch db upgrade`")


def migrations_folder() -> Path:
    """The migrations of this installation."""
    shipped = _PACKAGE / "migrations"
    return shipped if shipped.exists() else _PACKAGE.parents[1] / "migrations"


def configuration() -> Config:
    """Alembic's configuration, pointing at the migrations of this installation."""
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()))
    return config


def current_revision(engine: Engine) -> str | None:
    """The revision of the database's tables; None if it has none."""
    with read(engine) as connection:
        return MigrationContext.configure(connection).get_current_revision()


def _refuse_newer(revision: str | None, config: Config) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if revision is not None and revision not in known:
        raise SchemaError(
            f"the database is at revision {revision}, which this older version does not know: install a newer version, "
            "or restore a backup of this one"
        )


START_S: Final = 60.0
"""How long a role waits for its database; then it ends, and who supervises it decides."""

RETRY_S: Final = 1.0

Begun = TypeVar("Begun")
_log = structlog.get_logger(__name__)


def once_it_answers(begin: Callable[[], Begun], clock: Clock) -> Begun:
    """What `begin` returns; called again as long as the database is not available.

    Args:
        begin: reads and writes the database; what it did before it failed may be repeated.
        clock: for the pauses.

    Raises:
        StoreBusyError: the database has not been available for `START_S`.
    """
    give_up_s = clock.monotonic_s() + START_S
    while True:
        try:
            return begin()
        except StoreBusyError as error:
            if clock.monotonic_s() >= give_up_s:
                raise
            _log.warning("database_away", error=str(error))
        clock.sleep(RETRY_S)
