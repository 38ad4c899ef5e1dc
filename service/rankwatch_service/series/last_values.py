"""The newest values of a series, for tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from sqlalchemy import Engine, select

from rankwatch_service.series.chunks import CHUNK_STEPS, absent, decoded
from rankwatch_service.series.query import metrics
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import SeriesChunk


@dataclass(slots=True)
class LastValues:
    """The newest values of one rank."""

    step: int = -1
    """The newest step with a value; -1: there is none."""
    values: dict[str, float] = field(default_factory=dict)
    """By metric; those without a value in the newest chunk are absent."""


def last_values(engine: Engine, job: str, ranks: Sequence[int]) -> list[LastValues]:
    """The newest value of each metric that a rank has in the newest chunk of that metric.

    Args:
        engine: the store.
        job: its name, or the name of the series of its devices.
        ranks: whose values.
    """
    found = [LastValues() for _ in ranks]
    for metric in metrics(engine, job):
        mine = (SeriesChunk.job == job, SeriesChunk.metric == metric)
        query = select(SeriesChunk.chunk, SeriesChunk.ranks, SeriesChunk.data).where(*mine)
        with read(engine) as connection:
            row = connection.execute(query.order_by(SeriesChunk.chunk.desc()).limit(1)).first()
        if row is None:
            continue
        cells = decoded(row.data, row.ranks)
        here = ~absent(cells)
        last = len(cells) - 1 - np.argmax(here[::-1], axis=0)
        for newest, rank in zip(found, ranks, strict=True):
            if rank < cells.shape[1] and here[last[rank], rank]:
                newest.values[metric] = float(cells[last[rank], rank])
                newest.step = max(newest.step, row.chunk * CHUNK_STEPS + int(last[rank]))
    return found
