"""Recorded telemetry that is not a training job's own: of servers, of their power, and operators' records of faults."""

from __future__ import annotations

import csv
import gzip
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import DeviceCounters, Finding, Kind, Severity
from rankwatch_detectors.devices.gpu_rules import GpuRules, GpuRulesConfig
from rankwatch_detectors.devices.held_rules import SLOT_S, DeviceProblem
from rankwatch_detectors.episodes import Episodes
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.incidents.correlator import Correlator
from rankwatch_service.incidents.model import Incident
from rankwatch_service.incidents.transition import TransitionKind
from rankwatch_service.job.topology_state import TopologyState
from suite.recorded.series import Heard, LabelledEvent, ScoredSeries, listen

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
        told = [(slot, one.number) for slot, one in _troubles(dipped)]
        inside = [slot - at for slot, number in told if number == node and at <= slot < at + DIP_SLOTS]
        event = LabelledEvent("power", "dip", at, at + DIP_SLOTS, must=True)
        series.found.append((event, min(inside) if inside else None))
        series.informed += [f"node {number}" for _, number in told if number != node]
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
        watts, told = np.zeros(nodes), np.zeros(nodes, dtype=bool)
        for node, read in found[at].items():
            watts[node], told[node] = np.mean(read), True
        yield DeviceCounters(number, at * SLOT_S, named, {"power_w": watts}, {"power_w": told})


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
        told = correlator.judge(records.findings(row), topology_state)
        incidents |= {one.incident.id: one.incident for one in told}
        if row["event"] == "fault_start":
            # A second fault of a node while the first lasts belongs to the incident that is open.
            named = any(one.state == "open" and row["node"] in one.hosts for one in incidents.values())
            event = LabelledEvent("fault", row["class"], index, index, must=True)
            series.found.append((event, 0 if named else None))
        series.incidents += sum(one.what is TransitionKind.OPENED for one in told)
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
