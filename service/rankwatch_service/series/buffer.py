"""Buffers the open chunks of one attempt and the roll-ups above them. Pure: stored chunks and rows come from callables.

Frames wait until there are enough of them, because NumPy's cost is by call. They are not copied, and must not be
written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Frame
from rankwatch_service.series.chunks import CHUNK_STEPS, Block, Cells, blank
from rankwatch_service.series.rollups import BRANCHES, LEVELS, Buckets, of_chunk

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
        """Let a frame wait; returns whether `settle` should be called now."""
        self._waiting.append(frame)
        for values in frame.values.values():
            self._waiting_bytes += 9 * len(frame.values) * len(values)
            break
        return len(self._waiting) >= WAITING_FRAMES or self._waiting_bytes >= WAITING_BYTES

    def settle(self) -> None:
        """Put the waiting frames into their chunks."""
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
    """Put values of several steps into the rows of a chunk; if a row comes twice, the later values count."""
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
