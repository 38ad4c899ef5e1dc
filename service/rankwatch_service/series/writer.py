"""Writes closed frames as series, beside the deciding transaction.

Frames wait until there are enough of them, because NumPy's cost is by call. They are not copied, and must not be
written to.

A crash loses nothing permanently: the replay brings the frames again, and writing one twice gives the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
import structlog
from sqlalchemy import Engine

from rankwatch_detectors.base import Bools, Floats, Frame
from rankwatch_service.clock import Clock
from rankwatch_service.names import series_of
from rankwatch_service.series.chunks import CHUNK_STEPS, Block, Cells, blank
from rankwatch_service.series.rollups import BRANCHES, LEVELS, Buckets, of_chunk
from rankwatch_service.series.rows import chunk_rows, delete_some, known, put, rollup_rows, stored_chunk, stored_rollup
from rankwatch_service.store.models import SeriesChunk, SeriesRollup


class SeriesSink(Protocol):
    """Takes the closed frames of all jobs, for charts."""

    def add(self, job: str, frame: Frame) -> None:
        """Add a frame. The same frame may come again after a restart, and gives the same rows."""
        ...

    def flush(self, job: str) -> None:
        """Write what is buffered for a job."""
        ...

    def delete(self, job: str) -> None:
        """Drop what is buffered for a job, and remove what is stored."""
        ...

    def close(self, job: str) -> None:
        """Write what is buffered for a job that is idle, and drop it."""
        ...

    def flush_due(self) -> None:
        """Write what has been buffered for long enough."""
        ...


OPEN_CHUNKS: Final = 2
"""Chunks of an attempt that are open at a time, since late records lag behind the newest; older chunks are written."""

WAITING_FRAMES: Final = 64
WAITING_BYTES: Final = 4 * 1024 * 1024
"""Frames that wait at most; the first limit that is reached counts."""

Stored = Callable[[int], dict[str, Cells]]
"""(chunk number) -> what an earlier process has stored of the chunk, by metric."""
StoredRow = Callable[[Sequence[str], int, int], tuple[list[str], Buckets] | None]
"""(metrics, level, row number) -> those of the metrics that have a stored row, and their buckets; None: none has."""


@dataclass(slots=True)
class Chunk:
    """An open raw chunk, with the metrics of its attempt in their order."""

    cells: Block
    dirty: set[int] = field(default_factory=set)
    """Indices of metrics whose cells are not stored yet."""
    summed: bool = False
    """Whether the roll-ups have it as it is."""
    partial: bool = False
    """Whether it was stored before and has been removed since: then its bucket was made of more than it has."""


@dataclass(slots=True)
class Row:
    """A row of roll-ups, with the metrics of its attempt in their order."""

    buckets: Buckets
    dirty: bool = False
    """Whether it is not stored yet."""


class AttemptBuffer:
    """One attempt's open chunks and roll-ups.

    Args:
        metrics: names that an earlier process has stored.
        newest_stored: number of the newest stored chunk; -1: none.
        stored: reads a chunk.
        stored_row: reads a row of roll-ups.
    """

    def __init__(self, metrics: Sequence[str], newest_stored: int, stored: Stored, stored_row: StoredRow) -> None:
        self.metrics = list(metrics)
        self.chunks: dict[int, Chunk] = {}
        self.rows: dict[tuple[int, int], Row] = {}
        """By level and number."""
        self._newest = newest_stored
        self._stored = stored
        self._stored_row = stored_row
        self._index = {name: index for index, name in enumerate(metrics)}
        self._waiting: list[Frame] = []
        self._waiting_bytes = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of the open chunks."""
        return sum(chunk.cells.nbytes for chunk in self.chunks.values())

    @property
    def dirty(self) -> bool:
        """Whether something is not stored yet."""
        return bool(self._waiting) or any(chunk.dirty or not chunk.summed for chunk in self.chunks.values())

    def add(self, frame: Frame) -> bool:
        """Buffer a frame; return whether `flush` should be called now."""
        self._waiting.append(frame)
        for values in frame.values.values():
            self._waiting_bytes += 9 * len(frame.values) * len(values)
            break
        return len(self._waiting) >= WAITING_FRAMES or self._waiting_bytes >= WAITING_BYTES

    def flush(self) -> None:
        """Write the buffered frames into their chunks."""
        by_chunk: dict[int, list[Frame]] = {}
        for frame in self._waiting:
            by_chunk.setdefault(frame.step // CHUNK_STEPS, []).append(frame)
        self._waiting, self._waiting_bytes = [], 0
        for number, frames in by_chunk.items():
            self._fill(self.chunk(number), frames)

    def full(self) -> list[int]:
        """Numbers of the chunks beyond `OPEN_CHUNKS`, oldest first: write them and `let_go`."""
        return sorted(self.chunks)[: max(len(self.chunks) - OPEN_CHUNKS, 0)]

    def let_go(self, number: int) -> None:
        """Drop a chunk that is stored."""
        del self.chunks[number]
        self._newest = max(self._newest, number)

    def sum_up_chunk(self, number: int) -> None:
        """Update the bucket of level 1 from an open chunk."""
        chunk = self.chunks[number]
        if not chunk.summed:
            self._put(1, number, of_chunk(chunk.cells), join=chunk.partial)
            chunk.summed = True

    def sum_up_rows(self) -> None:
        """Update the upper levels from level 1, one level after the other."""
        for level in range(1, LEVELS):
            for (of_level, number), row in list(self.rows.items()):
                if of_level == level and row.dirty:
                    self._put(level + 1, number, row.buckets.joined())

    def let_rows_go(self) -> None:
        """Drop the rows, all of which are stored, except for the newest of each level, which is still being filled."""
        newest = dict(sorted(self.rows))  # level -> highest number, since later pairs replace earlier ones
        for (level, number), row in list(self.rows.items()):
            row.dirty = False
            if number < newest[level]:
                del self.rows[level, number]

    # ---- raw -------------------------------------------------------------------------------------------------------

    def chunk(self, number: int) -> Chunk:
        """The chunk of this number; opened, with what is stored of it, if it is not open."""
        chunk = self.chunks.get(number)
        if chunk is None:
            stored = self._stored(number) if number <= self._newest else {}
            for name in stored:
                self._metric(name)
            ranks = max((cells.shape[1] for cells in stored.values()), default=1)
            chunk = self.chunks[number] = Chunk(blank(len(self.metrics), CHUNK_STEPS, ranks))
            chunk.partial = number <= self._newest and not stored
            for name, cells in stored.items():
                chunk.cells[self._index[name], : len(cells), : cells.shape[1]] = cells
        return chunk

    def _metric(self, name: str) -> int:
        index = self._index.get(name)
        if index is None:
            index = self._index[name] = len(self.metrics)
            self.metrics.append(name)
        return index

    def _fill(self, chunk: Chunk, frames: Sequence[Frame]) -> None:
        columns: dict[str, tuple[list[int], list[Floats], list[Bools]]] = {}
        for frame in frames:
            row, present = frame.step % CHUNK_STEPS, frame.present
            for name, values in frame.values.items():
                column = columns.get(name)
                if column is None:
                    column = columns[name] = ([], [], [])
                column[0].append(row)
                column[1].append(values)
                column[2].append(present[name])
        if not columns:
            return
        widest = max(max(map(len, values)) for _, values, _ in columns.values())
        chosen = [self._metric(name) for name in columns]
        self._grow(chunk, widest)
        for index, column in zip(chosen, columns.values(), strict=True):
            _put_cells(chunk.cells[index], *column)
        chunk.dirty.update(chosen)
        chunk.summed = False

    def _grow(self, chunk: Chunk, ranks: int) -> None:
        metrics, steps, held = chunk.cells.shape
        if metrics < len(self.metrics) or held < ranks:
            wide = blank(len(self.metrics), steps, max(ranks, held))
            wide[:metrics, :, :held] = chunk.cells
            chunk.cells = wide

    # ---- roll-ups --------------------------------------------------------------------------------------------------

    def _put(self, level: int, child: int, bucket: Buckets, join: bool = False) -> None:
        number, place = divmod(child, BRANCHES)
        row = self.rows.get((level, number))
        if row is None:
            row = self.rows[level, number] = Row(self._row(level, number))
        row.buckets = row.buckets.grown(bucket.metrics, bucket.ranks)
        row.buckets.put(bucket, slice(place, place + 1), join)
        row.dirty = True

    def _row(self, level: int, number: int) -> Buckets:
        known = self._newest >= 0 and number <= self._newest // BRANCHES**level
        stored = self._stored_row(self.metrics, level, number) if known else None
        if stored is None:
            return Buckets.blank(len(self.metrics), BRANCHES, 1)
        names, buckets = stored
        places = [self._metric(name) for name in names]
        return buckets.arranged(places, len(self.metrics))


def _put_cells(cells: Cells, rows: list[int], values: list[Floats], present: list[Bools]) -> None:
    """Write values of several steps into the rows of a chunk; if a row comes twice, the later values count."""
    ranks = len(values[0])
    if len(rows) > 1 and (len(set(rows)) < len(rows) or any(len(one) != ranks for one in values)):
        for row, one, here in zip(rows, values, present, strict=True):
            _put_cells(cells, [row], [one], [here])
        return
    # A value beyond float32 is infinite on a chart. NaN loses its payload, so that no measured NaN looks absent.
    with np.errstate(over="ignore"):
        narrow = np.concatenate(values, dtype=np.float32, casting="same_kind").reshape(len(rows), ranks)
    bad = np.isnan(narrow)
    if bad.any():
        narrow[bad] = np.nan
    here = np.concatenate(present).reshape(narrow.shape)
    everywhere = bool(here.all())
    if rows[-1] - rows[0] == len(rows) - 1 and rows == sorted(rows):
        place = cells[rows[0] : rows[-1] + 1, :ranks]
        if everywhere:
            place[...] = narrow
        else:
            np.copyto(place, narrow, where=here)
    else:
        old = cells[rows, :ranks]
        cells[rows, :ranks] = np.where(here, narrow, old)


FLUSH_S: Final = 1.0
FLUSH_BYTES_PER_S: Final = 4 * 1024 * 1024
"""Unfinished chunks are written every FLUSH_S, or less often if that would be more than FLUSH_BYTES_PER_S: 64 ranks x
20 metrics are 0.3 MB; 16,384 ranks are 84 MB, every 20 s."""

SUM_UP_S: Final = 10.0
SUM_UP_CHUNKS: Final = 4
"""Roll-ups are written this often, or after this many finished chunks of a job. Until then charts use the raw chunks
for what roll-ups lack."""

ATTEMPTS_OPEN: Final = 1
"""Attempts of a job that are open at a time; older ones are written and dropped: they get no more frames."""

DEVICE_BYTES_MAX: Final = 512 * 1024 * 1024
"""Open chunks of the devices of all jobs: those of 65,536 devices with 16 counters. Further jobs' devices are not
charted as long as these are."""

_log = structlog.get_logger(__name__)


class SeriesWriter:
    """Collects frames by job and writes them. Not thread-safe. `add` reads what is stored of a chunk or attempt that it
    opens, and writes chunks that are full.
    """

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self._engine = engine
        self._clock = clock
        self._open: dict[str, dict[str, AttemptBuffer]] = {}
        self._finished: dict[str, int] = {}
        """Chunks finished since the job's roll-ups were written."""
        self._flushed_s: dict[str, float] = {}
        self._summed_s: dict[str, float] = {}
        self._device_bytes: dict[str, int] = {}
        """Of the open chunks of each job's devices, when they are full."""

    def add(self, job: str, frame: Frame) -> None:
        """Add a closed frame; the same one may come again."""
        if frame.family == "devices" and not self._fits(job, frame):
            return
        attempts = self._open.get(job)
        if attempts is None:
            attempts = self._open[job] = {}
        buffer = attempts.get(frame.attempt)
        if buffer is None:
            buffer = attempts[frame.attempt] = self._buffer(job, frame.attempt)
            for name in list(attempts)[: len(attempts) - ATTEMPTS_OPEN]:
                self._flush(job, name, attempts[name])
                del attempts[name]
        if buffer.add(frame):
            self._write_full(job, frame.attempt, buffer)

    def flush(self, job: str) -> None:
        """Write everything that is buffered for a job and its devices, with the roll-ups."""
        for name in series_of(job):
            self._flush_all(name)

    def delete(self, job: str) -> None:
        """Drop what is buffered for a job and its devices, and remove what is stored."""
        for name in series_of(job):
            self._drop(name)
            while delete_some(self._engine, name):
                pass

    def close(self, job: str) -> None:
        """Write everything that is buffered for a job and its devices, and drop it."""
        self.flush(job)
        for name in series_of(job):
            self._drop(name)

    def flush_due(self) -> None:
        """Write the jobs that are due: unfinished chunks, and roll-ups less often."""
        now_s = self._clock.monotonic_s()
        held = sum(buffer.size_bytes for attempts in self._open.values() for buffer in attempts.values())
        wait_s = max(FLUSH_S, held / FLUSH_BYTES_PER_S)
        for job, attempts in self._open.items():
            if not any(buffer.dirty for buffer in attempts.values()):
                continue
            if now_s - self._summed_s.setdefault(job, now_s) >= max(SUM_UP_S, wait_s):
                self._flush_all(job)
            elif now_s - self._flushed_s.get(job, -wait_s) >= wait_s:
                self._flushed_s[job] = now_s
                for attempt, buffer in attempts.items():
                    self._write_full(job, attempt, buffer)
                    self._write_chunks(job, attempt, buffer, list(buffer.chunks))

    def _fits(self, job: str, frame: Frame) -> bool:
        """Whether there is room for the open chunks of a job's devices."""
        width = max(map(len, frame.values.values()), default=0)
        size = len(frame.values) * width * CHUNK_STEPS * OPEN_CHUNKS * 4
        before = self._device_bytes.get(job, 0)
        if size > before and sum(self._device_bytes.values()) - before + size > DEVICE_BYTES_MAX:
            _log.warning("devices_not_charted", series=job, bytes=size, limit=DEVICE_BYTES_MAX)
            return False
        self._device_bytes[job] = max(size, before)
        return True

    def _flush_all(self, job: str) -> None:
        self._flushed_s[job] = self._summed_s[job] = self._clock.monotonic_s()
        self._finished[job] = 0
        for attempt, buffer in self._open.get(job, {}).items():
            self._flush(job, attempt, buffer)

    def _drop(self, job: str) -> None:
        for held in (self._open, self._finished, self._flushed_s, self._summed_s, self._device_bytes):
            held.pop(job, None)

    def _buffer(self, job: str, attempt: str) -> AttemptBuffer:
        metrics, newest = known(self._engine, job, attempt)
        stored = partial(stored_chunk, self._engine, job, attempt)
        return AttemptBuffer(metrics, newest, stored, partial(stored_rollup, self._engine, job, attempt))

    def _write_full(self, job: str, attempt: str, buffer: AttemptBuffer) -> None:
        buffer.flush()
        full = buffer.full()
        if not full:
            return
        self._write_chunks(job, attempt, buffer, full)
        for number in full:
            buffer.sum_up_chunk(number)
            buffer.let_go(number)
        self._finished[job] = self._finished.get(job, 0) + len(full)
        if self._finished[job] >= SUM_UP_CHUNKS:
            self._finished[job] = 0
            self._write_rollups(job, attempt, buffer)

    def _flush(self, job: str, attempt: str, buffer: AttemptBuffer) -> None:
        self._write_full(job, attempt, buffer)
        # Raw chunks before roll-ups: a raw chunk that is newer than the roll-ups counts as missing in them (`read`).
        self._write_chunks(job, attempt, buffer, list(buffer.chunks))
        for number in buffer.chunks:
            buffer.sum_up_chunk(number)
        self._write_rollups(job, attempt, buffer)

    def _write_chunks(self, job: str, attempt: str, buffer: AttemptBuffer, numbers: list[int]) -> None:
        now, rows = self._clock.unix_ns(), list[dict[str, Any]]()
        for number in numbers:
            chunk = buffer.chunks[number]
            chosen = sorted(chunk.dirty)
            if chosen:
                metrics = [buffer.metrics[index] for index in chosen]
                cells = chunk.cells if len(chosen) == len(chunk.cells) else chunk.cells[chosen]
                rows += chunk_rows(job, attempt, metrics, number, cells, now)
        put(self._engine, SeriesChunk, rows)
        for number in numbers:
            buffer.chunks[number].dirty.clear()

    def _write_rollups(self, job: str, attempt: str, buffer: AttemptBuffer) -> None:
        now, rows = self._clock.unix_ns(), list[dict[str, Any]]()
        buffer.sum_up_rows()
        for (level, number), row in buffer.rows.items():
            if row.dirty:
                rows += rollup_rows(job, attempt, buffer.metrics, level, number, row.buckets, now)
        put(self._engine, SeriesRollup, rows)
        buffer.let_rows_go()
