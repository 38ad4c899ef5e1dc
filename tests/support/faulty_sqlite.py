"""SQLite connections whose calls fail on demand, before or after they took effect."""

import sqlite3
from collections.abc import Callable
from enum import Enum

from sqlalchemy import Engine, event


class When(Enum):
    BEFORE = "before"
    AFTER = "after"


class CrashError(Exception):
    """The process ends here, as far as the code under test is concerned."""


class Faults:
    """Counts calls that reach the database, and fails the one that was chosen."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail_at: int | None = None
        self.when = When.BEFORE

    def arm(self, in_calls: int, when: When) -> None:
        self.fail_at, self.when = self.calls + in_calls, when

    def disarm(self) -> None:
        self.fail_at = None

    def call(self, real: Callable[[], object]) -> object:
        self.calls += 1
        hit = self.calls == self.fail_at
        if hit and self.when is When.BEFORE:
            raise CrashError
        result = real()
        if hit:
            raise CrashError
        return result

    def install(self, engine: Engine) -> None:
        """Before the engine's first connection."""
        faults = self

        class FaultyCursor(sqlite3.Cursor):
            def execute(self, *args):
                return faults.call(lambda: super(FaultyCursor, self).execute(*args))

            def executemany(self, *args):
                return faults.call(lambda: super(FaultyCursor, self).executemany(*args))

        class FaultyConnection(sqlite3.Connection):
            def cursor(self, factory=FaultyCursor):
                return super().cursor(factory)

            def commit(self):
                faults.call(super().commit)

        def connect(_dialect, _record, _args, parameters):
            parameters["factory"] = FaultyConnection

        event.listen(engine, "do_connect", connect)
