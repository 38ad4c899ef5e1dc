"""Rolls series up over more and more steps, for charts on which a pixel stands for many. Pure.

A raw chunk becomes one bucket of level 1; BRANCHES buckets of a level are a row of the table, and that row becomes one
bucket of the next level. A bucket keeps each rank's lowest and highest finite value and the worst that occurred
(`ValueMark`), and for lines over all ranks (`LINES`) their lowest and highest point. So no extreme and no NaN is lost,
and joined buckets equal the bucket of all their steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray

from rankwatch_service.series.chunks import (
    ABSENT_BITS,
    CHUNK_STEPS,
    Block,
    absent,
    by_resolution,
    decoded,
    encoded,
    metrics_together,
)

BRANCHES: Final = 8
LEVELS: Final = 4
"""Buckets of 64, 512, 4,096 and 32,768 steps: 300 columns of the last level are 10 million steps."""

LINES: Final = ("mean", "min", "p5", "p50", "p95", "max")
_SHARES: Final = (0.0, 0.05, 0.5, 0.95, 1.0)  # of all lines but the mean

MARKS_HELD: Final = 16
"""Values of the column `mark` that are cached, packed and unpacked: a few bytes and up to 1 MB each. Nearly all rows of
a chart have the same value, which says that everything was measured."""

_BY_RANK: Final = 3  # the first parts of a bucket are by rank, the others by line
_JOINS: Final = (np.fmin, np.fmax, np.maximum)

Single = NDArray[np.float32]
Marks = NDArray[np.uint8]


class ValueMark(IntEnum):
    """What occurred in a bucket of values; the highest mark that occurs counts."""

    ABSENT = 0
    FINITE = 1
    NEGATIVE_INF = 2
    POSITIVE_INF = 3
    NAN = 4


def bucket_steps(level: int) -> int:
    """Steps in one bucket of a level; level 0 is the raw tier."""
    return int(CHUNK_STEPS * BRANCHES ** (level - 1)) if level else 1


def chunk_steps(level: int) -> int:
    """Steps in one row of the table of a level."""
    return int(CHUNK_STEPS * BRANCHES**level)


@dataclass(slots=True)
class Buckets:
    """Consecutive buckets of some metrics. `low` and `high` are NaN if no finite value occurred."""

    low: Single
    """[metric, bucket, rank], as `high` and `mark`."""
    high: Single
    mark: Marks
    lines_low: Single
    """[metric, bucket, line], as `lines_high` and `lines_mark`; lines are those of `LINES`."""
    lines_high: Single
    lines_mark: Marks

    @classmethod
    def blank(cls, metrics: int, buckets: int, ranks: int) -> Buckets:
        """Buckets in which nothing is measured."""
        cells, lines = (metrics, buckets, ranks), (metrics, buckets, len(LINES))
        return cls(
            np.full(cells, np.nan, np.float32),
            np.full(cells, np.nan, np.float32),
            np.zeros(cells, np.uint8),
            np.full(lines, np.nan, np.float32),
            np.full(lines, np.nan, np.float32),
            np.zeros(lines, np.uint8),
        )

    @property
    def metrics(self) -> int:
        """Number of metrics."""
        return len(self.low)

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return int(self.low.shape[2])

    def of(self, metrics: NDArray[np.intp]) -> Buckets:
        """The buckets of the metrics with these indices."""
        return Buckets(*(part[metrics] for part in self._parts()))

    def arranged(self, places: list[int], metrics: int) -> Buckets:
        """The same buckets among `metrics` metrics: the i-th metric moves to `places[i]`, and the others are blank."""
        found = Buckets.blank(metrics, self.low.shape[1], self.ranks)
        for mine, theirs in zip(found._parts(), self._parts(), strict=True):
            mine[places] = theirs
        return found

    def grown(self, metrics: int, ranks: int) -> Buckets:
        """The same buckets with room for at least this many metrics and ranks."""
        if metrics <= self.metrics and ranks <= self.ranks:
            return self
        wide = Buckets.blank(max(metrics, self.metrics), self.low.shape[1], max(ranks, self.ranks))
        wide.put(self, slice(None))
        return wide

    def put(self, other: Buckets, at: slice, join: bool = False) -> None:
        """Merge other buckets into these.

        Args:
            other: the buckets, of no more metrics and ranks than these.
            at: the indices of buckets to fill, as many as `other` has.
            join: whether to join them with what is there, because `other` does not have all that was put there before.
        """
        metrics, ranks = slice(other.metrics), slice(other.ranks)
        for number, (old, new) in enumerate(zip(self._parts(), other._parts(), strict=True)):
            place = old[metrics, at, ranks] if number < _BY_RANK else old[metrics, at]
            place[...] = _JOINS[number % _BY_RANK](place, new) if join else new

    def joined(self) -> Buckets:
        """All buckets as one."""
        parts = enumerate(self._parts())
        return Buckets(*(_JOINS[number % _BY_RANK].reduce(part, axis=1, keepdims=True) for number, part in parts))

    def _parts(self) -> tuple[NDArray[Any], ...]:
        return self.low, self.high, self.mark, self.lines_low, self.lines_high, self.lines_mark


def of_chunk(block: Block) -> Buckets:
    """The bucket of level 1 of a raw chunk."""
    size = metrics_together(block)
    found = [_of_chunk(block[first : first + size]) for first in range(0, len(block), size)]
    parts = zip(*(one._parts() for one in found), strict=True)
    return found[0] if len(found) == 1 else Buckets(*map(np.concatenate, parts))


def _of_chunk(block: Block) -> Buckets:
    low, high, mark = extremes(block)
    drawn_low, drawn_high, drawn_mark = extremes(lines(block))
    return Buckets(
        low[:, None], high[:, None], mark[:, None], drawn_low[:, None], drawn_high[:, None], drawn_mark[:, None]
    )


def extremes(cells: NDArray[np.float32]) -> tuple[Single, Single, Marks]:
    """Lowest and highest finite value (NaN if there is none) and worst mark, over the last axis but one (steps)."""
    if np.isfinite(cells).all():
        ones = np.ones((*cells.shape[:-2], cells.shape[-1]), np.uint8)
        return cells.min(axis=-2), cells.max(axis=-2), ones
    finite = np.isfinite(cells)
    mark = marks(cells).max(axis=-2)
    low = np.where(finite, cells, np.float32(np.inf)).min(axis=-2)
    high = np.where(finite, cells, np.float32(-np.inf)).max(axis=-2)
    none = ~finite.any(axis=-2)
    low[none] = high[none] = np.nan
    return low, high, mark


def marks(cells: NDArray[np.float32]) -> Marks:
    """`ValueMark` of each cell."""
    found = np.full(cells.shape, ValueMark.FINITE, np.uint8)
    found[cells == -np.inf] = ValueMark.NEGATIVE_INF
    found[cells == np.inf] = ValueMark.POSITIVE_INF
    found[np.isnan(cells)] = ValueMark.NAN
    found[absent(cells)] = ValueMark.ABSENT
    return found


def lines(block: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., step, line]: each step's `LINES` over its measured ranks; absent if no rank is.

    A NaN of any rank makes all lines of its step NaN.
    """
    missing = absent(block)
    holes = bool(missing.any())
    count = np.count_nonzero(~missing, axis=-1) if holes else np.full(block.shape[:-1], block.shape[-1])
    # Absent values sort after all others but NaN, so that the k-th value of a step is the k-th measured one.
    held = np.sort(np.where(missing, np.float32(np.inf), block) if holes else block, axis=-1)
    at = np.rint(np.array(_SHARES) * np.maximum(count - 1, 0)[..., None]).astype(np.intp)
    found = np.empty((*block.shape[:-1], len(LINES)), np.float32)
    found[..., 1:] = np.take_along_axis(held, at, axis=-1)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.where(missing, np.float32(0), block).sum(axis=-1, dtype=np.float64)
        found[..., 0] = total / np.maximum(count, 1)
    found[np.isnan(held[..., -1])] = np.nan
    found.view(np.uint32)[count == 0] = ABSENT_BITS
    return found


def packed(buckets: Buckets, metrics: list[str]) -> list[dict[str, bytes]]:
    """Encode the columns low, high, mark and lines of each metric's row."""
    rows: list[dict[str, bytes]] = [{} for _ in metrics]
    compressor = zstandard.ZstdCompressor(level=1)
    for times, chosen in by_resolution(metrics):
        if chosen:
            for name, cells in (("low", buckets.low[chosen]), ("high", buckets.high[chosen])):
                cells.view(np.uint32)[np.isnan(cells)] = ABSENT_BITS
                for index, data in zip(chosen, encoded(cells, times), strict=True):
                    rows[index][name] = data
    for index, row in enumerate(rows):
        row["mark"] = compressor.compress(buckets.mark[index].tobytes())
        low, high, mark = buckets.lines_low[index], buckets.lines_high[index], buckets.lines_mark[index]
        row["lines"] = compressor.compress(low.tobytes() + high.tobytes() + mark.tobytes())
    return rows


def unpacked(rows: list[tuple[bytes, bytes, bytes, bytes]]) -> Buckets:
    """Decode rows (low, high, mark, lines), one for each metric, into buckets with the ranks of the widest row."""
    ranks = max(len(unpacked_mark(mark)[0]) for _, _, mark, _ in rows)
    found = Buckets.blank(len(rows), BRANCHES, ranks)
    for index, (low, high, mark, drawn) in enumerate(rows):
        worst = unpacked_mark(mark)
        held = slice(worst.shape[1])
        found.low[index, :, held], found.high[index, :, held] = decoded(low), decoded(high)
        found.mark[index, :, held] = worst
        found.lines_low[index], found.lines_high[index], found.lines_mark[index] = unpacked_lines(drawn)
    return found


@lru_cache(MARKS_HELD)
def unpacked_mark(data: bytes) -> Marks:
    """[bucket, rank]: the column mark. Cached: do not write to it."""
    raw = zstandard.ZstdDecompressor().decompress(data)
    return np.frombuffer(raw, np.uint8).reshape(BRANCHES, -1)


def unpacked_lines(data: bytes) -> tuple[Single, Single, Marks]:
    """Low, high and mark of the column lines, each [bucket, line]."""
    raw, shape = zstandard.ZstdDecompressor().decompress(data), (BRANCHES, len(LINES))
    cells = BRANCHES * len(LINES)
    low, high = (np.frombuffer(raw, np.float32, cells, at).reshape(shape) for at in (0, 4 * cells))
    return low, high, np.frombuffer(raw, np.uint8, cells, 8 * cells).reshape(shape)
