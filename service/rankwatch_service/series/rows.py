"""Reads and writes the rows of series, raw and rolled up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from sqlalchemy import Engine, func, select
from sqlalchemy.dialects import postgresql, sqlite

from rankwatch_service.series.chunks import Block, Cells, absent, by_resolution, decoded, encoded, metrics_together
from rankwatch_service.series.rollups import BRANCHES, Buckets, ValueMark, packed, unpacked
from rankwatch_service.store.engine import read, write_aside
from rankwatch_service.store.models import Base, SeriesChunk, SeriesRollup

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
