"""Backup and restore of a service on SQLite: database, tokens' files, secret key and settings file in one file.

The file is a tar.gz of mode 0600, whose checksum shows any damage. PostgreSQL has its own programs: docs/operations.md.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import Final
from urllib.parse import quote

from sqlalchemy import Engine

from rankwatch_service.access.secret_key import SecretKeyError, has_secret_key, load_secret_key
from rankwatch_service.clock import Clock
from rankwatch_service.settings import CONFIG_NAME, Settings, config_file
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import address_of, open_engine, write
from rankwatch_service.store.errors import SchemaError
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.up import LOCK_NAME, UpError, data_folder

DATABASE: Final = "rankwatch.db"
SECRET_KEY: Final = "secret.key"  # noqa: S105 - the name of a file
NAMED_MAX: Final = 5
"""Most files listed in the refusal of a folder that is not empty."""

_COMPRESSION: Final = 1
"""The fastest: the checksum is what matters."""


class BackupError(Exception):
    """A backup cannot be made or restored; the message says why and what to do."""


def back_up(settings: Settings, engine: Engine, file: Path, clock: Clock) -> list[str]:
    """Write a new backup file while the service runs, and return the names of what it holds.

    Args:
        settings: for the files besides the database.
        engine: of the database, which is copied as of one moment.
        file: does not exist yet; its folder needs room for two copies of the database.
        clock: for the audit trail.

    Raises:
        BackupError: the file exists or cannot be written, the database is no SQLite or cannot be copied, or its secret
            key is missing.
    """
    database = _sqlite_file(settings)
    if file.exists():
        raise BackupError(f"{file} exists already; choose another name")
    if not settings.secret_key and has_secret_key(engine):
        try:
            load_secret_key(settings, engine, clock)
        except SecretKeyError as error:
            raise BackupError(f"a backup without the secret key would be of little use: {error}") from error
    with write(engine) as connection:
        audit_trail.append(connection, clock.unix_ns(), "command line", "backup.create", str(file.absolute()), "ok")
    kept = {name: path for name, path in _kept_files(settings).items() if path.is_file()}
    try:
        with tempfile.TemporaryDirectory(prefix=".rankwatch-backup-", dir=file.absolute().parent) as place:
            copied, packed = Path(place, DATABASE), Path(place, "backup")
            copy_database(database, copied)
            _pack({DATABASE: copied, **kept}, packed)
            packed.rename(file)
    except OSError as error:
        raise BackupError(f"{file} cannot be written: {error.strerror}") from error
    return [DATABASE, *kept]


def restore(settings: Settings, file: Path, clock: Clock) -> list[str]:
    """Restore a backup file into an empty data folder, upgrade its tables, and return the names of what it holds.

    Raises:
        BackupError: the file is no whole backup or of a newer version; the service runs on the data folder, or the
            folder is not empty; the database exists, or is no SQLite.
    """
    database = _sqlite_file(settings)
    with _empty_folder(settings.data_dir) as folder:
        if database.exists():
            raise BackupError(f"the database {database} exists: move it to another place")
        names = _unpack(file, folder, {DATABASE, *_kept_files(settings), CONFIG_NAME})
        engine = open_engine(f"sqlite:///{folder / DATABASE}", "restore")
        try:
            upgrade(engine)
            with write(engine) as connection:
                audit_trail.append(
                    connection, clock.unix_ns(), "command line", "backup.restore", str(file.absolute()), "ok"
                )
        except SchemaError as error:
            raise BackupError(f"{file}: {error}") from error
        finally:
            engine.dispose()  # which writes the WAL into the database
        database.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.move(folder / DATABASE, database)
        for name in names:
            if name != DATABASE:
                (folder / name).rename(settings.data_dir / name)
    return names


def copy_database(database: Path, target: Path) -> None:
    """Copy a SQLite database as of one moment, while writers go on.

    Raises:
        BackupError: a disk is full or cannot be read.
    """
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(database))}?mode=rw", uri=True)) as live,
            closing(sqlite3.connect(target)) as copied,
        ):
            live.backup(copied)  # in one step: in several, each write of the service would begin it anew
            copied.execute("PRAGMA journal_mode=DELETE").close()  # all in one file; the service sets WAL again
    except sqlite3.Error as error:
        raise BackupError(f"the database {database} cannot be copied: {error}") from error


def _sqlite_file(settings: Settings) -> Path:
    url = address_of(settings.database_url)
    if url.get_backend_name() != "sqlite":
        raise BackupError(
            "the database is PostgreSQL: use pg_dump and pg_restore, and keep secret.key and the tokens' files of the "
            "data folder beside the dump"
        )
    return Path(url.database or "")


def _kept_files(settings: Settings) -> Mapping[str, Path]:
    """Files besides the database, by their names in a backup. They need not exist."""
    files = {path.name: path for path in (settings.ingest_token_path, settings.local_token_path)}
    files[SECRET_KEY] = settings.secret_key_file
    if (config := config_file()) is not None:
        files[CONFIG_NAME] = config
    return files


def _pack(files: Mapping[str, Path], target: Path) -> None:
    """Write a tar.gz, which is on disk when this returns."""
    with os.fdopen(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        with tarfile.open(fileobj=out, mode="w:gz", compresslevel=_COMPRESSION) as tar:
            for name, path in files.items():
                tar.add(path, name)
        out.flush()
        os.fsync(out.fileno())


def _unpack(file: Path, folder: Path, known: set[str]) -> list[str]:
    """Extract a backup with mode 0600; returns its names, which are all in `known`."""
    names: list[str] = []
    try:
        with file.open("rb") as source, GzipFile(fileobj=source) as content:
            while content.read(1024 * 1024):  # to its end, where the checksum stands
                pass
            content.seek(0)
            with tarfile.open(fileobj=content, mode="r:") as tar:
                for member in tar:
                    inner = tar.extractfile(member) if member.isfile() and member.name in known else None
                    if inner is None:
                        raise BackupError(f"{file} is not a backup of rankwatch: it has {member.name!r}")
                    path = folder / member.name
                    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
                        shutil.copyfileobj(inner, out)
                    names.append(member.name)
    except (tarfile.TarError, BadGzipFile, EOFError, zlib.error) as error:
        raise BackupError(f"{file} is not a backup of rankwatch, or damaged: {error}") from error
    except OSError as error:
        raise BackupError(f"{file} cannot be restored: {error.strerror or error}") from error
    if DATABASE not in names:
        raise BackupError(f"{file} is not a backup of rankwatch: it has no {DATABASE}")
    return names


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
