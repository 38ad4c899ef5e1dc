"""A job's measured values for charts: lines over steps, and a heat map of ranks over steps."""

from __future__ import annotations

from typing import Annotated, Final

import numpy as np
from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel
from sqlalchemy import select

from rankwatch.wire import METRIC_NAME_BYTES_MAX
from rankwatch_detectors.base import Floats
from rankwatch_service.api.access import Identity, Require, Scope
from rankwatch_service.api.context import Context, Ctx
from rankwatch_service.api.problem import ProblemError, not_found
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Job
from rankwatch_service.store.series_query import (
    POINTS_MAX,
    RANKS_MAX,
    Reduce,
    TooMuchError,
    heat_map,
    metrics,
    series,
)

router = APIRouter(prefix="/jobs/{job}", tags=["charts"])

DIGITS: Final = 5
"""Significant digits of a value: more than a pixel can show."""

COLUMNS_MAX: Final = 1_000
HEAT_CELLS_MAX: Final = 60_000
"""Cells of one heat map: 200 KB as it is sent, compressed. More ranks get fewer columns."""

Reader = Annotated[Identity, Depends(Require(Scope.READ))]
# The prefix `phase.` comes on top of a name.
MetricName = Annotated[str, Query(min_length=1, max_length=METRIC_NAME_BYTES_MAX + 6)]
Step = Annotated[int | None, Query(ge=0, lt=2**53)]
Values = list[float | None]


class Metrics(BaseModel):
    """Names of what a job measures."""

    items: list[str]


class Line(BaseModel):
    """Lowest and highest finite value of each point; null where there is none. `mark`: 0 absent, 1 finite, 2 -Inf,
    3 Inf, 4 NaN, the highest that occurs.
    """

    name: str
    low: Values
    high: Values
    mark: list[int]


class Segment(BaseModel):
    """One attempt's part of a series; `step` is the first step of each point."""

    attempt: str
    step: list[int]
    lines: list[Line]


class Series(BaseModel):
    """A metric over steps."""

    metric: str
    segments: list[Segment]


class Heat(BaseModel):
    """A metric over ranks and steps: `high[rank][column]`, `mark` as in `Line`. `step` is each column's first."""

    metric: str
    step: list[int]
    high: list[Values]
    mark: list[list[int]]


@router.get("/metrics")
def list_metrics(job: str, context: Ctx, _identity: Reader) -> Metrics:
    """What the job measures."""
    _require_job(context, job)
    return Metrics(items=metrics(context.engine, job))


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
) -> Series:
    """A metric over steps, one segment for each attempt. `ranks` are like 0,4-7."""
    _require_job(context, job)
    chosen = _ranks(ranks) if ranks else []
    try:
        found = series(context.engine, job, metric, from_step or 0, to_step, chosen, reduce, points)
    except TooMuchError as error:
        raise ProblemError(422, str(error)) from error
    segments = [
        Segment(
            attempt=segment.attempt,
            step=segment.step.tolist(),
            lines=[
                Line(name=line.name, low=_shown(line.low), high=_shown(line.high), mark=line.mark.tolist())
                for line in segment.lines
            ],
        )
        for segment in found
    ]
    return Series(metric=metric, segments=segments)


@router.get("/heatmap")
def show_heat_map(
    job: str,
    context: Ctx,
    _identity: Reader,
    metric: MetricName,
    columns: Annotated[int, Query(ge=1, le=COLUMNS_MAX)] = 300,
    from_step: Step = None,
    to_step: Step = None,
) -> Heat:
    """A metric over all ranks and steps, in at most `columns` columns, fewer for many ranks."""
    ranks = max(_require_job(context, job), 1)
    fitting = max(HEAT_CELLS_MAX // ranks, 1)
    try:
        found = heat_map(context.engine, job, metric, min(columns, fitting), from_step or 0, to_step)
    except TooMuchError as error:
        raise ProblemError(422, str(error)) from error
    return Heat(
        metric=metric,
        step=found.step.tolist(),
        high=[_shown(row) for row in found.high],
        mark=np.asarray(found.mark).tolist(),
    )


def _require_job(context: Context, job: str) -> int:
    """The job's world size; 404 if there is no such job."""
    with read(context.engine) as connection:
        world_size = connection.scalar(select(Job.world_size).where(Job.name == job))
    if world_size is None:
        raise not_found("job", job)
    return world_size


def _ranks(text: str) -> list[int]:
    """The ranks of a text like 0,4-7.

    Raises:
        ProblemError: they are more than one answer shows.
    """
    chosen: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = int(first), int(last or first)
        if end - begin >= RANKS_MAX or len(chosen) + end - begin >= RANKS_MAX:
            raise ProblemError(422, f"at most {RANKS_MAX} ranks can be asked for at a time")
        chosen += range(begin, end + 1)
    return chosen


def _shown(values: Floats) -> Values:
    """Values as JSON has them; what is not finite is told by its mark."""
    return [float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None for value in values]
