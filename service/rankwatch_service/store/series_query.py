"""Reads series for charts: never more points than pixels, and never an extreme or a NaN hidden by that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import Connection, Engine, select

from rankwatch_detectors.base import Floats, Ints
from rankwatch_service.store.chunks import CHUNK_STEPS, Cells, absent, decoded, widened
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt, SeriesChunk

POINTS_MAX: Final = 4_000
"""Points of one line: the widest screens have so many pixels."""

CELLS_MAX: Final = 20_000_000
"""Values read by one query: 0.2 GB at their widest, about a second. A longer range must be asked for in parts."""

RANKS_MAX: Final = 64
"""Lines of single ranks in one answer; more can be shown as a fan or a heat map."""


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


_SHARES: Final[dict[Reduce, tuple[tuple[str, float], ...]]] = {
    Reduce.MIN: (("min", 0.0),),
    Reduce.MEDIAN: (("median", 0.5),),
    Reduce.MAX: (("max", 1.0),),
    Reduce.FAN: (("p5", 0.05), ("p50", 0.5), ("p95", 0.95), ("max", 1.0)),
}


class Mark(IntEnum):
    """What is worth marking in a bucket of values; the highest one that occurs counts."""

    ABSENT = 0
    FINITE = 1
    NEGATIVE_INF = 2
    POSITIVE_INF = 3
    NAN = 4


class TooMuchError(ValueError):
    """The query would read more than `CELLS_MAX` values."""


@dataclass(frozen=True, slots=True)
class Line:
    """Values at the steps of its segment. Where `mark` is not FINITE alone, low and high are of the finite values."""

    name: str
    low: Floats
    high: Floats
    mark: NDArray[np.uint8]
    """`Mark` of each point."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One attempt's part of a series. `step` is the first step of each point; points without any value are left out."""

    attempt: str
    step: Ints
    lines: list[Line]


@dataclass(frozen=True, slots=True)
class HeatMap:
    """One metric over ranks and steps. Where steps were repeated the newest attempt counts."""

    step: Ints
    """First step of each column."""
    low: Floats
    """[rank, column], of the finite values; NaN where there are none."""
    high: Floats
    mark: NDArray[np.uint8]
    """[rank, column], `Mark`."""


def metrics(engine: Engine, job: str) -> list[str]:
    """Names of the metrics that a job has, sorted."""
    with read(engine) as connection:
        names = connection.scalars(select(SeriesChunk.metric).where(SeriesChunk.job == job).distinct())
        return sorted(names)


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
    """A metric over steps, one segment for each attempt, in their order.

    Args:
        engine: the store.
        job: whose.
        metric: which.
        from_step: first step.
        to_step: last step; None: to the newest.
        ranks: these alone, at most RANKS_MAX for `NONE`; empty: all.
        reduce: how ranks become lines.
        points: at most so many for each line of the whole answer.

    Raises:
        TooMuchError: the range is too long to be read at once.
    """
    parts = _load(engine, job, metric, from_step, to_step)
    steps_total = sum(len(steps) for _, steps, _ in parts)
    per_point = -(-steps_total // max(1, min(points, POINTS_MAX)))
    segments = []
    for attempt, steps, cells in parts:
        chosen = _chosen(cells, ranks, reduce)
        lines = _reduced(cells[:, chosen], chosen, reduce)
        starts = np.arange(0, len(steps), max(per_point, 1))
        segments.append(Segment(attempt, steps[starts], [_bucketed(*line, starts) for line in lines]))
    return segments


def heat_map(
    engine: Engine, job: str, metric: str, columns: int = 300, from_step: int = 0, to_step: int | None = None
) -> HeatMap:
    """A metric over all ranks and steps, in at most `columns` columns.

    Raises:
        TooMuchError: the range is too long to be read at once.
    """
    parts = _load(engine, job, metric, from_step, to_step)
    if not parts:
        empty = np.zeros((0, 0))
        return HeatMap(np.zeros(0, dtype=np.int64), empty, empty, empty.astype(np.uint8))
    width = max(cells.shape[1] for _, _, cells in parts)
    newest: dict[int, tuple[int, int]] = {}
    for index, (_, steps, _) in enumerate(parts):
        newest |= {int(step): (index, row) for row, step in enumerate(steps)}
    order = sorted(newest)
    rows = (parts[index][2][row : row + 1] for index, row in (newest[step] for step in order))
    cells = np.concatenate([widened(row, width) for row in rows])
    starts = np.arange(0, len(order), max(1, -(-len(order) // max(1, min(columns, POINTS_MAX)))))
    low, high, mark = _extremes(cells.astype(np.float64), ~absent(cells), starts)
    return HeatMap(np.array(order, dtype=np.int64)[starts], low.T, high.T, mark.T)


def _load(engine: Engine, job: str, metric: str, from_step: int, to_step: int | None) -> list[tuple[str, Ints, Cells]]:
    """(attempt, steps that have any value, cells [step, rank]) in the order of attempts."""
    first = max(from_step, 0) // CHUNK_STEPS
    where = [SeriesChunk.job == job, SeriesChunk.metric == metric, SeriesChunk.chunk >= first]
    if to_step is not None:
        where.append(SeriesChunk.chunk <= to_step // CHUNK_STEPS)
    with read(engine) as connection:
        sizes = connection.execute(select(SeriesChunk.ranks).where(*where)).scalars().all()
        if sum(sizes) * CHUNK_STEPS > CELLS_MAX:
            raise TooMuchError(f"more than {CELLS_MAX} values: ask for fewer steps")
        numbers = _attempt_numbers(connection, job)
        rows = connection.execute(select(SeriesChunk.__table__).where(*where).order_by(SeriesChunk.chunk)).all()
    by_attempt: dict[str, list[tuple[int, Cells]]] = {}
    for row in rows:
        by_attempt.setdefault(row.attempt, []).append((row.first_step, decoded(row.data, row.ranks)[: row.steps]))
    parts = []
    for attempt in sorted(by_attempt, key=lambda name: (numbers.get(name, 0), name)):
        width = max(cells.shape[1] for _, cells in by_attempt[attempt])
        steps = np.concatenate([np.arange(begin, begin + len(cells)) for begin, cells in by_attempt[attempt]])
        joined = np.concatenate([widened(cells, width) for _, cells in by_attempt[attempt]])
        keep = (steps >= from_step) & (to_step is None or steps <= to_step) & ~absent(joined).all(axis=1)
        if keep.any():
            parts.append((attempt, steps[keep], joined[keep]))
    return parts


def _attempt_numbers(connection: Connection, job: str) -> dict[str, int]:
    rows = connection.execute(select(Attempt.attempt, Attempt.number).where(Attempt.job == job))
    return {row.attempt: row.number for row in rows}


def _chosen(cells: Cells, ranks: Sequence[int], reduce: Reduce) -> Ints:
    chosen = np.array([rank for rank in ranks if 0 <= rank < cells.shape[1]], dtype=np.int64)
    if not len(ranks):
        chosen = np.arange(cells.shape[1])
    return chosen[:RANKS_MAX] if reduce is Reduce.NONE else chosen


def _reduced(cells: Cells, ranks: Ints, reduce: Reduce) -> list[tuple[str, Floats, NDArray[np.bool_]]]:
    """(name, values by step, present by step). A NaN of any rank makes its step's reduced value NaN."""
    present = ~absent(cells)
    values = cells.astype(np.float64)
    if reduce is Reduce.NONE:
        return [(f"rank:{rank}", values[:, index], present[:, index]) for index, rank in enumerate(ranks)]
    bad = np.any(np.isnan(values) & present, axis=1)
    count = present.sum(axis=1)
    # What is absent sorts behind everything else, so that the k-th value of a row is the k-th measured one.
    held = np.sort(np.where(present, values, np.inf), axis=1) if len(ranks) else np.full((len(cells), 1), np.nan)
    if reduce is Reduce.MEAN:
        with np.errstate(invalid="ignore"):
            mean = np.where(present, values, 0.0).sum(axis=1) / np.maximum(count, 1)
        lines = [("mean", mean)]
    else:
        rows = np.arange(len(held))
        lines = [
            (name, held[rows, np.rint(share * np.maximum(count - 1, 0)).astype(np.int64)])
            for name, share in _SHARES[reduce]
        ]
    return [(name, np.where(bad, np.nan, line), count > 0) for name, line in lines]


def _bucketed(name: str, values: Floats, present: NDArray[np.bool_], starts: Ints) -> Line:
    low, high, mark = _extremes(values[:, None], present[:, None], starts)
    return Line(name, low[:, 0], high[:, 0], mark[:, 0])


def _extremes(values: Floats, present: NDArray[np.bool_], starts: Ints) -> tuple[Floats, Floats, NDArray[np.uint8]]:
    """Lowest and highest finite value and the mark of each bucket of rows."""
    finite = present & np.isfinite(values)
    low = np.minimum.reduceat(np.where(finite, values, np.inf), starts, axis=0)
    high = np.maximum.reduceat(np.where(finite, values, -np.inf), starts, axis=0)
    none = ~np.logical_or.reduceat(finite, starts, axis=0)
    marks = np.where(finite, Mark.FINITE, Mark.ABSENT).astype(np.uint8)
    marks[present & (values == -np.inf)] = Mark.NEGATIVE_INF
    marks[present & (values == np.inf)] = Mark.POSITIVE_INF
    marks[present & np.isnan(values)] = Mark.NAN
    return (
        np.where(none, np.nan, low),
        np.where(none, np.nan, high),
        np.maximum.reduceat(marks, starts, axis=0),
    )
