"""What a rule would have found in a job's own past: its stored series, through the detector that judges live ones.

Values are those of the raw chunks, exact within their rounding (`series.chunks`); where only roll-ups are left, nothing
is judged. Steps have no stored time: it is added up from `step_time_s`, so of a rule with `hold_s` an incident may open
some seconds earlier or later than it would have, as pauses between steps are not known.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import zstandard
from sqlalchemy import Connection, Row, select

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, StepKind, Topology
from rankwatch_detectors.metric_rule import Condition, MetricRule
from rankwatch_detectors.rules.metric_detector import MetricDetector
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.series.chunks import CHUNK_STEPS, Cells, absent, decoded, widened
from rankwatch_service.store.models import Attempt, SeriesChunk

STEP_TIME: Final = "step_time_s"

PREVIEW_CHUNKS_MAX: Final = 800
PREVIEW_CELLS_MAX: Final = 8_000_000
"""Newest chunks of 64 steps, and values, that a preview judges: two seconds of one core. What is older is left out."""


@dataclass(slots=True)
class PreviewedIncident:
    """An incident that a rule would have opened."""

    opened: Finding
    closed: Finding | None = None
    """None: it would be open still."""


@dataclass(slots=True)
class Preview:
    """What a rule would have found, and in what."""

    incidents: list[PreviewedIncident] = field(default_factory=list)
    steps: int = 0
    """Steps that were judged, all attempts together."""
    first_step: int | None = None
    last_step: int | None = None
    left_out: int = 0
    """Older chunks that were not judged, as there are too many."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    name: str
    topology: Topology
    began_s: float


def preview(connection: Connection, job: str, rule: MetricRule) -> Preview:
    """Judge the stored past of one job by one rule."""
    found = Preview()
    chosen = _chosen(connection, job, rule, found)
    detector = MetricDetector()
    rule = replace(rule, jobs=())
    open_one: PreviewedIncident | None = None
    for observation in _observations(connection, job, rule, chosen):
        if isinstance(observation, Frame):
            found.steps += 1
            found.first_step = observation.step if found.first_step is None else found.first_step
            found.last_step = observation.step
        for finding in detector.observe(observation):
            if finding.change is Change.OPEN:
                open_one = PreviewedIncident(finding)
                found.incidents.append(open_one)
            elif finding.change is Change.CLOSE and open_one is not None:
                open_one.closed, open_one = finding, None
    return found


def _chosen(connection: Connection, job: str, rule: MetricRule, found: Preview) -> dict[str, list[int]]:
    """By attempt, in order, the numbers of the newest chunks, as many as a preview judges."""
    names = [rule.metric, STEP_TIME] if rule.when is Condition.ABSENT else [rule.metric]
    known = (
        select(SeriesChunk.attempt, SeriesChunk.chunk, SeriesChunk.steps, SeriesChunk.ranks, Attempt.number)
        .join(Attempt, (Attempt.job == SeriesChunk.job) & (Attempt.attempt == SeriesChunk.attempt))
        .where(SeriesChunk.job == job, SeriesChunk.metric.in_(names))
        .order_by(Attempt.number.desc(), SeriesChunk.chunk.desc())
    )
    chosen: dict[str, list[int]] = defaultdict(list)
    chunks = cells = 0
    for row in connection.execute(known):
        if row.chunk in chosen[row.attempt][-1:]:
            continue  # the other metric of the same steps
        chunks, cells = chunks + 1, cells + row.steps * row.ranks
        if chunks > PREVIEW_CHUNKS_MAX or cells > PREVIEW_CELLS_MAX:
            found.left_out += 1
        else:
            chosen[row.attempt].append(row.chunk)
    return {attempt: numbers[::-1] for attempt, numbers in reversed(chosen.items()) if numbers}


def _observations(
    connection: Connection, job: str, rule: MetricRule, chosen: Mapping[str, list[int]]
) -> Iterator[AttemptStart | Frame]:
    decompressor = zstandard.ZstdDecompressor()
    now_s = 0.0
    for name, numbers in chosen.items():
        attempt = _attempt(connection, job, name)
        now_s = max(now_s, attempt.began_s)
        yield AttemptStart(name, attempt.topology, now_s, (rule,))
        for number in numbers:
            cells = _cells(connection, job, name, number, rule.metric, decompressor)
            for frame in _frames(attempt, number, rule, cells, now_s):
                now_s = frame.time_s
                yield frame


def _frames(
    attempt: _Attempt, number: int, rule: MetricRule, cells: Mapping[str, Cells], now_s: float
) -> Iterator[Frame]:
    ranks = attempt.topology.world_size
    for index in range(CHUNK_STEPS):
        columns = {name: widened(block[index], ranks)[:ranks] for name, block in cells.items() if index < len(block)}
        present = {name: ~absent(column) for name, column in columns.items()}
        if STEP_TIME in columns:
            told = columns[STEP_TIME][present[STEP_TIME]]
            told = told[np.isfinite(told)]
            now_s += float(np.median(told.astype(np.float64))) if told.size else 0.0
        here = rule.metric in columns and bool(present[rule.metric].any())
        # Only for absence it matters that a step has no value.
        if not here and not (rule.when is Condition.ABSENT and STEP_TIME in columns and present[STEP_TIME].any()):
            continue
        values = {rule.metric: columns[rule.metric].astype(np.float64)} if here else {}
        shown = {rule.metric: present[rule.metric]} if here else {}
        yield Frame(attempt.name, "steps", number * CHUNK_STEPS + index, StepKind.TRAIN, now_s, values, shown)


def _cells(
    connection: Connection,
    job: str,
    attempt: str,
    number: int,
    metric: str,
    decompressor: zstandard.ZstdDecompressor,
) -> dict[str, Cells]:
    """The cells of one chunk: of the metric, and of the times of its steps."""
    rows = connection.execute(
        select(SeriesChunk.metric, SeriesChunk.ranks, SeriesChunk.data).where(
            SeriesChunk.job == job,
            SeriesChunk.attempt == attempt,
            SeriesChunk.metric.in_([metric, STEP_TIME]),
            SeriesChunk.chunk == number,
        )
    )
    return {row.metric: decoded(row.data, row.ranks, decompressor) for row in rows}


def _attempt(connection: Connection, job: str, name: str) -> _Attempt:
    row = connection.execute(
        select(Attempt.world_size, Attempt.topology, Attempt.started_unix_ns).where(
            Attempt.job == job, Attempt.attempt == name
        )
    ).one()
    return _Attempt(name, _topology(row), row.started_unix_ns / 1e9)


def _topology(row: Row[Any]) -> Topology:
    state = TopologyState()
    places = ("host", "switch", "device_uuid", "dp", "tp", "pp", "cp", "ep")
    state.learn(
        wire.RankInfo(one["rank"], row.world_size, **{name: one[name] for name in places if name in one})
        for one in row.topology.get("ranks", ())
    )
    return state.topology()
