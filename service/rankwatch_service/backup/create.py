"""Makes a backup while the service runs."""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

from sqlalchemy import Engine

from rankwatch_service.access.secret_key import SecretKeyError, has_secret_key, load_secret_key
from rankwatch_service.backup import postgres, sqlite
from rankwatch_service.backup.backup_file import FORMAT, BackupError, Manifest, checksum, write_backup
from rankwatch_service.backup.contents import kept_files
from rankwatch_service.clock import Clock
from rankwatch_service.settings import Settings
from rankwatch_service.store import audit_trail
from rankwatch_service.store.engine import write
from rankwatch_service.store.migrate import current_revision


def back_up(settings: Settings, engine: Engine, file: Path, clock: Clock) -> Manifest:
    """Write a new backup file: the database as of one moment, the tokens' files, the secret key and the settings file.

    Args:
        settings: for the files besides the database.
        engine: of the database.
        file: the file, which does not exist yet; its folder needs room for two copies of the database.
        clock: for the time of the backup.

    Raises:
        BackupError: the file exists or cannot be written, the database cannot be copied, or its secret key is missing.
    """
    if file.exists():
        raise BackupError(f"{file} exists already; choose another name")
    revision = current_revision(engine)
    if revision is None:
        raise BackupError("the database has no tables yet: there is nothing to back up")
    if not settings.secret_key and has_secret_key(engine):
        try:
            load_secret_key(settings, engine, clock)
        except SecretKeyError as error:
            raise BackupError(f"a backup without the secret key would be of little use: {error}") from error
    try:
        with tempfile.TemporaryDirectory(prefix=".rankwatch-backup-", dir=file.absolute().parent) as place:
            folder = Path(place)
            now = clock.unix_ns()
            with write(engine) as connection:
                audit_trail.append(connection, now, "command line", "backup.create", str(file.absolute()), "ok")
            database = _copy_database(engine, folder)
            present = {name: path for name, path in kept_files(settings).items() if path.is_file()}
            for kept, path in present.items():
                shutil.copyfile(path, folder / kept)
            checksums = {name: checksum(folder / name) for name in (database, *present)}
            kind = engine.url.get_backend_name()
            manifest = Manifest(FORMAT, now, version("rankwatch"), kind, revision, checksums)
            write_backup(folder / "backup.tar", manifest, folder)
            (folder / "backup.tar").rename(file)
    except OSError as error:
        raise BackupError(f"{file} cannot be written: {error.strerror}") from error
    return manifest


def _copy_database(engine: Engine, folder: Path) -> str:
    """Copy the database into the folder; returns the name of the copy."""
    if engine.url.get_backend_name() == "postgresql":
        postgres.dump(engine.url, folder / postgres.NAME)
        return postgres.NAME
    sqlite.copy(Path(engine.url.database or ""), folder / sqlite.NAME)
    return sqlite.NAME
