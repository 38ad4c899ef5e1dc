"""Writes closed frames as series chunks, beside the deciding transaction. A crash loses nothing for good: the frames
come again in the replay, and writing one twice gives the same row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from sqlalchemy import Engine, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_detectors.base import Frame
from rankwatch_service.clock import Clock
from rankwatch_service.store.chunks import (
    ABSENT_BITS,
    CHUNK_STEPS,
    Cells,
    blank,
    decoded,
    encoded,
    widened,
)
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import SeriesChunk

OPEN_CHUNKS: Final = 4
"""Chunks of a job that are filled at a time: late records lag behind the newest; older ones are written out."""

FLUSH_S: Final = 1.0
FLUSH_BYTES_PER_S: Final = 4 * 1024 * 1024
"""A job's unfinished chunks are written every FLUSH_S, less often where they are so large that more than this would be
written each second: 64 ranks x 20 metrics are 0.3 MB, 16,384 ranks 84 MB, every 20 s."""

WRITE_BYTES: Final = 1024 * 1024
"""Written in one transaction: 5 ms of the write lock."""

STORED_BYTES_MAX: Final = 20 * 1024**3
"""Series kept in all; the oldest leave. About 60 days of 64 ranks x 20 metrics at 1 step/s and 1.5 bytes a value."""

TRIM_ROWS: Final = 500
"""Removed in one transaction."""


@dataclass(slots=True)
class _Open:
    """The chunk of one attempt that is being filled, by metric."""

    cells: dict[str, Cells]
    dirty: set[str] = field(default_factory=set)


class SeriesWriter:
    """Collects frames by job. Not thread-safe. `add` makes no transaction but to look for what a chunk held before."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._open: dict[str, dict[tuple[str, int], _Open]] = {}
        self._flushed_s: dict[str, float] = {}

    def add(self, job: str, frame: Frame) -> None:
        """Take up a closed frame; the same one may come again."""
        chunks = self._open.setdefault(job, {})
        number, row = divmod(frame.step, CHUNK_STEPS)
        key = (frame.attempt, number)
        chunk = chunks.get(key)
        if chunk is None:
            chunk = chunks[key] = _Open(self._stored(job, *key))
        for name, values in frame.values.items():
            cells = chunk.cells.get(name)
            if cells is None or cells.shape[1] < len(values):
                cells = chunk.cells[name] = blank(len(values)) if cells is None else widened(cells, len(values))
            # A value beyond float32 is infinite on a chart; NaN loses its payload, so that none looks absent.
            with np.errstate(over="ignore"):
                narrow = np.where(np.isnan(values), np.nan, values).astype(np.float32)
            present = frame.present[name]
            cells[row, : len(values)][present] = narrow[present]
            chunk.dirty.add(name)
        while len(chunks) > OPEN_CHUNKS:
            oldest = min(chunks, key=lambda other: (other[0] == frame.attempt, other[1]))
            self._write(job, {oldest: chunks.pop(oldest)})

    def flush(self, job: str) -> None:
        """Write what is held for a job."""
        self._flushed_s[job] = self._clock.monotonic_s()
        self._write(job, self._open.get(job, {}))

    def flush_due(self) -> None:
        """Write the jobs whose time has come."""
        now_s = self._clock.monotonic_s()
        for job, chunks in self._open.items():
            held = sum(cells.nbytes for chunk in chunks.values() for cells in chunk.cells.values())
            wait_s = max(FLUSH_S, held / FLUSH_BYTES_PER_S)
            if now_s - self._flushed_s.get(job, 0.0) >= wait_s and any(chunk.dirty for chunk in chunks.values()):
                self.flush(job)

    def _stored(self, job: str, attempt: str, number: int) -> dict[str, Cells]:
        """What an earlier life has written of this chunk."""
        with read(self._engine) as connection:
            rows = connection.execute(
                select(SeriesChunk.metric, SeriesChunk.ranks, SeriesChunk.data).where(
                    SeriesChunk.job == job, SeriesChunk.attempt == attempt, SeriesChunk.chunk == number
                )
            ).all()
        return {row.metric: decoded(row.data, row.ranks).copy() for row in rows}

    def _write(self, job: str, chunks: dict[tuple[str, int], _Open]) -> None:
        rows, size = list[dict[str, Any]](), 0
        for (attempt, number), chunk in chunks.items():
            for metric in sorted(chunk.dirty):
                row = self._row(job, attempt, metric, number, chunk.cells[metric])
                rows.append(row)
                size += len(row["data"])
                if size >= WRITE_BYTES:
                    self._put(rows)
                    rows, size = [], 0
            chunk.dirty.clear()
        if rows:
            self._put(rows)

    def _row(self, job: str, attempt: str, metric: str, number: int, cells: Cells) -> dict[str, Any]:
        used = np.flatnonzero((cells.view(np.uint32) != ABSENT_BITS).any(axis=1))
        return {
            "job": job,
            "attempt": attempt,
            "metric": metric,
            "chunk": number,
            "first_step": number * CHUNK_STEPS,
            "steps": int(used[-1]) + 1 if len(used) else 0,
            "ranks": cells.shape[1],
            "data": encoded(cells),
            "at_unix_ns": self._clock.unix_ns(),
        }

    def _put(self, rows: list[dict[str, Any]]) -> None:
        make = postgresql.insert if self._engine.dialect.name == "postgresql" else sqlite.insert
        statement: Any = make(SeriesChunk)
        fresh = {name: statement.excluded[name] for name in ("steps", "ranks", "data", "at_unix_ns")}
        keys = ["job", "attempt", "metric", "chunk"]
        with write(self._engine) as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=keys, set_=fresh), rows)


def trim(engine: Engine, bytes_max: int = STORED_BYTES_MAX) -> int:
    """Remove the oldest chunks until at most `bytes_max` are kept; returns how many went."""
    with read(engine) as connection:
        total = connection.scalar(select(func.sum(func.length(SeriesChunk.data)))) or 0
    gone = 0
    keys = (SeriesChunk.job, SeriesChunk.attempt, SeriesChunk.metric, SeriesChunk.chunk)
    while total > bytes_max:
        with write(engine) as connection:
            oldest = connection.execute(
                select(*keys, func.length(SeriesChunk.data)).order_by(SeriesChunk.at_unix_ns).limit(TRIM_ROWS)
            ).all()
            for *key, size in oldest:
                if total <= bytes_max:
                    break
                same = (column == value for column, value in zip(keys, key, strict=True))
                connection.execute(delete(SeriesChunk).where(*same))
                total, gone = total - size, gone + 1
    return gone
