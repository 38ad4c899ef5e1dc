"""Detects that another connection has committed, without querying a table.

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
"""Pause before listening again after an error."""

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
    """Tells whether another connection has committed since the last call. A call takes microseconds and never waits.

    Holds one connection; call it from one thread only. It also says yes when it has begun to watch, at the start and
    after a lost connection, since it has missed what was committed before.
    """

    def __init__(self, engine: Engine) -> None:
        self._source: Changes = _Listener(engine) if engine.dialect.name == "postgresql" else _Counter(engine)

    def changed(self) -> bool:
        """True if another connection has committed since the last True, or watching has begun since then."""
        return self._source.changed()

    def close(self) -> None:
        """Release the connection."""
        self._source.close()


class _Counter:
    """SQLite's own count of commits by others, 3 us a call."""

    def __init__(self, engine: Engine) -> None:
        # Kept open: two values of data_version can be compared only on the same connection.
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
    """A thread that waits for notifications of PostgreSQL and remembers that one came."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._heard = threading.Event()
        self._closing = threading.Event()
        # `close` wakes the thread from its select through these.
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
            except Exception as error:  # noqa: BLE001 - whatever failed, only listening again helps
                _log.warning("listening_broke", error=" ".join(str(error).split()))
                self._closing.wait(RECONNECT_S)

    def _listen(self) -> None:
        pooled = self._engine.raw_connection()
        connection = cast("psycopg.Connection", pooled.driver_connection)
        pooled.detach()  # ours for good: the pool may open another one in its place
        with closing(connection), selectors.DefaultSelector() as selector:
            connection.autocommit = True
            connection.execute(f"LISTEN {CHANNEL}")
            # Commits before this were missed.
            self._heard.set()
            for source in (connection, self._wake):
                selector.register(source, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select()
                for _ in connection.notifies(timeout=0):
                    self._heard.set()
