"""Connections to the database: SQLite by default, PostgreSQL by the same call.

A write is one short transaction that takes its lock at the start (BEGIN IMMEDIATE): a transaction that begins as a
reader and writes later fails at once under load, and no time-out helps it. Commits are on disk when they return.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Final

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import OperationalError

from rankwatch_service.store.turn import turn

BUSY_TIMEOUT_MS: Final = 5_000
"""How long SQLite waits for another writer; writers hold the lock for 20 ms at most, so 250 of them fit."""

BEGIN_TRIES_MAX: Final = 3
"""Tries to begin a write, BUSY_TIMEOUT_MS each: after 15 s the caller hears `StoreBusyError` and decides."""

_WRITE: Final = "rankwatch_write"


class StoreBusyError(Exception):
    """Another process kept the database locked for BEGIN_TRIES_MAX x BUSY_TIMEOUT_MS. Trying again later may help."""


def open_engine(database_url: str) -> Engine:
    """Open a database by its SQLAlchemy URL (`sqlite:///PATH`, `postgresql+psycopg://...`).

    The folder of a SQLite file is made if it is missing. Nothing is migrated: see `store.migrate`.
    """
    url = make_url(database_url)
    if url.get_backend_name() != "sqlite":
        return create_engine(url, pool_pre_ping=True, json_serializer=_json)
    if url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_engine(url, json_serializer=_json, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


@contextmanager
def write(engine: Engine) -> Iterator[Connection]:
    """One writing transaction: committed at the end of the block, undone if the block raises.

    Do no I/O inside but the database's own, and stay below 20 ms.

    Raises:
        StoreBusyError: the lock could not be had; nothing was done.
    """
    with _turn(engine), engine.connect().execution_options(**{_WRITE: True}) as connection:
        _begin(connection)
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()


@contextmanager
def read(engine: Engine) -> Iterator[Connection]:
    """One reading transaction: every query of the block sees the same state, and nobody waits for it."""
    with engine.connect() as connection:
        yield connection


class ChangeWatch:
    """Tells whether another connection has committed since the last question, for 3 us (`PRAGMA data_version`).

    Holds one connection; ask from one thread only. Where the database has no such counter the answer is always yes,
    so that the caller polls.
    """

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.raw_connection() if engine.dialect.name == "sqlite" else None
        self._version: int | None = None

    def changed(self) -> bool:
        """True at the first question, and whenever somebody else committed since the one before."""
        if self._connection is None:
            return True
        cursor = self._connection.cursor()
        version: int = cursor.execute("PRAGMA data_version").fetchone()[0]
        cursor.close()
        changed, self._version = version != self._version, version
        return changed

    def close(self) -> None:
        """Give the connection back."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def _turn(engine: Engine) -> AbstractContextManager[None]:
    if engine.dialect.name != "sqlite" or engine.url.database in (None, "", ":memory:"):
        return nullcontext()
    return turn(engine.url.database, BUSY_TIMEOUT_MS / 1000)


def _begin(connection: Connection) -> None:
    for tries_left in reversed(range(BEGIN_TRIES_MAX)):
        try:
            connection.begin()
            return
        except OperationalError as error:
            if not _is_busy(error):
                raise
            if tries_left == 0:
                raise StoreBusyError("the database stayed locked by another process") from error


def _is_busy(error: OperationalError) -> bool:
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _on_sqlite_connect(dbapi_connection: sqlite3.Connection, _record: object) -> None:
    dbapi_connection.isolation_level = None  # the driver must not begin transactions of its own
    # WAL: readers and the one writer do not wait for each other. FULL: a commit survives a power cut, which is what
    # "durable" in the ingest contract means.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        dbapi_connection.execute(f"PRAGMA {pragma}").close()


def _on_sqlite_begin(connection: Connection) -> None:
    immediate = connection.get_execution_options().get(_WRITE, False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if immediate else "BEGIN")


def _json(value: Any) -> str:
    # NaN is not JSON: whoever stores one must have turned it into the string "NaN" before.
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
