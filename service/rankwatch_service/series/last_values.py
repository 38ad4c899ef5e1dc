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
