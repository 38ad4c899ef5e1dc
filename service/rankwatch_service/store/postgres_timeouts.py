"""Connections to PostgreSQL that accept every text, and give up on a server that does not answer.

A server that is suspended, or whose disk hangs, does not answer, but its kernel still acknowledges what is sent. So
neither TCP's nor the server's own time-outs end the wait. Needs the extra `postgres`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import psycopg
from psycopg.types.string import StrDumperUnknown
from sqlalchemy import Engine, event

RV = TypeVar("RV")
Talk = Generator[Any, Any, RV]
"""An exchange of psycopg with the server: yields what it waits for, and is sent what is ready, 0 while nothing is."""


class _AnyText(StrDumperUnknown):
    """Replaces the character NUL, which PostgreSQL cannot store, by U+FFFD.

    NUL comes from outside, for instance in the output of a job, and must not make a write fail.
    """

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\ufffd"))


class Connection(psycopg.Connection[Any]):
    """A connection that is given up once the server has not answered for `answer_within_s`."""

    answer_within_s = float("inf")

    def wait(self, gen: Talk[RV], *arguments: Any, **more: Any) -> RV:
        """Run an exchange with the server, as every call of psycopg does.

        Raises:
            OperationalError: no whole answer came in time; the connection is closed.
        """
        return super().wait(self._bounded(gen), *arguments, **more)

    def _bounded(self, talk: Talk[RV]) -> Talk[RV]:
        deadline_s = time.monotonic() + self.answer_within_s
        try:
            wanted = next(talk)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline_s:
                    self.close()
                    raise psycopg.OperationalError(f"the server has not answered within {self.answer_within_s:g} s")
                wanted = talk.send(ready)
        except StopIteration as ended:
            done: RV = ended.value
            return done


def install(engine: Engine, answer_within_s: float) -> None:
    """Make the engine use such connections.

    A connection that returns to the pool gets its limit back, which `postgres.lift_limits` may have removed.
    """

    def connect(_dialect: Any, _record: Any, arguments: Any, more: Any) -> Connection:
        connection = Connection.connect(*arguments, **more)
        connection.adapters.register_dumper(str, _AnyText)
        connection.answer_within_s = answer_within_s
        return connection

    def checked_in(connection: Connection | None, _record: Any) -> None:
        # None: the pool has discarded a broken connection.
        if connection is not None:
            connection.answer_within_s = answer_within_s

    listeners: dict[str, Callable[..., Any]] = {"do_connect": connect, "checkin": checked_in}
    for name, listener in listeners.items():
        event.listen(engine, name, listener)
