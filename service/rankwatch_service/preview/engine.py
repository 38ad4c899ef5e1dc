"""Writes what the ranks of a job have reported, as the series have it, as a Parquet file that `rankwatch replay` reads.

A row for each rank and step: `attempt`, `step`, `rank`, where the rank runs, and its metrics as float32, rounded as
they are stored (`series.chunks`). What series do not have is not in it either: times of day, which steps were
evaluations, fingerprints and exact counts.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from sqlalchemy import Engine, func, select

from rankwatch import children
from rankwatch_detectors.base import Kind
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.metric_detector import MetricDetector
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_detectors.metrics import COLUMNS
from rankwatch_service.incidents.kinds import PREVIEWABLE
from rankwatch_service.job.detection import MakeDetectors
from rankwatch_service.replay.layout import HARDWARE, PLACES
from rankwatch_service.replay.report import as_json, unshared
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.series.chunks import CHUNK_STEPS, Cells, absent
from rankwatch_service.series.query import metrics
from rankwatch_service.series.rows import stored_chunk
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Attempt, SeriesChunk
from rankwatch_service.telemetry.columns import EXACT
from rankwatch_service.tuning import TuningSet

if TYPE_CHECKING:
    import pyarrow as pa

EXPORT_CELLS_MAX: Final = 100_000_000
"""Values in one export: a day of 64 ranks that take a second for a step and report 18 metrics."""

PREVIEW_CHUNKS_MAX: Final = 800
PREVIEW_CELLS_MAX: Final = 8_000_000
"""Newest chunks of 64 steps, and values, that a preview of a rule judges; what is older is left out."""

GROUP_ROWS: Final = 131_072
"""Rows of a row group, or of one chunk if it has more."""

_OWN: Final = frozenset(("time_s", "attempt", "step", "rank", "kind", *HARDWARE, *PLACES, *EXACT))


class ExportError(Exception):
    """The export cannot be made; the message says why."""


class NothingStoredError(ExportError):
    """There are no such steps."""


@dataclass(frozen=True, slots=True)
class StoredSteps:
    """Steps of a job that shall be exported, both ends included."""

    job: str
    first: int = 0
    last: int = 2**53 - 1
    metrics: tuple[str, ...] | None = None
    """Only these; None: all."""
    having: tuple[str, ...] | None = None
    """Only chunks that have one of these metrics; None: all chunks."""
    newest: bool = False
    """Whether to export only the newest chunks, instead of refusing, if there are more than a preview of a rule
    judges."""


def write_export(engine: Engine, wanted: StoredSteps, file: IO[bytes]) -> int:
    """Write the stored telemetry of some steps; returns the number of older chunks that were left out.

    Raises:
        ExportError: there is none, there is too much, or the library for Parquet is missing.
    """
    try:
        import pyarrow as pa  # noqa: PLC0415 - an extra
        from pyarrow import parquet  # noqa: PLC0415
    except ImportError as error:
        raise ExportError("Parquet needs another package: pip install 'rankwatch[replay]'") from error
    chunks, left_out = _chunks(engine, wanted)
    known = [name for name in metrics(engine, wanted.job) if wanted.metrics is None or name in wanted.metrics]
    columns = {_column(name): name for name in known if _column(name) not in _OWN}
    schema = pa.schema(
        [("attempt", pa.string()), ("step", pa.int64()), ("rank", pa.int32())]
        + [(name, pa.string()) for name in HARDWARE]
        + [(name, pa.int32()) for name in PLACES]
        + [(name, pa.float32()) for name in columns]
    )
    places = _topologies(engine, wanted.job)
    with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
        waiting: list[pa.Table] = []
        for attempt, number in chunks:
            cells = stored_chunk(engine, wanted.job, attempt, number, wanted.metrics)
            table = _table(cells, columns, wanted, (attempt, number), places.get(attempt, {}))
            waiting.append(pa.table(table, schema=schema))
            if sum(one.num_rows for one in waiting) >= GROUP_ROWS:
                writer.write_table(pa.concat_tables(waiting))
                waiting = []
        if waiting:
            writer.write_table(pa.concat_tables(waiting))
    return left_out


def _chunks(engine: Engine, wanted: StoredSteps) -> tuple[Sequence[tuple[str, int]], int]:
    """Attempt and number of each chunk, in the order in which they were trained; how many older ones are left out."""
    chunk = SeriesChunk
    names = wanted.metrics if wanted.having is None else wanted.having
    found = (
        select(chunk.attempt, chunk.chunk, func.sum(chunk.steps * chunk.ranks).label("cells"))
        .where(chunk.job == wanted.job)
        .where(chunk.chunk.between(wanted.first // CHUNK_STEPS, wanted.last // CHUNK_STEPS))
        .group_by(chunk.attempt, chunk.chunk)
    )
    if names is not None:
        found = found.where(chunk.metric.in_(names))
    known = select(Attempt.attempt, Attempt.number).where(Attempt.job == wanted.job)
    with read(engine) as connection:
        rows = connection.execute(found).all()
        order: dict[str, int] = {row.attempt: row.number for row in connection.execute(known)}
    if not rows:
        raise NothingStoredError(f"no steps of job {wanted.job!r} are stored in this range")
    rows = sorted(rows, key=lambda row: (order.get(row.attempt, 0), row.attempt, row.chunk))
    left_out = 0
    if wanted.newest:
        sizes = list(accumulate(int(row.cells) for row in reversed(rows)))
        kept = min(bisect_right(sizes, PREVIEW_CELLS_MAX), PREVIEW_CHUNKS_MAX)
        left_out = max(len(rows) - max(kept, 1), 0)
        rows = rows[left_out:]
    cells = sum(int(row.cells) for row in rows)
    if cells > EXPORT_CELLS_MAX:
        raise ExportError(f"the steps have {cells:,} values, more than {EXPORT_CELLS_MAX:,}; choose fewer of them")
    return [(row.attempt, row.chunk) for row in rows], left_out


def _topologies(engine: Engine, job: str) -> dict[str, dict[int, Mapping[str, Any]]]:
    """Host, device and parallel position, by attempt and rank."""
    with read(engine) as connection:
        rows = connection.execute(select(Attempt.attempt, Attempt.topology).where(Attempt.job == job)).all()
    return {row.attempt: {one["rank"]: one for one in row.topology.get("ranks", ())} for row in rows}


def _table(
    cells: Mapping[str, Cells],
    columns: Mapping[str, str],
    wanted: StoredSteps,
    chunk: tuple[str, int],
    places: Mapping[int, Mapping[str, Any]],
) -> dict[str, Any]:
    """The columns of a chunk's rows: all ranks of a step, then those of the next."""
    import pyarrow as pa  # noqa: PLC0415 - an extra

    attempt, number = chunk
    steps = max(len(one) for one in cells.values())
    ranks = max(one.shape[1] for one in cells.values())
    step = np.arange(steps) + number * CHUNK_STEPS
    inside = (step >= wanted.first) & (step <= wanted.last)
    reported = np.zeros((steps, ranks), dtype=np.bool_)
    for one in cells.values():
        reported[: len(one), : one.shape[1]] |= ~absent(one)
    reported &= inside[:, None]
    at, rank = np.nonzero(reported)
    here = [places.get(one, {}) for one in range(ranks)]
    table: dict[str, Any] = {"attempt": np.full(len(at), attempt, dtype=object), "step": step[at], "rank": rank}
    for name in HARDWARE:
        table[name] = np.array([str(one.get(name) or "") for one in here], dtype=object)[rank]
    for name in PLACES:
        # As replay takes it where a file says nothing: every rank a replica of its own.
        table[name] = np.array([int(one.get(name, own if name == "dp" else 0)) for own, one in enumerate(here)])[rank]
    for column, metric in columns.items():
        values, missing = _values(cells.get(metric), at, rank)
        table[column] = pa.array(values, pa.float32(), mask=missing)
    return {name: pa.array(one) if name in HARDWARE or name == "attempt" else one for name, one in table.items()}


def _values(cells: Cells | None, at: Any, rank: Any) -> tuple[Any, Any]:
    """Values of the rows, and where there are none."""
    if cells is None:
        return np.zeros(len(at), dtype=np.float32), np.ones(len(at), dtype=np.bool_)
    inside = (at < len(cells)) & (rank < cells.shape[1])
    values = np.zeros(len(at), dtype=np.float32)
    missing = ~inside
    values[inside] = cells[at[inside], rank[inside]]
    missing[inside] = absent(cells)[at[inside], rank[inside]]
    return values, missing


def _column(metric: str) -> str:
    return _COLUMNS.get(metric, metric)


_COLUMNS: Final = {metric: column for column, metric in COLUMNS.items()}


def parts(file: IO[bytes], size: int = 1024 * 1024) -> Iterator[bytes]:
    """The bytes of an open file from its beginning; closes it."""
    with file:
        file.seek(0)
        while part := file.read(size):
            yield part


PREVIEW_S_MAX: Final = 300
"""Time of a preview; one that would take longer is ended and refused."""

STEP_TIME: Final = "step_time_s"

_one_at_a_time = threading.Lock()


class OtherTunings(msgspec.Struct, frozen=True, tag=True):
    """Tunings in place of those in force."""

    before: TuningSet
    after: TuningSet


class AnotherRule(msgspec.Struct, frozen=True, tag=True):
    """A rule on a metric that there is not yet."""

    rule: MetricRule

    def steps(self, job: str) -> StoredSteps:
        """What it is judged on. Only for absence it matters that a step has no value."""
        metrics = (self.rule.metric, STEP_TIME)
        having = metrics if self.rule.when is Condition.ABSENT else (self.rule.metric,)
        return StoredSteps(job, metrics=metrics, having=having, newest=True)


Proposal = OtherTunings | AnotherRule


class PreviewRunningError(Exception):
    """There is one preview at a time."""


class PreviewFailedError(Exception):
    """The preview gave no answer; the message says why."""


class PreviewTooLongError(PreviewFailedError):
    """The preview takes longer than `PREVIEW_S_MAX`."""


def preview(engine: Engine, steps: StoredSteps, proposal: Proposal) -> dict[str, Any]:
    """What a proposal changes on stored steps of a job; see `compare`.

    Raises:
        ExportError: the steps cannot be exported.
        PreviewRunningError: another preview is running.
        PreviewFailedError: it gave no answer.
    """
    if not _one_at_a_time.acquire(blocking=False):
        raise PreviewRunningError
    try:
        with tempfile.NamedTemporaryFile(suffix=".parquet") as file:
            left_out = write_export(engine, steps, file)
            file.flush()
            return {**_in_a_process(Path(file.name), steps.job, proposal), "left_out": left_out}
    finally:
        _one_at_a_time.release()


def _in_a_process(path: Path, job: str, proposal: Proposal) -> dict[str, Any]:
    command = children.python_module(__name__, str(path), job)
    try:
        done = children.run(
            command, input=msgspec.json.encode(proposal), capture_output=True, timeout=PREVIEW_S_MAX, check=True
        )
    except subprocess.TimeoutExpired as error:
        raise PreviewTooLongError(f"it takes longer than {PREVIEW_S_MAX} s; choose fewer steps") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        raise PreviewFailedError(f"the preview has failed: {lines[-1] if lines else error}"[:500]) from error
    found: dict[str, Any] = msgspec.json.decode(done.stdout)
    return found


def compare(path: Path, job: str, proposal: Proposal) -> dict[str, Any]:
    """The incidents that are found in the export of a job with a proposal and without it.

    Raises:
        ReplayError: the file cannot be read.
    """
    rules: tuple[MetricRule, ...] = ()
    configs, kinds = [CatalogueConfig()], frozenset({Kind.METRIC})
    make_detectors: MakeDetectors = detectors
    match proposal:
        case OtherTunings(before, after):
            configs, kinds = [before.of(job).config, after.of(job).config], PREVIEWABLE
        case AnotherRule(rule):
            rules, make_detectors = (replace(rule, jobs=()),), lambda _config=None: [MetricDetector()]
    outcome = replay(
        [open_source(path)],
        {},
        configs,
        job=job,
        until_step=None,
        progress=lambda _done, _steps: None,
        rules=rules,
        make_detectors=make_detectors,
    )
    found = [[one for one in incidents if one.kind in kinds] for incidents in outcome.incidents]
    first, second = found if len(found) > 1 else ([], *found)
    only_first, only_second = unshared(first, second)
    return {
        "rows": outcome.rows,
        "steps": outcome.frames,
        "first_step": outcome.first_step,
        "last_step": outcome.last_step,
        "both": len(first) - len(only_first),
        "does_not_open": [as_json(one, outcome.named) for one in only_first],
        "opens": [as_json(one, outcome.named) for one in only_second],
    }


if __name__ == "__main__":
    os.nice(10)
    wanted = msgspec.json.decode(sys.stdin.buffer.read(), type=Proposal)
    sys.stdout.buffer.write(msgspec.json.encode(compare(Path(sys.argv[1]), sys.argv[2], wanted)))
