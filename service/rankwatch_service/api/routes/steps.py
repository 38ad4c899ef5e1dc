"""Metrics of a job for charts: lines over steps, and heat maps of ranks over steps."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import select

from rankwatch.wire import METRIC_NAME_BYTES_MAX
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.identities import Identity
from rankwatch_service.api.dependencies import Context, Ctx, Require
from rankwatch_service.api.http.problem import ProblemError, not_found
from rankwatch_service.api.reply import ApiReply
from rankwatch_service.series.query import (
    LAYOUT,
    MEDIA_TYPE,
    POINTS_MAX,
    RANKS_MAX,
    STEP_MAX,
    Reduce,
    Side,
    gzipped,
    heat_map,
    metrics,
    series,
    tile,
)
from rankwatch_service.series.query import Segment as SeriesSegment
from rankwatch_service.series.read import Range, StepTimes
from rankwatch_service.series.rollups import Single
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Job

router = APIRouter(prefix="/jobs/{job}", tags=["charts"])

DIGITS: Final = 5
"""Significant digits of a value: more than a chart can show."""

COLUMNS_MAX: Final = 1_000
ROWS_MAX: Final = 1_024
"""Rows of a heat map. With more ranks, several share a row, which shows their highest (or lowest) value."""

TILE_CELLS_MAX: Final = 320_000
"""Cells of one heat map, 200 KB compressed. The more rows it has, the fewer columns it gets."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
# Six more for the prefix `phase.`.
MetricName = Annotated[str, Query(min_length=1, max_length=METRIC_NAME_BYTES_MAX + 6)]
Step = Annotated[int | None, Query(ge=0, lt=2**53)]
Columns = Annotated[int, Query(ge=1, le=COLUMNS_MAX)]
Rows = Annotated[int, Query(ge=1, le=ROWS_MAX)]
Values = list[float | None]


class MetricNames(ApiReply):
    """Names of a job's metrics."""

    items: list[str]


class SeriesLine(ApiReply):
    """Lowest and highest finite value of each point, or null. `mark` is the highest that occurs in the point: 0 absent,
    1 finite, 2 -Inf, 3 Inf, 4 NaN.
    """

    name: str
    low: Values
    high: Values
    mark: list[int]


class AttemptSeries(ApiReply):
    """One attempt's part of a series. `step` is the first step of each point. `missing` are steps at which expected
    values begin to be missing, at most one in each point.
    """

    attempt: str
    step: list[int]
    at_unix_ns: list[int]
    """With `times`, about when each of `step` was made; else empty."""
    lines: list[SeriesLine]
    missing: list[int]


class Series(ApiReply):
    """A metric over steps."""

    metric: str
    segments: list[AttemptSeries]


@router.get("/metrics")
def list_metrics(job: str, context: Ctx, _identity: Reader) -> MetricNames:
    """Names of the metrics that the job reports."""
    _require_job(context, job)
    return MetricNames(items=metrics(context.engine, job))


@router.get("/series")
def show_series(
    job: str,
    context: Ctx,
    _identity: Reader,
    metric: MetricName,
    from_step: Step = None,
    to_step: Step = None,
    ranks: Annotated[str | None, Query(pattern=r"^\d+(-\d+)?(,\d+(-\d+)?)*$", max_length=1_000)] = None,
    reduce: Annotated[Reduce, Query()] = Reduce.MEAN,
    points: Annotated[int, Query(ge=1, le=POINTS_MAX)] = 1_000,
    times: Annotated[bool, Query(description="Also when the steps were made")] = False,
) -> Series:
    """A metric over steps, one segment for each attempt. `ranks` is a list such as 0,4-7."""
    _require_job(context, job)
    chosen = chosen_numbers(ranks, "ranks") if ranks else []
    found = series(context.engine, job, metric, from_step or 0, to_step, chosen, reduce, points)
    made = StepTimes(context.engine, Range(job, metric, from_step or 0, to_step or STEP_MAX)) if times else None
    segments = [
        AttemptSeries(
            attempt=segment.attempt,
            step=segment.step.tolist(),
            at_unix_ns=made.of(segment.attempt, segment.step).tolist() if made else [],
            lines=lines_of(segment),
            missing=segment.missing.tolist(),
        )
        for segment in found
    ]
    return Series(metric=metric, segments=segments)


@router.get(
    "/heatmap.bin",
    description=LAYOUT,
    response_class=Response,
    responses={200: {"content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}}}},
)
def show_heat_tile(
    job: str,
    request: Request,
    context: Ctx,
    _identity: Reader,
    metric: MetricName,
    columns: Columns = 300,
    rows: Rows = ROWS_MAX,
    from_step: Step = None,
    to_step: Step = None,
    side: Side = Side.HIGH,
) -> Response:
    """A heat map in the binary form that `LAYOUT` describes."""
    ranks = _require_job(context, job)
    fitting = TILE_CELLS_MAX // min(rows, max(ranks, 1))
    found = heat_map(context.engine, job, metric, min(columns, fitting), rows, from_step or 0, to_step, side)
    data = tile(found)
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(data, media_type=MEDIA_TYPE)
    headers = {"Content-Encoding": "gzip", "Vary": "Accept-Encoding"}
    return Response(gzipped(data), media_type=MEDIA_TYPE, headers=headers)


def _require_job(context: Context, job: str) -> int:
    """The job's world size; 404 if there is no such job."""
    with read(context.engine) as connection:
        world_size = connection.scalar(select(Job.world_size).where(Job.name == job))
    if world_size is None:
        raise not_found("job", job)
    return world_size


def lines_of(segment: SeriesSegment, unit: str = "rank") -> list[SeriesLine]:
    """The lines of a segment; those of single ranks are called `unit`:NUMBER."""
    return [
        SeriesLine(
            name=line.name.replace("rank:", f"{unit}:"),
            low=_shown(line.low),
            high=_shown(line.high),
            mark=line.mark.tolist(),
        )
        for line in segment.lines
    ]


def chosen_numbers(text: str, what: str) -> list[int]:
    """Parse a list of ranks or devices such as 0,4-7.

    Raises:
        ProblemError: there are more than `RANKS_MAX`.
    """
    chosen: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end - begin >= RANKS_MAX or len(chosen) + end - begin >= RANKS_MAX:
            raise ProblemError(422, f"at most {RANKS_MAX} {what} can be requested at a time")
        chosen += range(begin, end + 1)
    return chosen


def _shown(values: Single) -> Values:
    """Values for JSON; null if not finite, as the mark shows."""
    return [shown(value) for value in values]


def shown(value: float) -> float | None:
    """A value for JSON."""
    return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
