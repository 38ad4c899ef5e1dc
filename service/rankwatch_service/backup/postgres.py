"""Dump and restore of a PostgreSQL database, by its own client programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

from sqlalchemy import URL

from rankwatch_service.backup.backup_file import BackupError

NAME: Final = "rankwatch.dump"
"""The dump's name in a backup."""

# Roles and rights belong to the server, which may be another one at a restore.
_PORTABLE: Final = ("--no-owner", "--no-privileges")


def dump(url: URL, target: Path) -> None:
    """Write the state of one moment, while others write.

    Raises:
        BackupError: pg_dump is not installed, or it failed.
    """
    _run("pg_dump", url, "--format=custom", *_PORTABLE, f"--file={target}")


def load(url: URL, source: Path) -> None:
    """Restore a dump into a database without tables, in one transaction.

    Raises:
        BackupError: pg_restore is not installed, or it failed; the database is as it was then.
    """
    _run("pg_restore", url, "--exit-on-error", "--single-transaction", *_PORTABLE, str(source))


def _run(program: str, url: URL, *arguments: str) -> None:
    if shutil.which(program) is None:
        raise BackupError(
            f"{program} is not installed; install the client programs of PostgreSQL (on Debian and Ubuntu "
            "`apt install postgresql-client`), in the version of the server or a newer one"
        )
    # Others on this machine can read arguments, but not the environment.
    bare = URL.create("postgresql", url.username, None, url.host, url.port, url.database, url.query)
    address = bare.render_as_string(hide_password=False)
    password = {} if url.password is None else {"PGPASSWORD": str(url.password)}
    done = subprocess.run(
        [program, f"--dbname={address}", *arguments],
        env={**os.environ, **password},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise BackupError(f"{program} failed: {' '.join(done.stderr.split())}")
