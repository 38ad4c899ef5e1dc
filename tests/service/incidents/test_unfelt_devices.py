"""Trouble of a device that training does not feel is one grade lower, and of full grade as soon as it does."""

from __future__ import annotations

import pytest

from rankwatch_detectors.base import Change, Finding, Kind, Severity
from rankwatch_service.incidents.correlator import UNFELT_S, UNFELT_STEPS, Correlator
from rankwatch_service.incidents.model import Incident
from rankwatch_service.policy.response import facts, impact_gpu_hours_per_hour
from tests.support.values.findings import finding, topology_state

TOPOLOGY = topology_state()
OPENED_S = 1_001.0
LATER_S = OPENED_S + UNFELT_S


class Room:
    """The incidents of a job, and their transitions."""

    def __init__(self) -> None:
        self.correlator = Correlator("gpt")
        self.correlator.begin("l.0")

    def find(self, kind: Kind, severity: Severity = Severity.WARNING, **fields: object) -> str:
        """A finding about rank 5; returns what was told."""
        found: Finding = finding(kind, **{"scope": "rank:5", "severity": severity, **fields})
        return str(self.correlator.evaluate([found], TOPOLOGY)[0].what)

    def train(self, steps: int = UNFELT_STEPS, now_s: float = LATER_S) -> list[str]:
        return [str(one.what) for step in range(steps) for one in self.correlator.progress("l.0", 102 + step, now_s)]

    @property
    def incident(self) -> Incident:
        (incident,) = self.correlator.open
        return incident


@pytest.fixture
def room() -> Room:
    return Room()


def test_a_degraded_device_opens_one_grade_lower_and_is_reported_again_when_a_rank_becomes_slow(room: Room) -> None:
    assert room.find(Kind.DEVICE_DEGRADED) == "opened"
    assert room.incident.severity is Severity.INFO
    assert facts(room.incident, 8).severity == "info"
    assert room.find(Kind.STRAGGLER, Severity.INFO, detected_time_s=1_060.0) == "updated"
    assert room.incident.severity is Severity.WARNING
    assert facts(room.incident, 8).severity == "warning"


def test_a_degraded_device_that_explains_a_slow_rank_has_its_full_grade(room: Room) -> None:
    room.find(Kind.STRAGGLER, Severity.INFO)
    assert room.find(Kind.DEVICE_DEGRADED) == "updated"
    assert (room.incident.kind, room.incident.severity) == (Kind.DEVICE_DEGRADED, Severity.WARNING)


def test_a_fault_is_lowered_once_training_has_gone_on_beside_it(room: Room) -> None:
    room.find(Kind.DEVICE_FAULT, Severity.CRITICAL)
    assert room.train(UNFELT_STEPS - 1) == []
    assert room.incident.severity is Severity.CRITICAL
    assert room.train(1) == ["evidence"]
    assert room.incident.severity is Severity.WARNING
    assert room.train() == []
    assert room.find(Kind.RANK_LOST, Severity.CRITICAL, detected_time_s=1_200.0) == "updated"
    assert room.incident.severity is Severity.CRITICAL


def test_steps_alone_do_not_show_that_training_goes_on_if_they_are_short(room: Room) -> None:
    room.find(Kind.DEVICE_FAULT, Severity.CRITICAL)
    assert room.train(10 * UNFELT_STEPS, LATER_S - 0.1) == []
    assert room.train(1) == ["evidence"]


def test_a_graver_finding_of_a_device_that_training_does_not_feel_is_lowered_too(room: Room) -> None:
    room.find(Kind.DEVICE_FAULT, Severity.WARNING)
    room.train()
    assert room.incident.severity is Severity.INFO
    room.find(Kind.DEVICE_FAULT, Severity.CRITICAL, change=Change.UPDATE)
    assert room.incident.severity is Severity.WARNING


def test_faults_that_training_feels_and_trouble_of_no_device_keep_their_grade(room: Room) -> None:
    room.find(Kind.DEVICE_FAULT, Severity.CRITICAL)
    room.find(Kind.STRAGGLER, detected_time_s=1_002.0)
    assert room.train() == []
    assert room.incident.severity is Severity.CRITICAL
    alone = Room()
    alone.find(Kind.HOST_DEGRADED, scope="host:node-1", ranks=())
    assert alone.train() == []
    assert alone.incident.severity is Severity.WARNING


def test_a_snapshot_keeps_what_training_has_not_felt(room: Room) -> None:
    room.find(Kind.DEVICE_FAULT, Severity.CRITICAL)
    room.train()
    other = Room()
    other.correlator.restore(room.correlator.state())
    other.find(Kind.RANK_LOST, Severity.WARNING, detected_time_s=1_200.0)
    assert other.incident.severity is Severity.CRITICAL


def test_a_degraded_device_costs_what_its_slow_rank_costs(room: Room) -> None:
    room.find(Kind.DEVICE_DEGRADED)
    assert impact_gpu_hours_per_hour(room.incident, 8) == 0.0
    room.find(Kind.STRAGGLER, evidence={"cost_gpu_hours_per_hour": 1.6}, detected_time_s=1_060.0)
    assert impact_gpu_hours_per_hour(room.incident, 8) == 1.6
    room.find(Kind.STRAGGLER, change=Change.CLOSE, detected_time_s=1_200.0)
    assert impact_gpu_hours_per_hour(room.incident, 8) == 0.0


def test_a_rank_that_ends_on_a_device_with_memory_errors_is_one_incident_and_on_a_hot_one_two() -> None:
    for rule, count in (("ecc", 1), ("margin", 2)):
        for kinds in ((Kind.DEVICE_DEGRADED, Kind.RANK_LOST), (Kind.RANK_LOST, Kind.DEVICE_DEGRADED)):
            room = Room()
            for kind in kinds:
                room.find(kind, evidence={"rule": rule} if kind is Kind.DEVICE_DEGRADED else {})
            assert len(room.correlator.open) == count
    elsewhere = Room()
    elsewhere.find(Kind.DEVICE_DEGRADED, evidence={"rule": "ecc"})
    elsewhere.find(Kind.RANK_LOST, scope="rank:6")
    assert len(elsewhere.correlator.open) == 2
