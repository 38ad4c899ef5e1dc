"""Records that a checkpoint could not be saved or loaded. The exception goes on to the training script."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rankwatch.faults import Faults
from rankwatch.loop.ending import INTERRUPTED, described
from rankwatch.meter import StepMeter


class CheckpointFailures:
    """The failed saves and restores of one rank: event `checkpoint_failed`, once for each failure in a step."""

    def __init__(self, meter: StepMeter, faults: Faults) -> None:
        self._meter = meter
        self._faults = faults
        self._told: tuple[Any, ...] = ()
        self._known: dict[str, Any] = {}
        """Fields of the event that are known of what is being saved or loaded."""
        meter.failed = self.tell

    @contextmanager
    def of(self, what: str, **fields: Any) -> Iterator[None]:
        """A part in which an exception means that a save or a restore has failed.

        Args:
            what: save or restore.
            fields: further ones of the event.
        """
        before, self._known = self._known, {**self._known, **fields}
        try:
            yield
        except Exception as error:
            self.tell(what, error)
            raise
        finally:
            self._known = before

    def tell(self, what: str, error: BaseException) -> None:
        """Record a failure. An exception that ends the process on request says nothing about a checkpoint."""
        if not isinstance(error, Exception):
            return
        with self._faults:
            told = described(error, error.__traceback__)
            failure = (what, self._meter.k, self._meter.step, told["type"], told["message"])
            if told["type"] == INTERRUPTED or failure == self._told:
                return
            self._told = failure
            said = {name: told[name] for name in ("type", "message", "where")}
            fields = {"what": what, "location": _path(error), **self._known, **said, "errno": _errno(error)}
            self._meter.note("checkpoint_failed", fields)


def _path(error: Exception) -> str:
    """The file that the exception names; "" if it names none."""
    named = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else ""
    return os.path.abspath(named) if named else ""


def _errno(error: Exception) -> int:
    """The number of the file system's error that this is, or that it follows from; 0 without one."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and not isinstance(cause, ConnectionError | TimeoutError):
            return cause.errno or 0
        cause = cause.__cause__ or cause.__context__
    return 0
