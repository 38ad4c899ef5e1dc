"""Reads TensorBoard event files: scalars by tag become columns, one row for each step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from rankwatch.follow.record_logs import EventReader, LogFormatError, ScalarEvent
from rankwatch_service.replay.layout import ReplayError

OPEN_STEPS: Final = 64
"""Scalars of one step may be written this many steps apart."""

BATCH_ROWS: Final = 8_192
PIECE_BYTES: Final = 1024 * 1024
COLUMNS_MAX: Final = 1_000
"""The number of tags read; the others are left out."""


OWN: Final = ("time_s", "step", "attempt")
"""Columns of every row; a tag of such a name becomes the column tag/NAME."""


class TensorBoardFile:
    """One event file. Each is a launch of its own, and a step that goes back begins a new attempt of it."""

    def __init__(self, path: Path) -> None:
        """Scan the file for its tags.

        Raises:
            ReplayError: it has no scalars.
        """
        self.path = str(path)
        self.total = 0
        self._launch = path.name.rpartition("tfevents.")[2] or path.name
        tags: dict[str, None] = {}
        for _, _, scalars in _events(self.path):
            self.total += 1
            if len(tags) < COLUMNS_MAX:
                tags |= dict.fromkeys(scalars)
        if not tags:
            raise ReplayError(self.path, "an event file without scalars")
        self._columns = {tag: f"tag/{tag}" if tag in OWN else tag for tag in list(tags)[:COLUMNS_MAX]}
        self.names = [*OWN, *self._columns.values()]

    def batches(self) -> Iterator[tuple[Any, int]]:
        """Record batches in the order of writing, each with the number of events read so far."""
        ready: list[dict[str, Any]] = []
        for row, done in self._rows():
            ready.append(row)
            if len(ready) == BATCH_ROWS:
                yield self._batch(ready), done
                ready = []
        if ready:
            yield self._batch(ready), self.total

    def _rows(self) -> Iterator[tuple[dict[str, Any], int]]:
        pending: dict[int, dict[str, Any]] = {}
        attempt, done, newest = 0, 0, -1
        for done, (time_s, step, scalars) in enumerate(_events(self.path), 1):
            columns = {self._columns[tag]: value for tag, value in scalars.items() if tag in self._columns}
            # In the newest step itself a tag may be written twice.
            again = step < newest and not columns.keys().isdisjoint(pending.get(step, ()))
            if again or step < newest - OPEN_STEPS:
                yield from ((row, done) for row in _drained(pending, 0))
                attempt, newest = attempt + 1, -1
            if step not in pending and step < newest:
                # Its row may be gone already; what came later stays where it is.
                continue
            newest = max(newest, step)
            row = pending.setdefault(step, {"time_s": time_s, "step": step, "attempt": f"{self._launch}.{attempt}"})
            row |= columns
            yield from ((row, done) for row in _drained(pending, OPEN_STEPS))
        yield from ((row, done) for row in _drained(pending, 0))

    def _batch(self, rows: list[dict[str, Any]]) -> Any:
        schema = pa.schema(
            [("time_s", pa.float64()), ("step", pa.int64()), ("attempt", pa.string())]
            + [(name, pa.float64()) for name in self._columns.values()]
        )
        return pa.RecordBatch.from_pylist(rows, schema=schema)


def _drained(pending: dict[int, dict[str, Any]], keep: int) -> Iterator[dict[str, Any]]:
    while len(pending) > keep:
        yield pending.pop(next(iter(pending)))


def _events(path: str) -> Iterator[ScalarEvent]:
    """The events that have scalars. A file that is truncated or damaged ends with its last whole event."""
    reader = EventReader()
    with open(path, "rb") as file, suppress(LogFormatError):
        while data := file.read(PIECE_BYTES):
            yield from reader.feed(data)
