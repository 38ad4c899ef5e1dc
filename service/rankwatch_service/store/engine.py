"""Connections to the database: SQLite by default, PostgreSQL by the same calls.

Turns at the write lock of a SQLite database, so that a steady writer does not starve the others.

A process that waits for SQLite sleeps up to 100 ms between tries, so beside a steady writer it hardly ever finds the
lock free (measured: one turn in five seconds). Here a writer first takes the place of the next one, then waits for the
turn, and queues again after it. Both are `flock`s on files beside the database, which the kernel releases when a
process dies. Threads of one process queue before that (`write_queue`), so that each process waits with one of them.

A write is one short transaction. Writes go one at a time on both databases: SQLite has one writer (BEGIN IMMEDIATE), on
PostgreSQL each takes the same advisory lock first. So what a block reads stays true until it has written, and ids
appear in the order in which they were given out. A write that needs neither uses `write_aside`. A commit is on disk
when it returns.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from threading import Event, Lock
from typing import Any, Final
from weakref import WeakKeyDictionary

from sqlalchemy import URL, Connection, Engine, create_engine, event, inspect
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from rankwatch_service.store import postgres
from rankwatch_service.store.errors import StoreAddressError, StoreBusyError
from rankwatch_service.store.models import Base


class WriteQueue:
    """Threads wait here before they ask the database, or its lock files, for the right to write. Thread-safe.

    So a process asks with one thread at a time, however many requests want to write, and telemetry does not wait
    behind all of them. Whoever writes `first` goes before the others, but never twice in a row while others wait.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_held = False
        self._first: deque[Event] = deque()
        self._others: deque[Event] = deque()

    @contextmanager
    def place(self, timeout_s: float, *, first: bool) -> Iterator[float]:
        """Hold the place for the block, which gets the seconds of `timeout_s` that are left.

        After `timeout_s` the block runs all the same: the database decides then.
        """
        deadline_s = time.monotonic() + timeout_s
        is_held = self._enter(timeout_s, first=first)
        try:
            yield max(deadline_s - time.monotonic(), 0.0)
        finally:
            if is_held:
                self._leave(was_first=first)

    def _enter(self, timeout_s: float, *, first: bool) -> bool:
        queue, called = self._first if first else self._others, Event()
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return True
            queue.append(called)
        try:
            called.wait(timeout_s)
        finally:
            with self._lock:
                if not (is_held := called.is_set()):
                    queue.remove(called)
        return is_held

    def _leave(self, *, was_first: bool) -> None:
        with self._lock:
            queue = self._first if self._first and not (was_first and self._others) else self._others
            if queue:
                queue.popleft().set()
            else:
                self._is_held = False


LOOK_S: Final = 0.001
"""Pause between looks at a lock; a turn lasts 5 to 20 ms."""


@contextmanager
def turn(database: str, timeout_s: float) -> Iterator[None]:
    """Hold the turn for the block.

    After `timeout_s`, or if the files cannot be created, the block runs without a turn: then SQLite's own lock decides.
    """
    deadline_s = time.monotonic() + timeout_s
    held = -1
    with suppress(OSError):
        place = _taken(f"{database}-next", deadline_s)
        if place >= 0:
            try:
                held = _taken(f"{database}-turn", deadline_s)
            finally:
                os.close(place)
    try:
        yield
    finally:
        if held >= 0:
            os.close(held)


def _taken(path: str, deadline_s: float) -> int:
    """Descriptor of the locked file; -1 after the deadline."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        # Polled, since a flock that blocks has no time-out.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(file)
                return -1
            time.sleep(LOOK_S)
        except BaseException:
            os.close(file)
            raise


BUSY_TIMEOUT_MS: Final = 5_000
"""How long SQLite waits for another writer; writers hold the lock for 20 ms at most, so 250 of them fit."""

BEGIN_TRIES_MAX: Final = 3
"""Tries to begin a write, BUSY_TIMEOUT_MS each: after 15 s the caller gets `StoreBusyError`."""

_WRITE: Final = "rankwatch_write"
_AFTER_COMMIT: Final = "rankwatch_after_commit"
_IN_TURN: Final = "in turn"
_ASIDE: Final = "aside"


def open_engine(database_url: str, role: str = "") -> Engine:
    """Open a database by its URL (`sqlite:///PATH`, `postgresql://USER:PASSWORD@HOST:PORT/NAME`).

    The folder of a SQLite file is created, for its owner alone, if it is missing. Nothing is migrated: see
    `store.migrate`. No connection is made before the first read or write.

    Args:
        database_url: of the database.
        role: of this process, shown in PostgreSQL's list of connections.

    Raises:
        StoreAddressError: the URL is invalid, its driver is not installed, or the folder cannot be created.
    """
    url = address_of(database_url)
    if url.get_backend_name() == "postgresql":
        return _postgres_engine(url, role)
    if url.database:
        folder = Path(url.database).parent
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # the database holds secrets of receivers
        except OSError as error:
            raise StoreAddressError(f"the folder {folder} cannot be created: {error.strerror}") from error
    engine = create_engine(url, json_serializer=_json, connect_args={"timeout": BUSY_TIMEOUT_MS / 1000})
    event.listen(engine, "connect", _on_sqlite_connect)
    event.listen(engine, "begin", _on_sqlite_begin)
    return engine


def address_of(database_url: str) -> URL:
    """The URL in parts, with the driver that we use.

    Raises:
        StoreAddressError: it is not a URL, or that of another kind of database.
    """
    try:
        url = make_url(database_url)
    except ArgumentError as error:
        raise StoreAddressError("the database's URL must be like sqlite:///PATH or postgresql://HOST/NAME") from error
    match url.drivername.partition("+")[0]:
        case "sqlite":
            return url
        case "postgresql" | "postgres":
            return url.set(drivername="postgresql+psycopg")
        case other:
            raise StoreAddressError(f"the database must be sqlite or postgresql, not {other}")


@contextmanager
def write(engine: Engine, *, first: bool = False) -> Iterator[Connection]:
    """One writing transaction: committed at the end of the block, undone if the block raises.

    It runs alone: no other `write` of any process comes between its begin and its commit. So do no I/O in the block
    except in the database, and stay below 20 ms.

    Args:
        engine: of the database.
        first: go before other threads of this process that wait to write; for telemetry.

    Raises:
        StoreBusyError: the database cannot be used now.
    """
    with _transaction(engine, _IN_TURN, first=first) as connection:
        if _is_postgres(engine):
            postgres.take_turn(connection)
        yield connection


@contextmanager
def write_aside(engine: Engine) -> Iterator[Connection]:
    """A writing transaction for bulk data that nobody waits for: series, snapshots, views, housekeeping.

    On PostgreSQL it runs beside other writes, and `ChangeWatch` does not see it. So it may write only rows that nobody
    else writes, or rows in the order of their keys, and never the feed or the control log.

    Raises:
        StoreBusyError: the database cannot be used now.
    """
    with _transaction(engine, _ASIDE) as connection:
        yield connection


@contextmanager
def read(engine: Engine) -> Iterator[Connection]:
    """One reading transaction: every query of the block sees the same state, and no writer waits for it.

    Raises:
        StoreBusyError: the database cannot be used now.
    """
    options = postgres.READ_ONLY if _is_postgres(engine) else {}
    with _temporary_errors(), engine.connect().execution_options(**options) as connection:
        yield connection


def in_turn(connection: Connection) -> bool:
    """Whether this is the connection of a `write`."""
    return connection.get_execution_options().get(_WRITE) == _IN_TURN


def after_commit(connection: Connection, call: Callable[[], None]) -> None:
    """Call it when the transaction of this write is on disk and others may write again; never, if it is undone."""
    connection.get_execution_options()[_AFTER_COMMIT].append(call)


@contextmanager
def _transaction(engine: Engine, kind: str, *, first: bool = False) -> Iterator[Connection]:
    calls: list[Callable[[], None]] = []
    options = {_WRITE: kind, _AFTER_COMMIT: calls}
    with (
        _temporary_errors(),
        _turn(engine, kind, first=first),
        engine.connect().execution_options(**options) as connection,
    ):
        _begin(connection)
        try:
            yield connection
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
    for call in calls:
        call()


@contextmanager
def _temporary_errors() -> Iterator[None]:
    """Raise temporary errors, which another try may not meet, as `StoreBusyError`."""
    try:
        yield
    except PoolTimeoutError as error:
        raise StoreBusyError("too many connections of this process are in use") from error
    except (OperationalError, InterfaceError) as error:
        raise StoreBusyError(_one_line(error)) from error
    except DBAPIError as error:
        if not error.connection_invalidated and not postgres.may_pass(error):
            raise
        raise StoreBusyError(_one_line(error)) from error


def _one_line(error: DBAPIError) -> str:
    return " ".join(str(error.orig).split())


def _postgres_engine(url: URL, role: str) -> Engine:
    try:
        engine = create_engine(
            url,
            json_serializer=_json,
            connect_args=postgres.connect_arguments(url, role),
            pool_size=postgres.CONNECTIONS_KEPT,
            max_overflow=postgres.CONNECTIONS_MAX - postgres.CONNECTIONS_KEPT,
            pool_timeout=postgres.POOL_WAIT_S,
            # A connection that broke while nobody used it is replaced silently.
            pool_pre_ping=True,
        )
        # Imported here, since psycopg is an extra that only PostgreSQL needs.
        from rankwatch_service.store import postgres_timeouts  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise StoreAddressError("PostgreSQL needs psycopg: pip install 'rankwatch[postgres]'") from error
    postgres_timeouts.install(engine, postgres.ANSWER_TIMEOUT_S)
    return engine


def _is_postgres(engine: Engine) -> bool:
    return engine.dialect.name == "postgresql"


@contextmanager
def _turn(engine: Engine, kind: str, *, first: bool) -> Iterator[None]:
    """Wait for the turn to write: in this process, then among the processes of a SQLite file."""
    # On PostgreSQL, what is written aside waits for nobody. A database in memory belongs to one thread.
    if (_is_postgres(engine) and kind == _ASIDE) or engine.url.database in (None, "", ":memory:"):
        yield
        return
    with _queue_of(engine).place(BUSY_TIMEOUT_MS / 1000, first=first) as left_s:
        if _is_postgres(engine):
            yield
        else:
            with turn(str(engine.url.database), left_s):
                yield


_QUEUES: Final[WeakKeyDictionary[Engine, WriteQueue]] = WeakKeyDictionary()
_QUEUES_LOCK: Final = Lock()


def _queue_of(engine: Engine) -> WriteQueue:
    with _QUEUES_LOCK:
        return _QUEUES.setdefault(engine, WriteQueue())


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
    # The low byte of an extended code, such as SQLITE_BUSY_SNAPSHOT, is its primary code.
    code = getattr(error.orig, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _on_sqlite_connect(dbapi_connection: sqlite3.Connection, _record: object) -> None:
    dbapi_connection.isolation_level = None  # the driver must not begin transactions of its own
    # WAL: readers and the one writer do not wait for each other. FULL: a commit survives a power cut, which is what
    # "durable" in the ingest contract means.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"):
        dbapi_connection.execute(f"PRAGMA {pragma}").close()


def _on_sqlite_begin(connection: Connection) -> None:
    # IMMEDIATE takes the write lock before the block reads, so what it reads stays true.
    writes = _WRITE in connection.get_execution_options()
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _json(value: Any) -> str:
    # NaN is not JSON: callers store it as the string "NaN".
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


STATEMENTS_MAX: Final = 256
"""Statements kept, since building one takes longer than executing it. There are some twenty tables, of which few are
written with several sets of columns."""


def upsert(connection: Connection, table: type[Base], changed: Iterable[str] = ()) -> Any:
    """A statement that inserts rows, and in rows whose primary key exists sets only the columns `changed`.

    Columns of the key in `changed` are ignored. Without columns to change, a row that exists stays as it is, and the
    result's `rowcount` does not count it.
    """
    return _statement(connection.dialect.name, table, tuple(changed))


@lru_cache(STATEMENTS_MAX)
def _statement(dialect: str, table: type[Base], changed: tuple[str, ...]) -> Any:
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    # Without this option, psycopg's count of inserted rows is lost before the caller reads it.
    statement: Any = make(table).execution_options(preserve_rowcount=True)
    keys = [column.name for column in inspect(table).primary_key]
    fresh = {name: statement.excluded[name] for name in changed if name not in keys}
    if not fresh:
        return statement.on_conflict_do_nothing(index_elements=keys)
    return statement.on_conflict_do_update(index_elements=keys, set_=fresh)
