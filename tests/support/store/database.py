"""A migrated database of a test's own, on SQLite or on both databases in turn."""

import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from sqlalchemy import Engine, event

from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.migrate import upgrade


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a migrated database; a test that takes it runs once on each kind."""
    if request.param == "sqlite":
        new_database(tmp_path).dispose()
        yield f"sqlite:///{tmp_path}/rankwatch.db"
    else:
        with request.getfixturevalue("postgres").migrated() as url:
            yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_database_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The URL of a database without tables, once of each kind."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/new/folder/test.db"
    else:
        with request.getfixturevalue("postgres").empty() as url:
            yield url


@pytest.fixture
def engine(database_url: str) -> Iterator[Engine]:
    """An open engine on such a database."""
    engine = without_sync(open_engine(database_url))
    yield engine
    engine.dispose()


def new_database(folder: Path) -> Engine:
    """An engine on the migrated SQLite database of a folder, which is made if there is none."""
    file = folder / "rankwatch.db"
    if not file.exists():
        file.write_bytes(_migrated())
    return without_sync(open_engine(f"sqlite:///{file}"))


def without_sync(engine: Engine) -> Engine:
    """Have SQLite not wait for the disk: commits then survive a process that is killed, not a power cut."""
    if engine.dialect.name == "sqlite":
        event.listen(engine, "connect", lambda connection, _record: connection.execute("PRAGMA synchronous=OFF"))
    return engine


@cache
def _migrated() -> bytes:
    """The content of a new database. Made once for all tests of a process: migrating takes half a second."""
    with tempfile.TemporaryDirectory() as folder:
        engine = open_engine(f"sqlite:///{folder}/new.db")
        upgrade(engine)
        with engine.connect() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        engine.dispose()
        return Path(folder, "new.db").read_bytes()
