"""Notices that somebody has committed, without asking any table.

SQLite counts commits (`PRAGMA data_version`); on PostgreSQL every `write` announces itself (NOTIFY), and a thread of
this process listens.
"""

from __future__ import annotations

import selectors
import socket
import threading
from contextlib import closing
from typing import TYPE_CHECKING, Final, Protocol, cast

import structlog
from sqlalchemy import Engine

from rankwatch_service.store.postgres import CHANNEL

if TYPE_CHECKING:
    import psycopg

RECONNECT_S: Final = 1.0
"""Between tries to listen again."""

_log = structlog.get_logger(__name__)


class Changes(Protocol):
    """Detects commits of other connections."""

    def changed(self) -> bool:
        """Whether another connection has committed since the last call; must not block."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


class ChangeWatch:
    """Tells whether another connection has committed since the last question, for microseconds; never waits.

    Holds one connection; ask from one thread only. The first yes means that it watches: at the beginning, and again
    after the connection was lost, since what was committed in between was not heard.
    """

    def __init__(self, engine: Engine) -> None:
        self._source: Changes = _Listener(engine) if engine.dialect.name == "postgresql" else _Counter(engine)

    def changed(self) -> bool:
        """True whenever somebody else has committed since the last yes, and soon after the beginning."""
        return self._source.changed()

    def close(self) -> None:
        """Give the connection back."""
        self._source.close()


class _Counter:
    """SQLite's own count of commits, 3 us a question."""

    def __init__(self, engine: Engine) -> None:
        self._connection = engine.raw_connection()
        self._version: int | None = None

    def changed(self) -> bool:
        cursor = self._connection.cursor()
        version: int = cursor.execute("PRAGMA data_version").fetchone()[0]
        cursor.close()
        changed, self._version = version != self._version, version
        return changed

    def close(self) -> None:
        self._connection.close()


class _Listener:
    """A thread that waits for PostgreSQL's notices and keeps in mind that one came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heard = threading.Event()
        self._closing = threading.Event()
        self._wake, self._waker = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)
        self._thread.start()

    def changed(self) -> bool:
        heard = self._heard.is_set()
        if heard:
            self._heard.clear()
        return heard

    def close(self) -> None:
        self._closing.set()
        self._waker.send(b"x")
        self._thread.join()
        self._wake.close()
        self._waker.close()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._listen()
            except Exception as error:  # noqa: BLE001 - whatever it is, listening again is all there is to do
                _log.warning("listening_broke", error=" ".join(str(error).split()))
                self._closing.wait(RECONNECT_S)

    def _listen(self) -> None:
        pooled = self._engine.raw_connection()
        connection = cast("psycopg.Connection", pooled.driver_connection)
        pooled.detach()  # ours from now on: the pool may open another one in its place
        with closing(connection), selectors.DefaultSelector() as selector:
            connection.autocommit = True
            connection.execute(f"LISTEN {CHANNEL}")
            self._heard.set()
            for source in (connection, self._wake):
                selector.register(source, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                for _ in connection.notifies(timeout=0):
                    self._heard.set()
