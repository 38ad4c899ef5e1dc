"""When steps were made, from the times at which their chunks were written.

A chunk or row of roll-ups is written last about `writer.FLUSH_S` after its last step, or `writer.SUM_UP_S` for rows of
roll-ups. Between these moments steps are taken as equally long, so that the time of a step is exact to the steps of a
chunk (64), or to those of a row in a long range.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from sqlalchemy import Engine, Select, select

from rankwatch_detectors.base import Floats, Ints
from rankwatch_service.series.read import Range
from rankwatch_service.series.rollups import LEVELS, chunk_steps
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt, SeriesChunk, SeriesRollup

ROWS_MAX: Final = 1_024
"""Moments read for a range, all attempts apart: with more chunks in it, rows of a coarser level are read."""


class StepTimes:
    """When the steps of a range were made.

    Args:
        engine: of the store.
        wanted: steps of a metric of a job.
    """

    def __init__(self, engine: Engine, wanted: Range) -> None:
        attempts = select(Attempt.attempt, Attempt.started_unix_ns, Attempt.first_step, Attempt.last_step)
        with read(engine) as connection:
            known = connection.execute(attempts.where(Attempt.job == wanted.job)).all()
            last = max((one.last_step for one in known if one.last_step is not None), default=wanted.first)
            level = _level(min(wanted.last, last) - wanted.first)
            written = connection.execute(_written(wanted, level)).all()
        steps = chunk_steps(level)
        self._moments: dict[str, dict[int, int]] = {
            one.attempt: {one.first_step: one.started_unix_ns}
            for one in known
            if one.first_step is not None and one.started_unix_ns
        }
        ends = {one.attempt: one.last_step for one in known}
        for row in written:
            end = (row.chunk + 1) * steps - 1
            if (told := ends.get(row.attempt)) is not None:
                end = min(end, told)
            self._moments.setdefault(row.attempt, {})[end] = row.at_unix_ns

    def of(self, attempt: str, step: Ints) -> Ints:
        """Unix times in nanoseconds of steps of an attempt, never descending; empty if nothing is known of it."""
        moments = sorted(self._moments.get(attempt, {}).items())
        if not moments:
            return np.empty(0, np.int64)
        steps, times = np.array(moments, np.int64).T
        times = np.maximum.accumulate(times)
        # Relative to the first moment, since a float64 holds nanoseconds of today to 256 ns only.
        since: Floats = np.interp(step, steps, (times - times[0]).astype(np.float64))
        found: Ints = times[0] + since.astype(np.int64)
        return found


def _level(steps: int) -> int:
    """The finest level of which so many steps have at most `ROWS_MAX` rows."""
    return next((level for level in range(LEVELS) if steps <= ROWS_MAX * chunk_steps(level)), LEVELS)


def _written(wanted: Range, level: int) -> Select[str, int, int]:
    """A query for when the rows of a level were written."""
    model = SeriesRollup if level else SeriesChunk
    low, high = wanted.first // chunk_steps(level), wanted.last // chunk_steps(level)
    of_level = [SeriesRollup.level == level] if level else []
    found = select(model.attempt, model.chunk, model.at_unix_ns)
    return found.where(
        model.job == wanted.job, model.metric == wanted.metric, model.chunk.between(low, high), *of_level
    )
