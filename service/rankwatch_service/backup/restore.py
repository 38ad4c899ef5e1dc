"""Restores a backup, into an empty data folder or a database without tables."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from sqlalchemy import URL, Engine, inspect

from rankwatch_service.backup import postgres, sqlite
from rankwatch_service.backup.backup_file import BackupError, Manifest, extract, read_manifest
from rankwatch_service.clock import Clock
from rankwatch_service.settings import Settings
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import address_of, open_engine, read, write
from rankwatch_service.store.migrate import knows, upgrade
from rankwatch_service.up import LOCK_NAME, UpError, data_folder

DATABASES: Final = {"sqlite": "SQLite", "postgresql": "PostgreSQL"}
NAMED_MAX: Final = 5
"""Most files listed in the refusal of a folder that is not empty."""


def restore(settings: Settings, file: Path, clock: Clock) -> Manifest:
    """Restore a backup file, and upgrade its tables to this version's.

    Args:
        settings: name the data folder and the database.
        file: made by `create.back_up`.
        clock: for the audit trail.

    Raises:
        BackupError: the file is no whole backup, of a newer version or of another kind of database; the service runs
            on the folder; the folder or the database is not empty.
    """
    manifest = read_manifest(file)
    url = address_of(settings.database_url)
    kind = url.get_backend_name()
    if manifest.database != kind:
        raise BackupError(
            f"{file} is a backup of {DATABASES.get(manifest.database, manifest.database)}, and the database to restore "
            f"is {DATABASES[kind]}: name one with --database-url"
        )
    if not knows(manifest.revision):
        raise BackupError(
            f"{file} has tables of revision {manifest.revision}, which this older version does not know: restore it "
            f"with rankwatch {manifest.rankwatch}"
        )
    with _empty_folder(settings.data_dir) as folder:
        _require_empty(url)
        extract(file, folder)
        names = set(manifest.checksums) - {sqlite.NAME, postgres.NAME}
        if kind == "postgresql":
            postgres.load(url, folder / postgres.NAME)
        else:
            database = Path(url.database or "")
            database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.move(folder / sqlite.NAME, database)
        for name in sorted(names):
            (folder / name).rename(settings.data_dir / name)
    with _opened(url) as engine:
        upgrade(engine)
        with write(engine) as connection:
            now, fields = clock.unix_ns(), {"created_unix_ns": manifest.created_unix_ns}
            audit_trail.append(
                connection, now, "command line", "backup.restore", str(file.absolute()), "ok", fields=fields
            )
    return manifest


@contextmanager
def _opened(url: URL) -> Iterator[Engine]:
    engine = open_engine(url.render_as_string(hide_password=False), "restore")
    try:
        yield engine
    finally:
        engine.dispose()


@contextmanager
def _empty_folder(path: Path) -> Iterator[Path]:
    """Hold the data folder, so that `up` cannot start on it; gives a folder in it that is removed at the end."""
    try:
        with data_folder(path):
            if others := sorted(found.name for found in path.iterdir() if found.name != LOCK_NAME):
                raise BackupError(
                    f"the data folder {path} is not empty ({', '.join(others[:NAMED_MAX])}): move what is there to "
                    "another place, or name an empty folder with --data"
                )
            with tempfile.TemporaryDirectory(prefix=".restore-", dir=path) as name:
                yield Path(name)
    except UpError as error:
        raise BackupError(str(error)) from error
    except OSError as error:
        raise BackupError(f"the data folder {path} cannot be written: {error.strerror}") from error


def _require_empty(url: URL) -> None:
    """Raise if the database is there: nothing is ever overwritten."""
    if url.get_backend_name() == "sqlite":
        if Path(url.database or "").exists():
            raise BackupError(f"the database {url.database} exists: move it to another place")
        return
    with _opened(url) as engine, read(engine) as connection:
        tables = inspect(connection).get_table_names()
    if tables:
        raise BackupError(
            f"the database {url.database} has tables: create an empty one (`createdb NAME`) and name it with "
            "--database-url"
        )
