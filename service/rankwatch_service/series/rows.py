"""Reads and writes the rows of series, raw and rolled up, and removes those that are too old or too many.

Raw chunks and roll-ups have limits of their own. A project may have other ages than the rest; limits of size are those
of all jobs together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, Final

import numpy as np
from sqlalchemy import ColumnElement, Connection, Engine, delete, func, or_, select, true, tuple_
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_service.names import OF_DEVICES
from rankwatch_service.series.chunks import Block, Cells, absent, by_resolution, decoded, encoded, metrics_together
from rankwatch_service.series.rollups import BRANCHES, Buckets, ValueMark, packed, unpacked
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Base, JobOwnership, SeriesChunk, SeriesRollup

WRITE_BYTES: Final = 1024 * 1024
"""Written in one transaction, which holds the write lock for 5 ms."""


def known(engine: Engine, job: str, attempt: str) -> tuple[list[str], int]:
    """What is stored of an attempt: its metrics, sorted, and the number of its newest raw chunk; -1 if there is none.

    Raw chunks are removed before roll-ups, so a chunk also counts if only its bucket is left.
    """
    raw = (SeriesChunk.job == job, SeriesChunk.attempt == attempt)
    rolled = (SeriesRollup.job == job, SeriesRollup.level == 1, SeriesRollup.attempt == attempt)
    with read(engine) as connection:
        chunks = connection.execute(
            select(SeriesChunk.metric, func.max(SeriesChunk.chunk)).where(*raw).group_by(SeriesChunk.metric)
        ).all()
        rows = connection.execute(
            select(SeriesRollup.metric, func.max(SeriesRollup.chunk)).where(*rolled).group_by(SeriesRollup.metric)
        ).all()
    newest = [chunk for _, chunk in chunks] + [(row + 1) * BRANCHES - 1 for _, row in rows]
    return sorted({metric for metric, _ in (*chunks, *rows)}), max(newest, default=-1)


def stored_chunk(
    engine: Engine, job: str, attempt: str, number: int, only: Sequence[str] | None = None
) -> dict[str, Cells]:
    """The cells of a raw chunk, by metric; metrics without a row are left out, and those beside `only`."""
    query = select(SeriesChunk.metric, SeriesChunk.ranks, SeriesChunk.data).where(
        SeriesChunk.job == job, SeriesChunk.attempt == attempt, SeriesChunk.chunk == number
    )
    if only is not None:
        query = query.where(SeriesChunk.metric.in_(only))
    with read(engine) as connection:
        rows = connection.execute(query).all()
    return {row.metric: decoded(row.data) for row in rows}


def stored_rollup(
    engine: Engine, job: str, attempt: str, metrics: Sequence[str], level: int, number: int
) -> tuple[list[str], Buckets] | None:
    """A row of roll-ups: those of the metrics that have it, and their buckets; None if no metric has it."""
    with read(engine) as connection:
        rows = connection.execute(
            select(SeriesRollup.__table__).where(
                SeriesRollup.job == job,
                SeriesRollup.attempt == attempt,
                SeriesRollup.metric.in_(metrics),
                SeriesRollup.level == level,
                SeriesRollup.chunk == number,
            )
        ).all()
    if not rows:
        return None
    return [row.metric for row in rows], unpacked([(row.low, row.high, row.mark, row.lines) for row in rows])


def chunk_rows(
    job: str, attempt: str, metrics: Sequence[str], number: int, cells: Block, at_unix_ns: int
) -> list[dict[str, Any]]:
    """Rows to write for a chunk, one for each metric; trailing steps without any value are left out."""
    used = np.flatnonzero(~absent(cells).all(axis=(0, 2)))
    steps = int(used[-1]) + 1 if len(used) else 0
    rows = []
    size = metrics_together(cells)
    for times, of_kind in by_resolution(metrics):
        for first in range(0, len(of_kind), size):
            chosen = of_kind[first : first + size]
            block = cells[chosen, :steps]
            for index, data in zip(chosen, encoded(block, times), strict=True):
                rows.append(
                    {
                        "job": job,
                        "attempt": attempt,
                        "metric": metrics[index],
                        "chunk": number,
                        "first_step": number * len(cells[0]),
                        "steps": steps,
                        "ranks": cells.shape[2],
                        "data": data,
                        "size_bytes": len(data),
                        "at_unix_ns": at_unix_ns,
                    }
                )
    return rows


def rollup_rows(
    job: str, attempt: str, metrics: Sequence[str], level: int, number: int, buckets: Buckets, at_unix_ns: int
) -> list[dict[str, Any]]:
    """Rows to write for these buckets, one for each metric that has any value in them."""
    chosen = np.flatnonzero((buckets.mark != ValueMark.ABSENT).any(axis=(1, 2)))
    names = [metrics[int(index)] for index in chosen]
    common = {"job": job, "attempt": attempt, "level": level, "chunk": number, "ranks": buckets.ranks}
    return [
        {**common, "metric": name, **parts, "size_bytes": sum(map(len, parts.values())), "at_unix_ns": at_unix_ns}
        for name, parts in zip(names, packed(buckets.of(chosen), names), strict=True)
    ]


def put(engine: Engine, model: type[Base], rows: Sequence[dict[str, Any]]) -> None:
    """Write rows, replacing those with the same keys, in transactions of about WRITE_BYTES."""
    make = postgresql.insert if engine.dialect.name == "postgresql" else sqlite.insert
    statement: Any = make(model)
    keys = [column.name for column in model.__table__.primary_key]
    fresh = {column.name: statement.excluded[column.name] for column in model.__table__.c if column.name not in keys}
    statement = statement.on_conflict_do_update(index_elements=keys, set_=fresh)
    for part in _parts(rows):
        with write_aside(engine) as connection:
            connection.execute(statement, part)


def _parts(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    parts, size = list[list[dict[str, Any]]](), WRITE_BYTES
    for row in rows:
        if size >= WRITE_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(row)
        size += row["size_bytes"]
    return parts


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
    """What holds for its jobs instead of `keep_ns`, by project."""


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
        jobs = select(JobOwnership.job).where(JobOwnership.project.in_(projects))
        of_devices = (
            model.job.in_(select(JobOwnership.job + end).where(JobOwnership.project.in_(projects)))
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
