"""PostgreSQL for tests: one server for all tests of a process, and one of a test's own where it must be killed.

`RANKWATCH_TEST_POSTGRES=postgresql://USER:PASSWORD@HOST:PORT/DATABASE` names another server for the first; its user
must be allowed to make databases.
"""

import os
import stat
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, delete, text
from sqlalchemy.engine import make_url

from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade
from rankwatch_service.store.models import Base
from tests.support.service.process import until
from tests.support.store.postgres_server import Postgres, PostgresError

NO_DISK = {"fsync": "off", "full_page_writes": "off", "max_connections": "200"}
"""Commits survive the server's death, not the machine's: all that a test can tell apart."""


class PostgresDatabases:
    """Databases on a server. A migrated one is made by copying, and emptied after its test for the next one: to make
    and to drop a database takes the server 0.3 s of CPU, to empty one 2 ms.
    """

    def __init__(self, url: str) -> None:
        self._server = make_url(url)
        if self._server.drivername == "postgresql":
            self._server = self._server.set(drivername="postgresql+psycopg")
        self._engine = create_engine(self._server, isolation_level="AUTOCOMMIT")
        self._prefix = f"rankwatch_test_{uuid.uuid4().hex[:8]}"
        self._made = 0
        self._template = ""
        self._first_rows: dict[str, str] = {}
        self._free: list[str] = []

    @contextmanager
    def empty(self) -> Iterator[str]:
        """The URL of a new database without tables, dropped at the end."""
        name = self._make("template0")
        yield self._url(name)
        self._drop(name)

    @contextmanager
    def migrated(self) -> Iterator[str]:
        """The URL of a database with this version's tables and the rows that they begin with. Tests add no tables."""
        if not self._template:
            template = self._make("template0")
            engine = open_engine(self._url(template))
            upgrade(engine)
            self._first_rows = _first_rows(engine)
            engine.dispose()
            self._template = template
        name = self._free.pop() if self._free else self._make(self._template)
        yield self._url(name)
        self._free.append(self._emptied(name))

    @contextmanager
    def copied(self, url: str) -> Iterator[str]:
        """The URL of a copy of another database, without open connections; dropped at the end."""
        name = self._make(make_url(url).database or "")
        yield self._url(name)
        self._drop(name)

    def close(self) -> None:
        for name in (*self._free, self._template):
            if name:
                self._drop(name)
        self._engine.dispose()

    def _make(self, template: str) -> str:
        name = self._next()
        self._run(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        return name

    def _drop(self, name: str) -> None:
        self._run(f"DROP DATABASE {name} WITH (FORCE)")

    def _emptied(self, name: str) -> str:
        """Empty a database and rename it: what a test left running finds it no more. Return the new name."""
        self._run(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{name}'")
        engine = create_engine(self._server.set(database=name))
        with engine.begin() as connection:
            for table in reversed(Base.metadata.sorted_tables):
                connection.execute(delete(table))
            for table, rows in self._first_rows.items():
                statement = text(f"INSERT INTO {table} SELECT * FROM json_populate_recordset(NULL::{table}, :rows)")
                connection.execute(statement, {"rows": rows})
            connection.execute(text("SELECT setval(sequencename::regclass, 1, false) FROM pg_sequences"))
        engine.dispose()
        new = self._next()
        self._run(f"ALTER DATABASE {name} RENAME TO {new}")
        return new

    def _next(self) -> str:
        self._made += 1
        return f"{self._prefix}_{self._made}"

    def _run(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(text(statement))

    def _url(self, name: str) -> str:
        return self._server.set(database=name).render_as_string(hide_password=False)


def _first_rows(engine: Engine) -> dict[str, str]:
    """The rows of each table of a new database that has any, as JSON."""
    with engine.connect() as connection:
        rows = {
            table.name: connection.execute(text(f"SELECT json_agg(each)::text FROM {table.name} AS each")).scalar()
            for table in Base.metadata.sorted_tables
        }
    return {table: found for table, found in rows.items() if found}


def let_others_through(folder: Path) -> None:
    """Open a folder of pytest and all above it: for root the server runs as another user, who has to come through."""
    for each in (folder, *folder.parents):
        if not each.stat().st_mode & stat.S_IXOTH:
            each.chmod(0o711)


class KillablePostgres(Postgres):
    """A server that can die."""

    def kill(self) -> None:
        """Kill the postmaster by SIGKILL; returns when its children are gone. `start` then recovers the data."""
        assert self._process is not None
        (listed,) = Path(f"/proc/{self._process.pid}/task").iterdir()
        children = [Path("/proc") / pid / "stat" for pid in (listed / "children").read_text().split()]
        self._process.kill()
        self._process.wait()
        # The children exit by themselves, but a new postmaster refuses to start while one has the shared memory open.
        until("its children are gone", lambda: not any(map(_runs, children)), 20.0)


def _runs(stat_file: Path) -> bool:
    try:
        return stat_file.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@contextmanager
def postgres_server() -> Iterator[KillablePostgres]:
    """A running server for one test, to be stopped, killed and started; skips if none can be started."""
    with tempfile.TemporaryDirectory(prefix="rankwatch-postgres-") as folder:
        try:
            server = KillablePostgres(Path(folder), NO_DISK)
            server.start()
        except PostgresError as error:
            pytest.skip(f"no PostgreSQL: {error}")
        try:
            yield server
        finally:
            server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresDatabases]:
    """Databases on the server that all tests of this process share."""
    given = os.environ.get("RANKWATCH_TEST_POSTGRES", "")
    if given:
        databases = PostgresDatabases(given)
        yield databases
        databases.close()
        return
    with postgres_server() as server:
        databases = PostgresDatabases(server.url())
        yield databases
        databases.close()
