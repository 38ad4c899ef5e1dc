"""Replays files: from rows to the incidents of one or several detector configurations, in one pass."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rankwatch_detectors.base import AttemptStart, Observation
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.metric_rule import MetricRule
from rankwatch_service.incidents.model import Incident
from rankwatch_service.incidents.transition import TransitionKind, Update
from rankwatch_service.job.detection import DetectionPipeline, MakeDetectors, room_beside
from rankwatch_service.job.detector_bank import Failure
from rankwatch_service.job.topology_state import TopologyState
from rankwatch_service.replay.layout import METRICS, ReplayError
from rankwatch_service.replay.merge import merged
from rankwatch_service.replay.player import Player
from rankwatch_service.replay.rows import FileSource, RowBlock, RowReader

OnProgress = Callable[[int, int], None]
"""(done, total), in units of the sources."""

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
        progress: called after each batch of rows.
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
            for told, failures in _judged(pipeline, together):
                outcome.failures += [f"{failure.detector}: {failure.error}" for failure in failures]
                for news in told:
                    if news.what is TransitionKind.OPENED and not any(one is news.incident for one in known_ones):
                        known_ones.append(news.incident)
    for pipeline in pipelines:
        # There are no more rows: what ended by itself does not come back.
        pipeline.correlator.settle(math.inf)
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
    total = sum(reader.total for reader in readers)
    names = dict.fromkeys(name for reader in readers for name in reader.measured)
    try:
        for rows in merged(readers):
            kept = rows if until_step is None else _until(rows, until_step)
            names |= dict.fromkeys((*rows.records.names, *rows.records.exact))
            if kept is not None:
                yield from player.play(kept)
                outcome.ranks = max(outcome.ranks, player.ranks)
            progress(rows.done, total)
            if kept is None:
                break
    except ReplayError as error:
        outcome.broken = error
        outcome.ranks = max(outcome.ranks, player.ranks)
    yield from player.end()
    ours = {metric: column for column, metric in METRICS.items()}
    outcome.metrics = [ours.get(name, name) for name in names]


def _until(rows: RowBlock, last_step: int) -> RowBlock | None:
    """The rows up to a step; None if all are beyond it."""
    beyond = rows.records.step > last_step
    if not beyond.any():
        return rows
    count = int(beyond.argmax())
    return rows.part(0, count) if count else None
