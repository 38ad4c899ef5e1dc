"""Writes closed frames as series, beside the deciding transaction.

A crash loses nothing permanently: the replay brings the frames again, and writing one twice gives the same rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import structlog
from sqlalchemy import Engine

from rankwatch_detectors.base import Frame
from rankwatch_service.clock import Clock
from rankwatch_service.names import series_of
from rankwatch_service.series.buffer import OPEN_CHUNKS, AttemptBuffer
from rankwatch_service.series.chunks import CHUNK_STEPS
from rankwatch_service.series.retention import delete_some
from rankwatch_service.series.rows import (
    chunk_rows,
    known,
    put,
    rollup_rows,
    stored_chunk,
    stored_rollup,
)
from rankwatch_service.store.models import SeriesChunk, SeriesRollup

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
        """Take a closed frame; the same one may come again."""
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
            self._settle(job, frame.attempt, buffer)

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
                    self._settle(job, attempt, buffer)
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

    def _settle(self, job: str, attempt: str, buffer: AttemptBuffer) -> None:
        buffer.settle()
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
        self._settle(job, attempt, buffer)
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
