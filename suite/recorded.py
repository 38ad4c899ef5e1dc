"""Recorded telemetry with labels: metrics of servers and records of operators, scored."""

from __future__ import annotations

import csv
import gzip
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import DeviceCounters, Finding, Kind, Observation, Severity
from rankwatch_detectors.devices.counter_detector import SLOT_S, DeviceProblem
from rankwatch_detectors.devices.device_degraded import GpuRules, GpuRulesConfig
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.model import Incident, TransitionKind, Update
from rankwatch_service.job.topology_state import TopologyState
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
    """The step in which it was reported; -1 where it is not of a step."""
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


RANKS_PER_NODE = 8
ATTEMPT = "records.0"
DAY_S = 86_400.0
DIP = 0.6
"""A node whose power is lowered draws this share of it, for half a minute: what the data's README asks to be found."""
DIP_SLOTS = 6
DIP_AFTER_SLOTS = 60
DIPS = 20
NETWORK = {"NIC", "Parameter Plane Cable"}
"""Classes of operators' records that are the network's; all others are the device's."""


def metric(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """A server's metric, judged by the rules for a job's loss: one alarm in each window, none outside.

    The first 15 % of the rows, at most 750, do not count.
    """
    with gzip.open(folder / labels["file"], "rt") as file:
        rows = list(csv.DictReader(file))
    stamps = [row["timestamp"] for row in rows]
    heard = _listened("step,loss", [f"{step},{row['value']}" for step, row in enumerate(rows)])
    series = ScoredSeries(name, heard.points, incidents=len(heard.opened))
    windows = [(_at(stamps, start), _at(stamps, end)) for start, end in labels["published_labels"]["windows"]]
    for start, end in windows:
        inside = [one.step for one in heard.opened if start <= one.step <= end]
        event = LabelledEvent("loss", "window", start, end, must=True)
        series.found.append((event, min(inside) - start if inside else None))
    probation = min(0.15 * len(rows), 750)
    late = [one for one in heard.opened if one.step > probation]
    series.accuse(one for one in late if not any(start <= one.step <= end for start, end in windows))
    return series


def steps_and_power(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """The step times of a job whose nodes' power was measured, and the power, each node as a device.

    Both are clean. Then the power of one node at a time is lowered, and each of these dips has to be found.
    """
    series = ScoredSeries(name)
    path = folder / f"{name}.steps.csv.gz"
    if path.name in labels["files"]:
        with gzip.open(path, "rt") as file:
            lines = [f"{step},{row['t_s']},{row['step_time_s']}" for step, row in enumerate(csv.DictReader(file))]
        heard = _listened("step,time_s,step_time_s", lines)
        series.points, series.incidents = heard.points, len(heard.opened)
        series.accuse(heard.opened)
    slots = list(_slots(folder / f"{name}.power.csv.gz"))
    series.points += len(slots)
    series.informed += [f"node {one.number}: {one.what}" for _, one in _troubles(slots)]
    chance = np.random.default_rng(0)
    last = len(slots) - DIP_SLOTS - 1
    for _ in range(DIPS if last > DIP_AFTER_SLOTS else 0):
        node, at = int(chance.integers(len(slots[0].devices))), int(chance.integers(DIP_AFTER_SLOTS, last))
        dipped = [*slots[:at], *(_dip(one, node) for one in slots[at : at + DIP_SLOTS]), *slots[at + DIP_SLOTS :]]
        reported = [(slot, one.number) for slot, one in _troubles(dipped)]
        inside = [slot - at for slot, number in reported if number == node and at <= slot < at + DIP_SLOTS]
        event = LabelledEvent("power", "dip", at, at + DIP_SLOTS, must=True)
        series.found.append((event, min(inside) if inside else None))
        series.informed += [f"node {number}" for _, number in reported if number != node]
    return series


def _slots(path: Path) -> Iterator[DeviceCounters]:
    """The mean power of each node in each 5 s."""
    found: dict[int, dict[int, list[float]]] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            if row["watts"]:
                slot = found.setdefault(int(float(row["t_s"]) // SLOT_S), {})
                slot.setdefault(int(row["node"]) - 1, []).append(float(row["watts"]))
    nodes = 1 + max(max(of_node) for of_node in found.values())
    named = tuple((f"node-{node}", "") for node in range(nodes))
    for number, at in enumerate(sorted(found)):
        watts, reported = np.zeros(nodes), np.zeros(nodes, dtype=bool)
        for node, read in found[at].items():
            watts[node], reported[node] = np.mean(read), True
        yield DeviceCounters(number, at * SLOT_S, named, {"power_w": watts}, {"power_w": reported})


def _dip(counters: DeviceCounters, node: int) -> DeviceCounters:
    watts = counters.values["power_w"].copy()
    watts[node] *= DIP
    return replace(counters, values={"power_w": watts})


def _troubles(slots: Sequence[DeviceCounters]) -> Iterator[tuple[int, DeviceProblem]]:
    """(slot, what was told in it that lasts)"""
    rules = GpuRules(GpuRulesConfig())
    for counters in slots:
        yield from ((counters.slot, one) for one in rules.see(counters) if one.slots)


def faults(folder: Path, name: str, labels: dict[str, Any]) -> ScoredSeries:
    """Operators' records of faults, as findings of a job on all these nodes: one incident for each, over when it ends.

    Found: the fault has an incident that names its node. False: incidents of several nodes, and those left open.
    """
    with gzip.open(folder / labels["file"], "rt") as file:
        rows = list(csv.DictReader(file))
    nodes = sorted({row["node"] for row in rows})
    topology_state = TopologyState()
    topology_state.learn(_rank_infos(nodes))
    correlator, records = Correlator("records"), _Records(nodes)
    series, incidents = ScoredSeries(name, len(rows)), dict[str, Incident]()
    correlator.begin(ATTEMPT)
    for index, row in enumerate(rows):
        reported = correlator.evaluate(records.findings(row), topology_state)
        incidents |= {one.incident.id: one.incident for one in reported}
        if row["event"] == "fault_start":
            # A second fault of a node while the first lasts belongs to the incident that is open.
            named = any(one.state == "open" and row["node"] in one.hosts for one in incidents.values())
            event = LabelledEvent("fault", row["class"], index, index, must=True)
            series.found.append((event, 0 if named else None))
        series.incidents += sum(one.what is TransitionKind.OPENED for one in reported)
    for incident in incidents.values():
        if len(incident.hosts) > 1 or incident.state == "open":
            series.false.append(f"{incident.kind} {incident.state} on {incident.hosts}")
    return series


class _Records:
    """Operators' records as findings."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self._nodes = nodes
        self._episodes = {kind: Episodes(kind) for kind in (Kind.DEVICE_FAULT, Kind.NETWORK_DEGRADED)}

    def findings(self, row: Mapping[str, str]) -> Sequence[Finding]:
        """The findings of the next record."""
        now_s = float(row["day"]) * DAY_S
        episodes = self._episodes[Kind.NETWORK_DEGRADED if row["class"] in NETWORK else Kind.DEVICE_FAULT]
        scope, what = IncidentScope.of_host(row["node"]), f"{row['node']}: {row['description']}"
        if row["event"] == "fault_end":
            return episodes.close(scope, None, now_s, what) if scope in episodes else ()
        if scope in episodes:
            return episodes.update(scope, summary=what, detected_time_s=now_s)
        first = self._nodes.index(row["node"]) * RANKS_PER_NODE
        return episodes.open(
            scope,
            attempt=ATTEMPT,
            severity=Severity.CRITICAL,
            onset_step=None,
            detected_step=None,
            onset_time_s=now_s,
            detected_time_s=now_s,
            score=1.0,
            confidence=1.0,
            summary=what,
            evidence={},
            ranks=tuple(range(first, first + RANKS_PER_NODE)),
        )


def _rank_infos(nodes: Sequence[str]) -> Iterator[wire.RankInfo]:
    size = len(nodes) * RANKS_PER_NODE
    for rank in range(size):
        yield wire.RankInfo(rank, size, host=nodes[rank // RANKS_PER_NODE], device_uuid=f"GPU-{rank}", dp=rank)


def _at(stamps: Sequence[str], stamp: str) -> int:
    """Row of the first time that is not before `stamp`, fractions of seconds left out."""
    return next((row for row, at in enumerate(stamps) if at >= stamp[:19]), len(stamps) - 1)


def _listened(head: str, lines: Sequence[str]) -> Heard:
    """The findings and incidents of these lines."""
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as out:
        out.write("\n".join([head, *lines]) + "\n")
        out.flush()
        return listen(Path(out.name), {})
