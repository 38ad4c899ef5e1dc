"""Replays recorded series with labels and scores the findings."""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankwatch_detectors.base import Finding, Kind, Observation, Severity
from rankwatch_service.incidents.transition import TransitionKind, Update
from rankwatch_service.replay.player import Player
from rankwatch_service.replay.rows import RowBlock, RowReader
from rankwatch_service.replay.sources import open_source
from suite.pipeline import recording_pipeline, updates_of

ANSWERS = {
    "loss": {Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE},
    "grad_norm": {Kind.GRAD_NORM},
    "nonfinite": {Kind.NONFINITE},
    "missing": {Kind.NONFINITE, Kind.TELEMETRY_LOST},
    "step_time": {Kind.HANG, Kind.SLOWDOWN},
    "log_silence": {Kind.HANG},
}
"""By channel of an event: the kinds that answer it."""


@dataclass(frozen=True)
class LabelledEvent:
    """One labelled stretch of steps."""

    channel: str
    kind: str
    start: int
    end: int
    must: bool


@dataclass(frozen=True)
class Opened:
    """One incident, as it stood in the end."""

    kind: Kind
    step: int
    """In which it was told; -1 where it is not of a step."""
    summary: str
    ranks: tuple[int, ...]
    pages: bool
    """It was more than information at some time: whoever is on call was notified."""

    def __str__(self) -> str:
        return f"{self.kind} {self.step}: {self.summary}"


@dataclass
class ScoredSeries:
    """The score of one series."""

    name: str
    points: int = 0
    events: list[LabelledEvent] = field(default_factory=list)
    found: list[tuple[LabelledEvent, int | None]] = field(default_factory=list)
    """Each `must` event with the points until it was found; None if it was not."""
    false: list[str] = field(default_factory=list)
    """Pages: critical and warning incidents that no label asks for."""
    informed: list[str] = field(default_factory=list)
    """False ones that stayed information, which nobody is notified of."""
    incidents: int = 0
    notes: str = ""

    def accuse(self, opened: Iterable[Opened]) -> None:
        """These are false."""
        for one in opened:
            (self.false if one.pages else self.informed).append(str(one))


@dataclass
class Heard:
    """The findings and incidents of a replayed file."""

    findings: list[Finding]
    opened: list[Opened]
    points: int


def listen(path: Path, mapping: dict[str, str]) -> Heard:
    """Replay one file; findings for what was seen, incidents for whom it would have disturbed: no facts of the job."""
    heard = Heard([], [], 0)
    opened: dict[str, Opened] = {}
    player = Player()
    pipeline = recording_pipeline(heard.findings)
    for observation in _played(player, RowReader(open_source(path), mapping).rows(), heard):
        for news in updates_of(pipeline, observation, player.topology_state):
            _note(opened, news)
    heard.opened += opened.values()
    return heard


def _note(opened: dict[str, Opened], news: Update) -> None:
    """Take down an incident that opens, and whether it becomes one that pages."""
    incident, pages = news.incident, news.incident.severity is not Severity.INFO
    before = opened.get(incident.id)
    if before is not None:
        opened[incident.id] = replace(before, pages=before.pages or pages)
    elif pages or (news.what is TransitionKind.OPENED and not incident.first.standing):
        step = -1 if incident.detected_step is None else incident.detected_step
        opened[incident.id] = Opened(incident.kind, step, incident.summary, incident.ranks, pages)


def _played(player: Player, parts: Iterable[RowBlock], heard: Heard) -> Iterator[Observation]:
    for rows in parts:
        heard.points += len(rows.records.step)
        yield from player.play(rows)
    yield from player.end()


def events_of(labels: dict[str, Any]) -> list[LabelledEvent]:
    """All events of a series that have a place in steps."""
    events = []
    visible = labels.get("visible_events")
    for channel, listed in visible.items() if isinstance(visible, dict) else ():
        for event in listed:
            if channel not in ANSWERS:
                continue
            start = next(event[name] for name in ("start", "row", "first_step") if name in event)
            # A silence begins after its row and ends with the next one; what is not finite stays so for its rows.
            end = event.get("end", start + event.get("rows", 1))
            events.append(LabelledEvent(channel, event["kind"], start, end, event.get("scoring") == "must"))
    shifts = labels.get("step_time_summary", {}).get("level_shifts", [])
    return events + [
        LabelledEvent("step_time", s["kind"], s["start"], s["end"], s.get("scoring") == "must") for s in shifts
    ]


def _inside(step: int, events: Sequence[LabelledEvent]) -> bool:
    return any(event.start <= step <= event.end for event in events)


def curve(mapping: dict[str, str]) -> Callable[[Path, str, dict[str, Any]], ScoredSeries]:
    """A family whose files have one row for each step."""

    def score(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
        path = folder / labels["file"]
        with gzip.open(path, "rt") as file:
            header = next(csv.reader(file))
        heard = listen(path, {theirs: ours for theirs, ours in mapping.items() if theirs in header})
        series = ScoredSeries(name, heard.points, events_of(labels), incidents=len(heard.opened))
        interval = int(labels.get("log_interval_steps") or 1)
        for event in series.events:
            if event.must:
                steps = [
                    f.detected_step
                    for f in heard.findings
                    if f.kind in ANSWERS[event.channel]
                    and f.detected_step is not None
                    and event.start <= f.detected_step <= event.end
                ]
                series.found.append((event, (min(steps) - event.start) // max(interval, 1) if steps else None))
        started = labels.get("startup_until_step") or labels.get("startup_until_row") or 0
        series.accuse(one for one in heard.opened if one.step > started and not _inside(one.step, series.events))
        return series

    return score
