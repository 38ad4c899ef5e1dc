"""Calls to the database and the log that fail on demand, before or after they take effect."""

from collections.abc import Callable
from enum import Enum
from typing import Any

from sqlalchemy import Engine

from rankwatch_service.log.base import Record
from rankwatch_service.stream.sources import Source


class When(Enum):
    BEFORE = "before"
    AFTER = "after"


class CrashError(Exception):
    """The process ends here, as far as the code under test is concerned."""


class Faults:
    """Counts calls that leave the process, and fails the one that was chosen."""

    def __init__(self) -> None:
        self.calls = 0
        self.fail_at: int | None = None
        self.when = When.BEFORE

    def arm(self, in_calls: int, when: When) -> None:
        self.fail_at, self.when = self.calls + in_calls, when

    def call(self, real: Callable[[], Any]) -> Any:
        self.calls += 1
        hit = self.calls == self.fail_at
        if hit and self.when is When.BEFORE:
            raise CrashError
        result = real()
        if hit:
            raise CrashError
        return result

    def install(self, engine: Engine) -> None:
        """Every statement and every commit of this engine, whatever the database."""
        for name in ("do_execute", "do_executemany", "do_commit"):
            self._wrap(engine.dialect, name)

    def _wrap(self, dialect: Any, name: str) -> None:
        real = getattr(dialect, name)
        setattr(dialect, name, lambda *args, **how: self.call(lambda: real(*args, **how)))


class FaultySource:
    """A source whose reads are such calls. They wait until there is something or the end is known, so that their number
    does not depend on how quickly a broker answers.
    """

    WAIT_S = 30.0

    def __init__(self, source: Source, faults: Faults) -> None:
        self._source = source
        self._faults = faults

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        return self._faults.call(lambda: self._source.read(partition, position, limit, max(wait_s, self.WAIT_S)))

    def begin(self, partition: int) -> int:
        return self._faults.call(lambda: self._source.begin(partition))

    def end(self, partition: int) -> int:
        return self._faults.call(lambda: self._source.end(partition))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)
