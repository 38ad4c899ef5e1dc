"""Replays files: from rows to the incidents of one or several detector configurations, in one pass.

Several files of one job, one for each rank, host or period, are read as if they were one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np

from rankwatch_detectors.base import AttemptStart, Bools, Floats, Ints, Observation
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_detectors.metrics import COLUMNS
from rankwatch_service.incidents.model import Incident, TransitionKind, Update
from rankwatch_service.job.detection import DetectionPipeline, Failure, MakeDetectors, room_beside
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.replay.layout import ReplayError
from rankwatch_service.replay.player import Player, Timeline
from rankwatch_service.replay.rows import FileSource, RowBlock, RowReader, runs
from rankwatch_service.telemetry.columns import Exact, Records

SLICE: Final = 1.0
"""Rows of so many seconds (of one step, in files without times) are merged at a time."""


@dataclass(slots=True)
class _Cursor:
    """The reading position in one file."""

    stream: Iterator[RowBlock]
    timeline: Timeline
    rows: RowBlock | None = None
    key: Floats | None = None
    at: int = 0

    def advance(self) -> bool:
        """Read until there is a next row; False at the end of the file."""
        if self.rows is None or self.at >= len(self.rows.records.step):
            self.rows, self.at = next(self.stream, None), 0
            if self.rows is not None:
                steps = np.maximum.accumulate(self.rows.records.step).astype(np.float64)
                if self.rows.time_s is None:
                    self.key = steps
                else:
                    self.key = self.timeline.of(self.rows)
                    self.rows = replace(self.rows, time_s=self.key)
        return self.rows is not None

    @property
    def head(self) -> float:
        assert self.key is not None
        return float(self.key[self.at])


def merged(readers: Sequence[RowReader]) -> Iterator[RowBlock]:
    """The rows of all files, in the order of their times.

    Raises:
        ReplayError: some files have times and some have none, or one of them is wrong.
    """
    if len(readers) == 1:
        yield from readers[0].rows()
        return
    timed = ["time_s" in reader.known for reader in readers]
    if any(timed) and not all(timed):
        raise ReplayError(readers[timed.index(False)].path, "missing, and other files have it", column="time_s")
    cursors = [_Cursor(reader.rows(), Timeline()) for reader in readers]
    done = dict.fromkeys(range(len(readers)), 0)
    while heads := [(cursor.head, index) for index, cursor in enumerate(cursors) if cursor.advance()]:
        limit = min(heads)[0] + SLICE
        parts = []
        for _, index in heads:
            cursor = cursors[index]
            while cursor.advance() and cursor.head < limit:
                assert cursor.rows is not None
                assert cursor.key is not None
                end = int(np.searchsorted(cursor.key, limit, side="left"))
                parts.append(cursor.rows.part(cursor.at, end))
                done[index], cursor.at = cursor.rows.done, end
        yield _joined(parts, sum(done.values()))


def _joined(parts: Sequence[RowBlock], done: int) -> RowBlock:
    """Joins parts of several files; a column that a file lacks is not measured there.

    Errors that are found later name the first of the files, and the row in it where its part begins.
    """
    sizes = [len(part.records.step) for part in parts]
    names = tuple(dict.fromkeys(name for part in parts for name in part.records.names))
    values, present = np.zeros((len(names), sum(sizes))), np.zeros((len(names), sum(sizes)), dtype=np.bool_)
    codes, known = np.zeros(sum(sizes), dtype=np.int64), dict[str, int]()
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        records = part.records
        for row, name in enumerate(records.names):
            to = names.index(name)
            values[to, begin : begin + size] = records.values[row]
            present[to, begin : begin + size] = True if records.present is None else records.present[row]
        for text, at in part.attempts:
            codes[begin + at : begin + size] = known.setdefault(text, len(known))
        begin += size
    times = None if parts[0].time_s is None else np.concatenate([_reported(part.time_s) for part in parts])
    joined = Records(
        step=np.concatenate([part.records.step for part in parts]),
        rank=np.concatenate([part.records.rank for part in parts]),
        kind=np.concatenate([part.records.kind for part in parts]),
        names=names,
        values=values,
        present=present,
        exact={name: _exact(parts, name) for name in dict.fromkeys(n for p in parts for n in p.records.exact)},
    )
    # Within an attempt the order of files says nothing; of two attempts the one comes first whose rows begin earlier.
    key = joined.step if times is None else times
    began = np.arange(len(known)) if times is None else [times[codes == code].min() for code in range(len(known))]
    place = np.empty(len(known), dtype=np.int64)
    place[np.argsort(began, kind="stable")] = np.arange(len(known))
    order = np.lexsort((key, place[codes]))
    hardware = {name: _texts(parts, name) for name in dict.fromkeys(n for p in parts for n in p.hardware)}
    places = {name: _column(parts, name) for name in dict.fromkeys(n for p in parts for n in p.places)}
    return RowBlock(
        path=parts[0].path,
        first_row=parts[0].first_row,
        time_s=None if times is None else times[order],
        attempts=runs(list(known), codes[order]),
        records=joined.rows(order),
        places={name: column[order] for name, column in places.items()},
        hardware={name: (known_texts, which[order]) for name, (known_texts, which) in hardware.items()},
        done=done,
    )


def _reported(time_s: Floats | None) -> Floats:
    assert time_s is not None
    return time_s


def _exact(parts: Sequence[RowBlock], name: str) -> Exact:
    values: list[Ints] = []
    present: list[Bools] = []
    for part in parts:
        rows, column = len(part.records.step), part.records.exact.get(name)
        values.append(np.zeros(rows, dtype=np.int64) if column is None else column.values)
        everywhere = np.full(rows, column is not None)
        present.append(everywhere if column is None or column.present is None else column.present)
    return Exact(np.concatenate(values), np.concatenate(present))


def _column(parts: Sequence[RowBlock], name: str) -> Ints:
    return np.concatenate([part.places.get(name, np.zeros(len(part.records.step), np.int64)) for part in parts])


def _texts(parts: Sequence[RowBlock], name: str) -> tuple[list[str], Ints]:
    known: dict[str, int] = {}
    codes = []
    for part in parts:
        names, which = part.hardware.get(name) or ([""], np.zeros(len(part.records.step), dtype=np.int64))
        numbers = np.asarray([known.setdefault(text, len(known)) for text in names], dtype=np.int64)
        codes.append(numbers[which])
    return list(known), np.concatenate(codes)


OnProgress = Callable[[int, int], None]
"""(done, frames): how far it has read, in units of the sources, and the steps that it has judged."""

PROGRESS_EVERY: Final = 1_024
"""Observations after which progress is reported."""

Together = list[tuple[Observation, TopologyState]]


@dataclass(slots=True)
class ReplayResult:
    """What a replay found, and what it read."""

    incidents: list[list[Incident]]
    """By configuration, in the order in which they opened."""
    rows: int = 0
    frames: int = 0
    ranks: int = 0
    named: bool = False
    """Whether rows name their rank; otherwise there is one series for the whole job."""
    accelerated: bool = False
    """Whether an hour of a rank is one of a GPU or another device."""
    first_step: int | None = None
    last_step: int = -1
    columns: set[str] = field(default_factory=set)
    """The known columns that the files have, and those derived from them."""
    metrics: list[str] = field(default_factory=list)
    left_out_columns: list[str] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Rows and values that did not reach the detectors, by reason, as the stream counts them."""
    failures: list[str] = field(default_factory=list)
    broken: ReplayError | None = None
    """The error that ended reading; all rows before it were judged."""


def replay(
    sources: Sequence[FileSource],
    mapping: Mapping[str, str],
    configs: Sequence[CatalogueConfig],
    *,
    job: str,
    until_step: int | None,
    progress: OnProgress,
    rules: Sequence[MetricRule] = (),
    make_detectors: MakeDetectors = detectors,
) -> ReplayResult:
    """Run the detectors and the correlator over recorded telemetry.

    Args:
        sources: files of one job.
        mapping: from their column names to the known ones.
        configs: configurations of the detectors; each is run separately over all rows.
        job: its name.
        until_step: the last step to read; None = all.
        progress: called now and then.
        rules: of people on its metrics, whichever jobs they are for.
        make_detectors: makes the detectors of a configuration.

    Raises:
        ReplayError: the header of a file is wrong. An error in its rows is returned in the result.
    """
    readers = [RowReader(source, mapping) for source in sources]
    pipelines = [
        DetectionPipeline(job, lambda config=config: make_detectors(config), lambda: tuple(rules)) for config in configs
    ]
    outcome = ReplayResult([[] for _ in configs])
    known = set().union(*(reader.known for reader in readers))
    outcome.named = "rank" in known
    player = Player()
    for together in _together(_observations(readers, player, until_step, outcome, progress), player):
        for pipeline, known_ones in zip(pipelines, outcome.incidents, strict=True):
            for reported, failures in _judged(pipeline, together):
                outcome.failures += [f"{failure.detector}: {failure.error}" for failure in failures]
                for news in reported:
                    if news.what is TransitionKind.OPENED and not any(one is news.incident for one in known_ones):
                        known_ones.append(news.incident)
    for pipeline in pipelines:
        # There are no more rows: what ended by itself does not come back.
        pipeline.correlator.resolve_ended(math.inf)
    outcome.rows, outcome.accelerated = player.rows, player.topology_state.accelerated
    outcome.frames, outcome.first_step, outcome.last_step = player.frames, player.first_step, player.last_step
    outcome.columns = {*outcome.metrics, *(known & {"rank", "time_s"})}
    outcome.left_out = player.counts
    outcome.left_out_columns = sorted(set().union(*(reader.left_out for reader in readers)))
    return outcome


def _together(observations: Iterable[Observation], player: Player) -> Iterator[Together]:
    """Observations with the topology as of each, in groups that detectors may judge together."""
    together: Together = []
    for observation in observations:
        full = bool(together) and len(together) > room_beside(together[-1][0])
        if full or (together and isinstance(observation, AttemptStart)):
            yield together
            together = []
        together.append((observation, player.topology_state))
    if together:
        yield together


def _judged(pipeline: DetectionPipeline, together: Together) -> Iterator[tuple[list[Update], list[Failure]]]:
    for place, (observation, topology_state) in enumerate(together):
        yield pipeline.observe(observation, topology_state, (one for one, _ in together[place + 1 :]))


def _observations(
    readers: Sequence[RowReader], player: Player, until_step: int | None, outcome: ReplayResult, progress: OnProgress
) -> Iterator[Observation]:
    done = 0
    names = dict.fromkeys(name for reader in readers for name in reader.measured)
    try:
        for rows in merged(readers):
            kept = rows if until_step is None else _until(rows, until_step)
            names |= dict.fromkeys((*rows.records.names, *rows.records.exact))
            if kept is not None:
                before, size = player.rows, len(rows.records.step)
                for number, observation in enumerate(player.play(kept)):
                    yield observation
                    if number % PROGRESS_EVERY == 0:
                        progress(done + (rows.done - done) * (player.rows - before) // size, player.frames)
                outcome.ranks = max(outcome.ranks, player.ranks)
            done = rows.done
            progress(done, player.frames)
            if kept is None:
                break
    except ReplayError as error:
        outcome.broken = error
        outcome.ranks = max(outcome.ranks, player.ranks)
    yield from player.end()
    ours = {metric: column for column, metric in COLUMNS.items()}
    outcome.metrics = [ours.get(name, name) for name in names]


def _until(rows: RowBlock, last_step: int) -> RowBlock | None:
    """The rows up to a step; None if all are beyond it."""
    beyond = rows.records.step > last_step
    if not beyond.any():
        return rows
    count = int(beyond.argmax())
    return rows.part(0, count) if count else None
