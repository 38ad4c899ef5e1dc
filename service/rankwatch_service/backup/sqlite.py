"""A consistent copy of a SQLite database that other processes write to."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Final
from urllib.parse import quote

from rankwatch_service.backup.backup_file import BackupError

NAME: Final = "rankwatch.db"
"""The copy's name in a backup."""


def copy(database: Path, target: Path) -> None:
    """Copy by SQLite's online backup: the state of one moment, while writers go on.

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
