"""The detectors and the correlator under test, with a record of what the detectors found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankwatch import wire
from rankwatch_detectors.base import Change, Detector, Finding, Observation, Topology
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.incidents.model import Update
from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.job.topology_state import TopologyState


class RecordingDetector:
    """Another detector, whose opened and updated findings are recorded."""

    def __init__(self, detector: Detector, findings: list[Finding]) -> None:
        self.name, self.version = detector.name, detector.version
        self._detector, self._findings = detector, findings

    @property
    def reads(self) -> frozenset[type[Observation]]:
        return self._detector.reads

    def observe(self, observation: Observation) -> Sequence[Finding]:
        found = self._detector.observe(observation)
        self._findings += [finding for finding in found if finding.change is not Change.CLOSE]
        return found

    def snapshot(self) -> dict[str, Any]:
        return self._detector.snapshot()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._detector.restore(state)

    def inherit(self, before: Any) -> None:
        self._detector.inherit(before)


def recording_pipeline(findings: list[Finding]) -> DetectionPipeline:
    """All detectors at their defaults and the correlator; what the detectors open or update is added to `findings`."""
    return DetectionPipeline("benchmark", lambda: [RecordingDetector(detector, findings) for detector in detectors()])


def updates_of(pipeline: DetectionPipeline, observation: Observation, topology_state: TopologyState) -> list[Update]:
    """What an observation changes about incidents.

    Raises:
        RuntimeError: a detector failed. It would find nothing from then on, which must not pass for silence.
    """
    updates, failures = pipeline.observe(observation, topology_state)
    if failures:
        raise RuntimeError(f"a detector failed: {failures}")
    return updates


def topology_state_of(topology: Topology) -> TopologyState:
    """The topology that a job's agents would have reported."""
    topology_state, size = TopologyState(), topology.world_size
    types, switches = (names or ("",) * size for names in (topology.device_type, topology.switch))
    groups = {name: getattr(topology, name).tolist() for name in ("dp", "tp", "pp", "cp", "ep")}
    topology_state.learn(
        wire.RankInfo(
            rank, size, host=topology.host[rank], device_uuid=topology.device_uuid[rank], device_type=types[rank],
            switch=switches[rank],
            **{name: of_ranks[rank] for name, of_ranks in groups.items()},
        )
        for rank in range(size)
    )  # fmt: skip
    return topology_state
