"""Queries series for charts: never more points than pixels, and no extreme or NaN is lost by that."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any, Final

import numpy as np
import zstandard
from numpy.typing import NDArray
from sqlalchemy import Engine, select

from rankwatch_detectors.base import Ints
from rankwatch_service.series.chunks import ABSENT_BITS, CHUNK_STEPS, absent, blank, decoded
from rankwatch_service.series.read import Range, Reader, SeriesSlice
from rankwatch_service.series.rollups import (
    LINES,
    Marks,
    Single,
    ValueMark,
    bucket_steps,
    extremes,
    lines,
    marks,
    unpacked_lines,
    unpacked_mark,
)
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import SeriesChunk, SeriesRollup

POINTS_MAX: Final = 4_000
"""Points of one line: as many as the widest screens have pixels."""

LINE_CELLS_MAX: Final = 2_000_000
MAP_CELLS_MAX: Final = 6_000_000
"""Values that a line or a heat map is made of, which takes 50 ms. For more steps or ranks a coarser level is read."""

RANKS_MAX: Final = 64
"""Lines of single ranks in one answer. A fan or a heat map shows more."""

STEP_MAX: Final = 2**53


class Reduce(StrEnum):
    """How the ranks of one step become lines."""

    NONE = "none"
    """One line for each rank asked for."""
    MEAN = "mean"
    MEDIAN = "median"
    MIN = "min"
    MAX = "max"
    FAN = "fan"
    """Four lines: p5, p50, p95, max."""


class Side(StrEnum):
    """Which extreme a cell of a heat map shows."""

    LOW = "low"
    HIGH = "high"


_DRAWN: Final[dict[Reduce, tuple[tuple[str, str], ...]]] = {
    Reduce.MEAN: (("mean", "mean"),),
    Reduce.MEDIAN: (("median", "p50"),),
    Reduce.MIN: (("min", "min"),),
    Reduce.MAX: (("max", "max"),),
    Reduce.FAN: (("p5", "p5"), ("p50", "p50"), ("p95", "p95"), ("max", "max")),
}
"""(name of a line, its name in `LINES`)"""


@dataclass(frozen=True, slots=True)
class SeriesLine:
    """Values at the points of its segment: the lowest and highest finite one; NaN if a point has none."""

    name: str
    low: Single
    high: Single
    mark: Marks
    """`ValueMark` of each point: the worst that occurred."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One attempt's part of a series. `step` has the first step of each point; points without values are left out."""

    attempt: str
    step: Ints
    lines: list[SeriesLine]
    missing: Ints
    """First steps of gaps, at which a value was due; at most one within each point."""


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric over ranks and steps. If attempts repeated a step, the newest counts."""

    step: Ints
    """First step of each column."""
    rank: Ints
    """First rank of each row, which ends where the next one begins; the last row ends at `ranks`."""
    ranks: int
    value: Single
    """[row, column]: the highest or lowest finite value; NaN if there is none."""
    mark: Marks
    """[row, column]: `ValueMark`, the worst that occurred."""


@dataclass(frozen=True, slots=True)
class _Points:
    """Consecutive points of one attempt; points with equal steps belong together."""

    attempt: str
    step: Ints
    """[point]"""
    low: Single
    """[point, line or rank], as `high` and `mark`; low or high is empty if it was not asked for."""
    high: Single
    mark: Marks
    width: int = 1
    """Steps of a point."""

    def chosen(self, at: NDArray[np.bool_]) -> _Points:
        """The points for which `at` is true."""
        low, high = (ends[at] if len(ends) else ends for ends in (self.low, self.high))
        return _Points(self.attempt, self.step[at], low, high, self.mark[at], self.width)


def metrics(engine: Engine, job: str) -> list[str]:
    """Names of the metrics that a job has, sorted."""
    with read(engine) as connection:
        found = set[str]()
        for column, of_job in ((SeriesChunk.metric, SeriesChunk.job), (SeriesRollup.metric, SeriesRollup.job)):
            # From one name to the next by the index, instead of DISTINCT: a job has many chunks and few metrics.
            name: str | None = ""
            while name is not None:
                following = select(column).where(of_job == job, column > name).order_by(column).limit(1)
                name = connection.scalar(following)
                found |= {name} if name is not None else set()
        return sorted(found)


def series(
    engine: Engine,
    job: str,
    metric: str,
    from_step: int = 0,
    to_step: int | None = None,
    ranks: Sequence[int] = (),
    reduce: Reduce = Reduce.MEAN,
    points: int = 1_000,
) -> list[Segment]:
    """A metric over steps, one segment for each attempt, in the order of attempts.

    Over a long range, lines over chosen ranks are bands: from the reduction of the ranks' lowest values in a point to
    the reduction of their highest ones.

    Args:
        engine: the store.
        job: its name.
        metric: its name.
        from_step: first step.
        to_step: last step; None: the newest.
        ranks: only these, at most RANKS_MAX for `NONE`; empty: all.
        reduce: how ranks become lines.
        points: points of each line at most, all segments together.
    """
    wanted = Range(job, metric, max(from_step, 0), STEP_MAX if to_step is None else to_step)
    by_rank = reduce is Reduce.NONE or len(ranks) > 0
    columns = [SeriesRollup.low, SeriesRollup.high, SeriesRollup.mark] if by_rank else [SeriesRollup.lines]
    with read(engine) as connection:
        reader = Reader(connection, wanted)
        level = reader.level(points, LINE_CELLS_MAX)
        parts = reader.parts(level, columns)
    names = [name for name, _ in _DRAWN.get(reduce, ())]
    drawn = [LINES.index(of) for _, of in _DRAWN.get(reduce, ())]
    decompressor = zstandard.ZstdDecompressor()
    found: dict[str, list[_Points]] = {}
    for part in parts:
        if by_rank:
            every = _ranks_of(part, level, decompressor)
            chosen = _chosen(every.low.shape[1], ranks, reduce)
            one = _of_ranks(every, chosen, drawn)
            names = [f"rank:{rank}" for rank in chosen] if reduce is Reduce.NONE else names
        else:
            one = _drawn_of(part, level, drawn)
        measured = (one.step >= 0) & (one.mark != ValueMark.ABSENT).any(axis=1)
        if measured.any():
            found.setdefault(part.attempt, []).append(one.chosen(measured))
    return _segments(found, names, points)


def heat_map(
    engine: Engine,
    job: str,
    metric: str,
    columns: int = 300,
    rows: int = 1_024,
    from_step: int = 0,
    to_step: int | None = None,
    side: Side = Side.HIGH,
) -> HeatMap:
    """A metric over all ranks and steps, in at most `columns` columns of steps and `rows` rows of ranks.

    Args:
        engine: the store.
        job: its name.
        metric: its name.
        columns: columns at most.
        rows: rows at most; beyond it, neighbouring ranks share a row.
        from_step: first step.
        to_step: last step; None: the newest.
        side: which extreme a cell shows.
    """
    wanted = Range(job, metric, max(from_step, 0), STEP_MAX if to_step is None else to_step)
    with read(engine) as connection:
        reader = Reader(connection, wanted)
        level = reader.level(columns, MAP_CELLS_MAX)
        parts = reader.parts(level, [getattr(SeriesRollup, side), SeriesRollup.mark])
    decompressor = zstandard.ZstdDecompressor()
    found = _newest_only([_ranks_of(part, level, decompressor, side) for part in parts], reader, level)
    if not found:
        none = np.zeros(0, dtype=np.int64)
        return HeatMap(none, none, 0, np.zeros((0, 0), np.float32), np.zeros((0, 0), np.uint8))
    width = max(one.mark.shape[1] for one in found)
    per_row = -(-width // max(rows, 1))
    ranks = np.arange(0, width, per_row)
    join = np.fmax if side is Side.HIGH else np.fmin
    step = np.concatenate([one.step for one in found])
    value = _stacked([one.high if side is Side.HIGH else one.low for one in found], width, np.float32(np.nan))
    mark = _stacked([one.mark for one in found], width, np.uint8(ValueMark.ABSENT))
    step, starts, value, mark = _grouped(step, columns, value, mark)
    value, mark = _joined(join, value, starts).T, _joined(np.maximum, mark, starts).T
    if per_row > 1:
        value, mark = _joined(join, value, ranks), _joined(np.maximum, mark, ranks)
    return HeatMap(step[starts], ranks, width, value, mark)


# ---- points of a part ----------------------------------------------------------------------------------------------


def _ranks_of(
    part: SeriesSlice, level: int, decompressor: zstandard.ZstdDecompressor, side: Side | None = None
) -> _Points:
    """The points of a slice by rank; with a side, only that extreme is decoded."""
    if part.cells is not None:
        return _measured(part, part.cells, level)
    row, inside = part.row, part.step >= 0
    assert row is not None
    low, high = (
        decoded(getattr(row, end), decompressor)[inside] if side in (None, end) else np.zeros((0, 0), np.float32)
        for end in Side
    )
    return _Points(part.attempt, part.step[inside], low, high, unpacked_mark(row.mark)[inside], _width(level))


def _width(level: int) -> int:
    """Steps of a bucket that is read for a level: level 1 replaces raw chunks that were removed."""
    return bucket_steps(max(level, 1))


def _measured(part: SeriesSlice, cells: Single, level: int) -> _Points:
    """Raw cells, [step, rank or line], as points of a level."""
    if level:
        low, high, mark = extremes(cells)
        width = bucket_steps(level)
        return _Points(part.attempt, part.step[:1] // width * width, low[None], high[None], mark[None], width)
    mark = marks(cells)
    bounded = np.where(mark == ValueMark.FINITE, cells, np.float32(np.nan))
    return _Points(part.attempt, part.step, bounded, bounded, mark)


def _of_ranks(points: _Points, chosen: list[int], drawn: list[int]) -> _Points:
    """Points of the chosen ranks; if lines are `drawn`, of those lines over them."""
    low, high, mark = points.low[:, chosen], points.high[:, chosen], points.mark[:, chosen]
    if not drawn:
        return _Points(points.attempt, points.step, low, high, mark, points.width)
    worst = mark.max(axis=1, initial=ValueMark.ABSENT)[:, None].repeat(len(drawn), axis=1)
    low, high = _lines_of(low)[:, drawn], _lines_of(high)[:, drawn]
    return _Points(points.attempt, points.step, low, high, worst, points.width)


def _lines_of(ends: Single) -> Single:
    """`lines` over the finite values; NaN, which stands for no finite value, counts as not measured."""
    held = np.ascontiguousarray(ends)
    held.view(np.uint32)[np.isnan(held)] = ABSENT_BITS
    return lines(held) if held.shape[1] else blank(len(held), len(LINES))


def _drawn_of(part: SeriesSlice, level: int, drawn: list[int]) -> _Points:
    """The points of a slice for lines over all ranks."""
    if part.cells is not None:
        return _measured(part, lines(part.cells)[:, drawn], level)
    assert part.row is not None
    inside = part.step >= 0
    low, high, mark = unpacked_lines(part.row.lines)
    low, high, mark = low[:, drawn], high[:, drawn], mark[:, drawn]
    return _Points(part.attempt, part.step[inside], low[inside], high[inside], mark[inside], _width(level))


def _chosen(held: int, ranks: Sequence[int], reduce: Reduce) -> list[int]:
    chosen = [rank for rank in ranks if 0 <= rank < held] if len(ranks) else list(range(held))
    return chosen[:RANKS_MAX] if reduce is Reduce.NONE else chosen


# ---- points together -----------------------------------------------------------------------------------------------


def _segments(found: dict[str, list[_Points]], names: list[str], points: int) -> list[Segment]:
    counts = {attempt: len(np.unique(np.concatenate([one.step for one in parts]))) for attempt, parts in found.items()}
    total = sum(counts.values())
    share = min(1.0, min(points, POINTS_MAX) / max(total, 1))
    segments = []
    for attempt, parts in found.items():
        width = max(one.mark.shape[1] for one in parts)
        step = np.concatenate([one.step for one in parts])
        end = np.concatenate([one.step + one.width for one in parts])
        low = _stacked([one.low for one in parts], width, np.float32(np.nan))
        high = _stacked([one.high for one in parts], width, np.float32(np.nan))
        mark = _stacked([one.mark for one in parts], width, np.uint8(ValueMark.ABSENT))
        step, starts, end, low, high, mark = _grouped(step, int(counts[attempt] * share), end, low, high, mark)
        low, high = _joined(np.fmin, low, starts), _joined(np.fmax, high, starts)
        mark = _joined(np.maximum, mark, starts)
        drawn = [SeriesLine(name, low[:, at], high[:, at], mark[:, at]) for at, name in enumerate(names)]
        segments.append(Segment(attempt, step[starts], drawn, _missing(step, end, step[starts])))
    return segments


def _missing(step: Ints, end: Ints, points: Ints) -> Ints:
    """First steps of gaps. A gap is a distance of at least twice the usual one from the end of one value to the next,
    because some metrics come every tenth step and buckets differ in width.
    """
    ends = np.maximum.accumulate(end)[:-1]
    apart = step[1:] - ends + 1
    usual = int(np.median(apart[apart > 0])) if (apart > 0).any() else 1
    due = (ends - 1 + usual)[apart >= 2 * usual]
    return due[np.unique(np.searchsorted(points, due, side="right"), return_index=True)[1]]


def _newest_only(points: list[_Points], reader: Reader, level: int) -> list[_Points]:
    """The points without steps that a later attempt repeated. The bucket in which that attempt began stays."""
    kept: list[_Points] = []
    repeated = np.zeros(0, dtype=np.int64)
    for attempt in reversed(list(dict.fromkeys(one.attempt for one in points))):
        own = [repeated]
        for one in points:
            if one.attempt == attempt:
                measured = (one.mark != ValueMark.ABSENT).any(axis=1)
                own.append(one.step[measured])
                fresh: NDArray[np.bool_] = measured & ~np.isin(one.step, repeated) if len(repeated) else measured
                if fresh.any():
                    kept.append(one if fresh.all() else one.chosen(fresh))
        began = reader.began.get(attempt)
        repeated = np.unique(np.concatenate(own))
        if level and began is not None:
            repeated = repeated[repeated != began // bucket_steps(level) * bucket_steps(level)]
    return kept


def _joined(join: np.ufunc, array: NDArray[Any], starts: Ints) -> NDArray[Any]:
    """Join each group of rows into one row. NumPy's own `reduceat` takes ten times as long across rows."""
    if len(starts) == len(array):
        return array
    joined = np.empty((len(starts), array.shape[1]), array.dtype)
    for at, (begin, end) in enumerate(pairwise([*starts.tolist(), len(array)])):
        join.reduce(array[begin:end], axis=0, out=joined[at])
    return joined


def _stacked(arrays: list[NDArray[Any]], width: int, fill: Any) -> NDArray[Any]:
    if all(array.shape[1] == width for array in arrays):
        return np.concatenate(arrays)
    wide = np.full((sum(map(len, arrays)), width), fill)
    at = 0
    for array in arrays:
        wide[at : at + len(array), : array.shape[1]] = array
        at += len(array)
    return wide


def _grouped(step: Ints, points: int, *arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Sort by step, and group rows into at most `points` points; equal steps stay together.

    Returns:
        The steps, the index at which each group begins, and the arrays, all in the order of steps.
    """
    if np.any(step[1:] < step[:-1]):
        order = np.argsort(step, kind="stable")
        step, arrays = step[order], tuple(array[order] for array in arrays)
    firsts = np.flatnonzero(np.diff(step, prepend=-1))
    count = min(len(firsts), max(1, min(points, POINTS_MAX)))
    return step, firsts[np.arange(count) * len(firsts) // max(count, 1)], *arrays


MEDIA_TYPE: Final = "application/vnd.rankwatch.heatmap"

LAYOUT: Final = """The same heat map, or the lowest values instead of the highest ones, as bytes, for more cells.

Little-endian, one after the other:

| what | type |
| --- | --- |
| `RWH1` | 4 bytes |
| columns, rows, ranks | u32 each |
| scale, levels | f32 each |
| first step of each column | f64[columns] |
| first rank of each row; the last row ends at `ranks` | u32[rows] |
| centre of each column | f32[columns] |
| lower bytes of the codes, row by row | u8[rows * columns] |
| upper bytes of the codes | u8[rows * columns] |

Codes 0 to 3 are not measured, NaN, Inf and -Inf. Of any other, n = (code - 4) / 2 where that is whole, else
-(code - 3) / 2, and the value is centre + scale * sinh(n / levels): near the centre of its column in steps of a fixed
size, at most a quarter of the usual difference between ranks, and far from it to one part in 100."""

AIM_BYTES: Final = 150_000
"""Compressed bytes of a large map's codes, if differences are normally distributed. Fewer cells get finer steps."""

LEVELS_MIN, LEVELS_MAX = 4, 64
"""Steps in one sigma of the differences from the column's centre."""

LINEAR_SIGMAS: Final = 32
"""Steps have a fixed size up to this many sigmas from the centre, and grow beyond."""

_HEADER: Final = struct.Struct("<4sIIIff")
_CODES: Final = {ValueMark.ABSENT: 0, ValueMark.NAN: 1, ValueMark.POSITIVE_INF: 2, ValueMark.NEGATIVE_INF: 3}
_PLAIN: Final = 4
_CODE_MAX: Final = 32_700
_SAMPLE: Final = 65_536
_SAMPLE_ROWS: Final = 128


def tile(found: HeatMap) -> bytes:
    """Encode a map as described in `LAYOUT`, not compressed."""
    finite = found.mark == ValueMark.FINITE
    whole = bool(finite.all())
    value = np.ascontiguousarray(found.value, np.float64)
    centre = _centre(value, finite).astype(np.float32)
    apart = value - centre if whole else np.where(finite, value - centre, 0.0)
    scale, levels = _steps(apart.ravel() if whole else apart[finite], apart.size)
    # The scale keeps the quotient below 1e30. float32 is exact enough to tell steps apart, and four times as fast.
    count = np.rint(levels * np.arcsinh((apart / scale).astype(np.float32))).astype(np.int32)
    code = ((count << 1) ^ (count >> 31)) + _PLAIN
    if not whole:
        for mark, special in _CODES.items():
            code[found.mark == mark] = special
    planes = np.stack([(code & 0xFF).astype(np.uint8), (code >> 8).astype(np.uint8)])
    columns, rows = len(found.step), len(found.rank)
    return b"".join(
        (
            _HEADER.pack(b"RWH1", columns, rows, found.ranks, scale, levels),
            found.step.astype("<f8").tobytes(),
            found.rank.astype("<u4").tobytes(),
            centre.astype("<f4").tobytes(),
            planes.tobytes(),
        )
    )


def gzipped(data: bytes) -> bytes:
    """Compress by Huffman codes and runs alone: noise has no matches worth a search, and this is 8 times as fast."""
    packer = zlib.compressobj(1, zlib.DEFLATED, 16 + zlib.MAX_WBITS, 9, zlib.Z_RLE)
    return packer.compress(data) + packer.flush()


def _centre(value: NDArray[Any], finite: NDArray[np.bool_]) -> NDArray[Any]:
    """[column]: about the median of its finite values; 0 if it has none."""
    if finite.all() and len(value):
        return np.asarray(np.median(value[:: max(1, len(value) // _SAMPLE_ROWS)], axis=0))
    held = np.sort(np.where(finite, value, np.inf), axis=0)
    count = np.count_nonzero(finite, axis=0)
    if not len(held):
        return np.zeros(value.shape[1])
    middle = np.take_along_axis(held, (np.maximum(count, 1)[None] - 1) // 2, axis=0)[0]
    return np.where(count > 0, middle, 0.0)


def _steps(apart: NDArray[Any], cells: int) -> tuple[float, float]:
    """Scale and levels of the layout, as float32 holds them."""
    largest = float(np.abs(apart).max(initial=0.0))
    if largest == 0.0:
        return 1.0, 1.0
    low, high = np.quantile(apart[:: max(1, len(apart) // _SAMPLE)], (0.25, 0.75))
    sigma = max(float(high - low) / 1.349, largest * 1e-30) or largest
    if high == low:
        sigma = largest / LINEAR_SIGMAS
    per_sigma = min(max(2 ** min(8 * AIM_BYTES / cells, 16) / 4.13, LEVELS_MIN), LEVELS_MAX)
    scale = np.float32(min(max(sigma * LINEAR_SIGMAS, 1e-37), 1e38))  # as float32 holds them
    levels = min(per_sigma * LINEAR_SIGMAS, _CODE_MAX / np.arcsinh(largest / scale))
    return float(scale), float(np.float32(levels))


@dataclass(slots=True)
class LastValues:
    """The newest values of one rank."""

    step: int = -1
    """The newest step with a value; -1: there is none."""
    values: dict[str, float] = field(default_factory=dict)
    """By metric; those without a value in the newest chunk are absent."""


def last_values(engine: Engine, job: str, ranks: Sequence[int], within: int) -> list[LastValues]:
    """The newest value of each metric that a rank has in the newest chunk of that metric.

    Args:
        engine: the store.
        job: its name, or the name of the series of its devices.
        ranks: whose values.
        within: steps by which a value may be older than the rank's newest one; what is older is measured no more.
    """
    found = [LastValues() for _ in ranks]
    steps: list[dict[str, int]] = [{} for _ in ranks]
    for metric in metrics(engine, job):
        mine = (SeriesChunk.job == job, SeriesChunk.metric == metric)
        query = select(SeriesChunk.chunk, SeriesChunk.ranks, SeriesChunk.data).where(*mine)
        with read(engine) as connection:
            row = connection.execute(query.order_by(SeriesChunk.chunk.desc()).limit(1)).first()
        if row is None:
            continue
        cells = decoded(row.data)
        here = ~absent(cells)
        last = len(cells) - 1 - np.argmax(here[::-1], axis=0)
        for newest, read_at, rank in zip(found, steps, ranks, strict=True):
            if rank < cells.shape[1] and here[last[rank], rank]:
                newest.values[metric] = float(cells[last[rank], rank])
                read_at[metric] = row.chunk * CHUNK_STEPS + int(last[rank])
                newest.step = max(newest.step, read_at[metric])
    for newest, read_at in zip(found, steps, strict=True):
        newest.values = {name: value for name, value in newest.values.items() if newest.step - read_at[name] <= within}
    return found
