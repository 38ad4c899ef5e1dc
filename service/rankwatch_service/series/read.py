"""Reads what a chart needs of a series: raw chunks for a short range, and for a longer one the coarsest roll-ups that
still have a bucket for each point. A limit of cells bounds the time of a query.

When steps were made, from the times at which their chunks were written.

A chunk or row of roll-ups is written last about `writer.FLUSH_S` after its last step, or `writer.SUM_UP_S` for rows of
roll-ups. Between these moments steps are taken as equally long, so that the time of a step is exact to the steps of a
chunk (64), or to those of a row in a long range.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import zstandard
from sqlalchemy import Connection, Engine, Row, Select, func, select

from rankwatch_detectors.base import Floats, Ints
from rankwatch_service.series.chunks import CHUNK_STEPS, Cells, decoded
from rankwatch_service.series.rollups import BRANCHES, LEVELS, bucket_steps, chunk_steps
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt, SeriesChunk, SeriesRollup

TAIL_CHUNKS: Final = 8
"""Newest raw chunks of an attempt that its roll-ups may not have yet."""

COUNTED_ROWS: Final = 8
"""Rows of a level that are enough to estimate the number of steps, to an eighth."""


@dataclass(frozen=True, slots=True)
class SeriesSlice:
    """Raw cells of one attempt (`row` None), or a row of roll-ups."""

    attempt: str
    step: Ints
    """First step of each bucket, -1 for buckets outside of the range; or every step of raw cells."""
    cells: Cells | None
    """[step, rank]; None for a row of roll-ups."""
    row: Row[Any] | None
    """Row of `series_rollup`; None for raw cells."""


@dataclass(frozen=True, slots=True)
class Range:
    """Steps of one metric of a job, both ends included."""

    job: str
    metric: str
    first: int
    last: int


class Reader:
    """Reads for one query, in one transaction."""

    def __init__(self, connection: Connection, wanted: Range) -> None:
        self._connection = connection
        self._wanted = wanted
        self._decompressor = zstandard.ZstdDecompressor()
        known = select(Attempt.attempt, Attempt.number, Attempt.first_step).where(Attempt.job == wanted.job)
        rows = connection.execute(known.order_by(Attempt.number)).all()
        self.order = {row.attempt: row.number for row in rows}
        """Number of each attempt."""
        self.began = {row.attempt: row.first_step for row in rows}

    def level(self, points: int, cells_max: int) -> int:
        """The coarsest level with at least `points` buckets, or a coarser one if that has more than `cells_max` cells.

        Level 0 is the raw chunks.
        """
        steps = self._steps()
        ranks = self._connection.scalar(self._of(SeriesChunk.ranks).order_by(SeriesChunk.chunk.desc()).limit(1)) or 1
        level = max(level for level in range(LEVELS + 1) if level == 0 or steps >= points * bucket_steps(level))
        while level < LEVELS and steps * ranks > cells_max * bucket_steps(level):
            level += 1
        return level

    def parts(self, level: int, columns: Sequence[Any]) -> list[SeriesSlice]:
        """All slices of the range, in the order of attempts and steps.

        Args:
            level: which level to read (see `level`).
            columns: the columns of SeriesRollup that are needed.
        """
        if level == 0:
            raw = self._raw(self._chunks())
            found = [*self._instead_of(raw, columns), *raw]
        else:
            found = [*self._rolled(level, columns), *self._tail()]
        return sorted(found, key=lambda part: (self.order.get(part.attempt, 0), part.attempt, int(part.step[0])))

    # ---- how much there is -----------------------------------------------------------------------------------------

    def _steps(self) -> int:
        """About how many steps of the range are stored, all attempts together."""
        # Rows of the coarsest level that has enough are counted, since these are few; raw chunks in a short range only.
        wanted = self._wanted
        at_most = (wanted.last - wanted.first + 1) * max(len(self.order), 1)
        for level in range(LEVELS, 0, -1):
            rows = self._connection.scalar(self._of_level(level, func.count())) or 0
            if rows >= COUNTED_ROWS:
                return min(rows * chunk_steps(level), at_most)
        raw = self._connection.scalar(self._of(func.sum(SeriesChunk.steps))) or 0
        return min(int(raw) or rows * chunk_steps(1), at_most)

    def _of(self, *columns: Any) -> Select[Any]:
        """A query for raw chunks of the range."""
        wanted = self._wanted
        low, high = wanted.first // CHUNK_STEPS, wanted.last // CHUNK_STEPS
        return select(*columns).where(
            SeriesChunk.job == wanted.job, SeriesChunk.metric == wanted.metric, SeriesChunk.chunk.between(low, high)
        )

    def _of_level(self, level: int, *columns: Any) -> Select[Any]:
        """A query for rows of a level of the range."""
        wanted, steps = self._wanted, chunk_steps(level)
        return select(*columns).where(
            SeriesRollup.job == wanted.job,
            SeriesRollup.metric == wanted.metric,
            SeriesRollup.level == level,
            SeriesRollup.chunk.between(wanted.first // steps, wanted.last // steps),
        )

    # ---- raw -------------------------------------------------------------------------------------------------------

    def _chunks(self) -> Sequence[Any]:
        chosen = (SeriesChunk.attempt, SeriesChunk.chunk, SeriesChunk.ranks, SeriesChunk.data)
        return self._connection.execute(self._of(*chosen).order_by(SeriesChunk.chunk)).all()

    def _raw(self, rows: Sequence[Any]) -> list[SeriesSlice]:
        parts = []
        for row in rows:
            cells = decoded(row.data, self._decompressor)
            step = np.arange(len(cells)) + row.chunk * CHUNK_STEPS
            if len(step) and (step[0] < self._wanted.first or step[-1] > self._wanted.last):
                inside = (step >= self._wanted.first) & (step <= self._wanted.last)
                step, cells = step[inside], cells[inside]
            if len(step):
                parts.append(SeriesSlice(row.attempt, step, cells, None))
        return parts

    def _instead_of(self, raw: Sequence[SeriesSlice], columns: Sequence[Any]) -> list[SeriesSlice]:
        """Level 1 in place of raw chunks that were removed."""
        held = {(part.attempt, int(part.step[0]) // CHUNK_STEPS) for part in raw}
        first, last = self._wanted.first // CHUNK_STEPS, self._wanted.last // CHUNK_STEPS

        def missing(attempt: str, number: int) -> bool:
            children = range(max(number * BRANCHES, first), min((number + 1) * BRANCHES - 1, last) + 1)
            return any((attempt, child) not in held for child in children)

        def keep(attempt: str, step: Ints) -> Any:
            return np.array([(attempt, one // CHUNK_STEPS) not in held for one in step.tolist()])

        rows = self._connection.execute(self._of_level(1, SeriesRollup.attempt, SeriesRollup.chunk)).all()
        numbers = [row.chunk for row in rows if missing(row.attempt, row.chunk)]
        return self._rolled(1, columns, numbers, keep) if numbers else []

    # ---- rolled up -------------------------------------------------------------------------------------------------

    def _rolled(
        self,
        level: int,
        columns: Sequence[Any],
        numbers: Sequence[int] | None = None,
        keep: Callable[[str, Ints], Any] | None = None,
    ) -> list[SeriesSlice]:
        found = self._of_level(level, SeriesRollup.attempt, SeriesRollup.chunk, SeriesRollup.ranks, *columns)
        if numbers is not None:
            found = found.where(SeriesRollup.chunk.in_(numbers))
        parts = []
        width = bucket_steps(level)
        for row in self._connection.execute(found.order_by(SeriesRollup.chunk)):
            step = np.arange(BRANCHES) * width + row.chunk * chunk_steps(level)
            inside = (step + width > self._wanted.first) & (step <= self._wanted.last)
            if keep is not None:
                inside &= keep(row.attempt, step)
            if inside.any():
                parts.append(SeriesSlice(row.attempt, np.where(inside, step, -1), None, row))
        return parts

    def _tail(self) -> list[SeriesSlice]:
        """Raw chunks that are newer than the roll-ups."""
        wanted = self._wanted
        rows = self._connection.execute(
            self._of_level(1, SeriesRollup.at_unix_ns).order_by(SeriesRollup.chunk.desc()).limit(TAIL_CHUNKS)
        ).all()
        rolled_unix_ns = max((row.at_unix_ns for row in rows), default=-1)
        parts: list[SeriesSlice] = []
        # Roll-ups of earlier attempts are complete, because the writer writes an attempt whole when it drops it.
        for attempt in sorted(self.order, key=self.order.__getitem__)[-2:] or [None]:
            mine = [SeriesChunk.attempt == attempt] if attempt is not None else []
            newest = self._of(SeriesChunk.attempt, SeriesChunk.chunk, SeriesChunk.at_unix_ns).where(*mine)
            for row in self._connection.execute(newest.order_by(SeriesChunk.chunk.desc()).limit(TAIL_CHUNKS)).all():
                if row.at_unix_ns > rolled_unix_ns:
                    chosen = select(SeriesChunk.attempt, SeriesChunk.chunk, SeriesChunk.ranks, SeriesChunk.data).where(
                        SeriesChunk.job == wanted.job,
                        SeriesChunk.attempt == row.attempt,
                        SeriesChunk.metric == wanted.metric,
                        SeriesChunk.chunk == row.chunk,
                    )
                    parts += self._raw(self._connection.execute(chosen).all())
        return parts


ROWS_MAX: Final = 1_024
"""Moments read for a range, all attempts apart: with more chunks in it, rows of a coarser level are read."""


class StepTimes:
    """When the steps of a range were made."""

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
            if (reported := ends.get(row.attempt)) is not None:
                end = min(end, reported)
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
