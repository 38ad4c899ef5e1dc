"""Detectors whose findings are noted down while a judge makes incidents of them, and the roster of a synthetic job."""

from __future__ import annotations

from collections.abc import Sequence

from rankwatch import wire
from rankwatch_detectors.base import Change, Detector, Finding, Observation, Topology
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.incidents.model import Update
from rankwatch_service.job.detection import Judge
from rankwatch_service.job.topology_state import Roster


class Overheard:
    """A detector whose findings are noted down as well."""

    def __init__(self, detector: Detector, findings: list[Finding]) -> None:
        self.name, self.version = detector.name, detector.version
        self.snapshot, self.restore = detector.snapshot, detector.restore
        self._detector, self._findings = detector, findings

    def observe(self, observation: Observation) -> Sequence[Finding]:
        found = self._detector.observe(observation)
        self._findings += [finding for finding in found if finding.change is not Change.CLOSE]
        return found


def overheard(findings: list[Finding]) -> Judge:
    """A judge with all detectors at their defaults; what they open or update is put into `findings`."""
    return Judge("benchmark", lambda: [Overheard(detector, findings) for detector in detectors()])


def told(judge: Judge, observation: Observation, roster: Roster) -> list[Update]:
    """What becomes of an observation. A detector that fails would find nothing wrong: it ends the benchmark."""
    news, failures = judge.observe(observation, roster)
    if failures:
        raise RuntimeError(f"a detector failed: {failures}")
    return news


def roster_of(topology: Topology) -> Roster:
    """What the agents of a job would have said of its ranks."""
    roster, size = Roster(), topology.world_size
    places = zip(topology.host, topology.device_uuid, topology.dp, topology.tp, topology.pp, strict=True)
    roster.learn(
        wire.RankInfo(rank, size, host=host, device_uuid=device, dp=int(dp), tp=int(tp), pp=int(pp))
        for rank, (host, device, dp, tp, pp) in enumerate(places)
    )
    return roster
