"""Removes series that are too old or too many, oldest first, and those of deleted jobs.

Raw chunks and roll-ups have limits of their own. A project may have other ages than the rest; limits of size are those
of all jobs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final

from sqlalchemy import ColumnElement, Connection, Engine, delete, func, or_, select, true, tuple_

from rankwatch_service.names import OF_DEVICES
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import JobProject, SeriesChunk, SeriesRollup

HOUR_NS: Final = 3_600 * 10**9
DAY_NS: Final = 24 * HOUR_NS

TRIM_ROWS: Final = 500
"""Rows removed in one transaction."""

PASS_ROWS: Final = 20_000
"""Rows removed in one pass, which takes about a second; the next pass goes on."""

Series = type[SeriesChunk] | type[SeriesRollup]


@dataclass(frozen=True, slots=True)
class Tier:
    """The limits of one tier, of which the first that is reached counts."""

    keep_ns: int
    bytes_max: int
    projects_keep_ns: Mapping[str, int] = field(default_factory=dict)
    """By project, what holds for its jobs instead of `keep_ns`."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Rows that one pass removed."""

    chunks: int
    rollups: int


def tiers(settings: Settings) -> tuple[Tier, Tier]:
    """The limits of raw chunks and of roll-ups."""
    raw = {project: one.series_raw_hours for project, one in settings.projects.items()}
    rolled = {project: one.series_rollup_days for project, one in settings.projects.items()}
    return (
        Tier(settings.series_raw_hours * HOUR_NS, settings.series_raw_bytes, _times(HOUR_NS, raw)),
        Tier(settings.series_rollup_days * DAY_NS, settings.series_rollup_bytes, _times(DAY_NS, rolled)),
    )


def _times(unit_ns: int, lasting: Mapping[str, int | None]) -> dict[str, int]:
    return {project: units * unit_ns for project, units in lasting.items() if units is not None}


def trim(engine: Engine, raw: Tier, rolled: Tier, now_unix_ns: int) -> Trimmed:
    """Remove what is beyond the limits, up to `PASS_ROWS` of each tier. A row's age counts from its last write."""
    chunks = _trimmed(engine, SeriesChunk, raw, now_unix_ns)
    return Trimmed(chunks, _trimmed(engine, SeriesRollup, rolled, now_unix_ns))


def delete_some(engine: Engine, job: str) -> int:
    """Remove up to `TRIM_ROWS` of a job's rows from each tier; returns how many were removed."""
    gone = 0
    for model in (SeriesChunk, SeriesRollup):
        keys = list(model.__table__.primary_key)
        some = select(*keys).where(model.job == job).order_by(*keys).limit(TRIM_ROWS)
        with write_aside(engine) as connection:
            gone += connection.execute(delete(model).where(tuple_(*keys).in_(some))).rowcount
    return gone


def kept_bytes(connection: Connection) -> tuple[int, int]:
    """Bytes of raw chunks and of roll-ups, without the overhead of rows."""
    raw, rolled = (connection.scalar(select(func.sum(model.size_bytes))) for model in (SeriesChunk, SeriesRollup))
    return int(raw or 0), int(rolled or 0)


def _trimmed(engine: Engine, model: Series, tier: Tier, now_unix_ns: int) -> int:
    gone = 0
    for jobs, keep_ns in _by_project(model, tier):
        before_unix_ns = max(now_unix_ns - keep_ns, 0)  # a database has no number for "for ever"
        gone += _remove_oldest(engine, model, jobs & (model.at_unix_ns < before_unix_ns), PASS_ROWS - gone)
    with read(engine) as connection:
        raw, rolled = kept_bytes(connection)
    excess = (raw if model is SeriesChunk else rolled) - tier.bytes_max
    return gone + _remove_oldest(engine, model, true(), PASS_ROWS - gone, excess)


def _by_project(model: Series, tier: Tier) -> Iterator[tuple[ColumnElement[bool], int]]:
    """The jobs that are kept equally long, as a condition, and how long."""

    def of(projects: Iterable[str]) -> ColumnElement[bool]:
        jobs = select(JobProject.job).where(JobProject.project.in_(projects))
        of_devices = (
            model.job.in_(select(JobProject.job + end).where(JobProject.project.in_(projects)))
            for end in OF_DEVICES.values()
        )
        return or_(model.job.in_(jobs), *of_devices)

    yield ~of(tier.projects_keep_ns) if tier.projects_keep_ns else true(), tier.keep_ns
    for project, keep_ns in tier.projects_keep_ns.items():
        yield of([project]), keep_ns


def _remove_oldest(
    engine: Engine, model: Series, where: ColumnElement[bool], rows_max: int, size_bytes: float = inf
) -> int:
    """Remove the oldest of these rows, up to `rows_max`, until this many bytes are gone; returns how many."""
    keys = list(model.__table__.primary_key)
    oldest = select(*keys, model.size_bytes).where(where).order_by(model.at_unix_ns)
    gone = 0
    while gone < rows_max and size_bytes > 0:
        with read(engine) as connection:
            rows = connection.execute(oldest.limit(min(TRIM_ROWS, rows_max - gone))).all()
        leaving = []
        for *key, row_bytes in rows:
            if size_bytes <= 0:
                break
            size_bytes -= row_bytes
            leaving.append(tuple(key))
        if not leaving:
            break
        # Sorted: `write_aside` asks for rows in the order of their keys.
        with write_aside(engine) as connection:
            connection.execute(delete(model).where(tuple_(*keys).in_(sorted(leaving))))
        gone += len(leaving)
    return gone
