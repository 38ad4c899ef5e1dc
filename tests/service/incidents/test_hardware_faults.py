"""Faults of hardware as they occur in fleets, with all reports of each: one incident, of its kind and device.

What drivers, agents and ranks tell of each is as field reports describe it; the job around them is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rankwatch_detectors.base import (
    AttemptStart,
    Change,
    DeviceCounters,
    Finding,
    Kind,
    Observation,
    Occurrence,
    Severity,
    Tick,
)
from rankwatch_service.incidents.correlator import UNFELT_S, UNFELT_STEPS, Correlator
from rankwatch_service.incidents.model import Incident
from rankwatch_service.job.device_boards import CLOSE_AFTER_S
from rankwatch_service.policy.response import facts, impact_gpu_hours_per_hour
from rankwatch_service.simulate.faults import Fault, Hang, Kill, Slow, Throttle
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from suite.pipeline import recording_pipeline, topology_state_of, updates_of
from tests.support.values.incidents import finding, topology_state

RANKS, PER_HOST, SICK, AT = 8, 4, 5, 160
SLOT_S = 5.0
USUAL_OF = {
    "gpu": {
        "utilization_ratio": 1.0, "power_w": 600.0, "sm_clock_hz": 1.98e9, "pcie_width": 16.0, "pcie_width_max": 16.0,
        "ecc_uncorrected": 0.0, "remap_failed": 0.0, "remap_pending": 0.0, "recovery_action": 0.0,
        "nvlink_replay_errors": 0.0, "temperature_margin_celsius": 20.0,
    },
    "port": {"link_up": 1.0, "link_downs": 0.0, "link_bits_per_s": 4e11, "port_errors": 0.0},
    "host": {"cpu_steal_ratio": 0.0, "memory_pressure_ratio": 0.0, "oom_kills": 0.0},
}  # fmt: skip


STUCK, KILLED, SLOW = Hang(SICK, AT + 2, 90.0), Kill(SICK, AT + 2), Slow(SICK, AT, 1.25)
FELT = {STUCK: ("critical", "hang"), KILLED: ("critical", "rank_lost"), SLOW: ("warning", "straggler")}
"""How grave a fault is that training feels so, and what joins its incident."""


@dataclass(frozen=True)
class HardwareFault:
    """The reports of one fault of the device of rank 5, from step 160 on, and what it has to become."""

    name: str
    kind: str = "device_fault"
    felt: Fault | None = None
    """What it does to training, which goes on without."""
    severity: str = ""
    """Unless it is that of what training feels, or `info`."""
    xids: tuple[int, ...] = ()
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    of: str = "gpu"
    """Kind of device whose counters these are; one of a host has an incident that names the host."""
    of_host: bool = False
    """Nothing shows which of the devices of the host it is."""
    apart: bool = False
    """What training feels is an incident of its own, of which it is a suspected cause."""
    steps: int = 270


def event(kind: str, **fields: Any) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    return ((kind, fields),)


def throttled(*reasons: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    return tuple(("device_throttled", {"minutes": n, "reasons": reasons, "temperature_celsius": 91}) for n in (1, 2))


DEGRADED, PORT, HOST = "device_degraded", "network_degraded", "host_degraded"
FAULTS = [
    HardwareFault("fell off the bus", felt=STUCK, xids=(79,)),
    HardwareFault("fell off the bus, rank ends", felt=KILLED, xids=(79,)),
    HardwareFault("gone without an Xid", felt=STUCK, events=event("device_lost", reason="the driver does not list it")),
    HardwareFault("double-bit error", felt=KILLED, xids=(48, 63, 45)),
    HardwareFault("uncontained memory error", felt=STUCK, xids=(95, 154)),
    HardwareFault("contained memory error", felt=KILLED, xids=(94, 45)),
    HardwareFault("row remapped", xids=(63,)),
    HardwareFault("row remap failed", severity="warning", xids=(64,)),
    HardwareFault("micro-controller halts", felt=STUCK, xids=(62, 45)),
    HardwareFault("GSP does not answer", felt=STUCK, xids=(119, 119, 119)),
    HardwareFault("NVLink error", felt=STUCK, xids=(74,)),
    HardwareFault("NVLink 5 error", felt=STUCK, xids=(145, 149)),
    HardwareFault(
        "NVSwitch error", felt=STUCK, of_host=True,
        events=event("switch_error", sxid=20034, pci_bus_id="0000:c1:00", text="Fatal, Link 28"),
    ),
    HardwareFault("no row left", severity="warning", events=event("device_event", event="dram_retirement_failure")),
    HardwareFault("driver is silent", felt=STUCK, of_host=True, events=event("driver_silent", silent_s=3.0)),
    HardwareFault("heat", DEGRADED, SLOW, events=throttled("heat")),
    HardwareFault("heat that nothing feels", DEGRADED, events=throttled("heat")),
    HardwareFault("power brake", DEGRADED, SLOW, events=throttled("power brake")),
    HardwareFault("clock falls", DEGRADED, SLOW, counters={"sm_clock_hz": 1.5e9}),
    HardwareFault("power falls", DEGRADED, counters={"power_w": 400.0}),
    HardwareFault("link loses lanes", DEGRADED, SLOW, counters={"pcie_width": 8.0}),
    HardwareFault("link loses lanes and nothing feels it", DEGRADED, counters={"pcie_width": 8.0}),
    HardwareFault("memory errors that only counters tell", DEGRADED, counters={"ecc_uncorrected": 1.0}),
    HardwareFault("memory errors of counters, rank ends", DEGRADED, KILLED, counters={"ecc_uncorrected": 1.0}),
    HardwareFault(
        "memory errors with an Xid", felt=KILLED, xids=(48,), counters={"ecc_uncorrected": 1.0, "remap_pending": 1.0}
    ),
    HardwareFault("NVLink replays", DEGRADED, counters={"nvlink_replay_errors": 4.0}),
    HardwareFault("link lost", PORT, STUCK, "warning", counters={"link_up": 0.0}, of="port", apart=True, steps=400),
    HardwareFault("link flaps", PORT, severity="warning", counters={"link_downs": 2.0}, of="port"),
    HardwareFault("link at half its speed", PORT, SLOW, counters={"link_bits_per_s": 2e11}, of="port"),
    HardwareFault("processors taken away", HOST, SLOW, counters={"cpu_steal_ratio": 0.3}, of="host"),
    HardwareFault("a rank is killed for want of memory", HOST, KILLED, counters={"oom_kills": 1.0}, of="host"),
    HardwareFault("memory is short", HOST, counters={"memory_pressure_ratio": 0.2}, of="host"),
    HardwareFault("at the limit of temperature", DEGRADED, counters={"temperature_margin_celsius": 0.0}),
]  # fmt: skip


def reported(fault: HardwareFault) -> Iterator[Observation]:
    """The job with all reports of the fault, in the order of time."""
    job = Job(RANKS, fault.steps, 3, step_s=1.0, placement=RankPlacement(ranks_per_host=PER_HOST)).inject(
        *([fault.felt] if fault.felt else [])
    )
    start, began_s, slot, pending = None, None, 0, list[tuple[float, str, dict[str, Any]]]()
    for observation in generate(job):
        if isinstance(observation, AttemptStart):
            start = observation
        assert start is not None
        host, uuid = start.topology.host[SICK], start.topology.device_uuid[SICK]
        if began_s is None and step_of(observation) >= AT:
            began_s = observation.now_s
            named = {"device_uuid": uuid, "index": 1}
            pending = [(began_s, "device_error", {**named, "xid": xid, "text": ""}) for xid in fault.xids]
            pending += [
                (began_s + 60.0 * number * (kind == "device_throttled"), kind, {**named, **fields})
                for number, (kind, fields) in enumerate(fault.events)
            ]
        yield observation
        if not isinstance(observation, Tick):
            continue
        while pending and pending[0][0] <= observation.now_s:
            _, kind, fields = pending.pop(0)
            yield Occurrence(kind, start.attempt, host, observation.now_s, None, None, fields)
        while (slot + 2) * SLOT_S + CLOSE_AFTER_S <= observation.now_s:
            slot += 1
            sick = fault.counters if began_s is not None and slot * SLOT_S >= began_s else {}
            for kind in dict.fromkeys((fault.of, "gpu")):
                yield counters(start, slot, kind, sick if kind == fault.of else {})


def step_of(observation: Observation) -> int:
    """The newest step of any rank, as of a tick; -1 for other observations."""
    if not isinstance(observation, Tick) or observation.presence is None:
        return -1
    return int(observation.presence.step.max())


def counters(start: AttemptStart, slot: int, kind: str, sick: Mapping[str, float]) -> DeviceCounters:
    """Of every GPU, of one port on each host, or of the hosts; sick are those of rank 5 or of its host."""
    named = tuple(zip(start.topology.host, start.topology.device_uuid, strict=True))
    at = SICK
    if kind != "gpu":
        hosts = sorted(set(start.topology.host))
        named, at = tuple((host, "mlx5_0/1" * (kind == "port")) for host in hosts), hosts.index(named[SICK][0])
    values = {name: np.full(len(named), usual) for name, usual in USUAL_OF[kind].items()}
    for name, value in sick.items():
        values[name][at] = value
    present = {name: np.ones(len(named), dtype=bool) for name in values}
    return DeviceCounters(slot, (slot + 1) * SLOT_S + CLOSE_AFTER_S, named, values, present, kind)


def incidents(observations: Iterator[Observation]) -> Sequence[Incident]:
    """All incidents but those that were merged into others, as they stood at the end."""
    found: list[Finding] = []
    pipeline, topology, last = recording_pipeline(found), None, dict[str, Any]()
    for observation in observations:
        if isinstance(observation, AttemptStart):
            topology = topology_state_of(observation.topology)
        assert topology is not None
        for update in updates_of(pipeline, observation, topology):
            last[update.incident.id] = update
    return [update.incident for update in last.values() if not update.text.startswith("merged into")]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_hardware_is_one_incident_by_its_kind_device_and_cause(fault: HardwareFault) -> None:
    severity, effect = FELT[fault.felt] if fault.felt else ("info", "")
    incident, *others = sorted(incidents(reported(fault)), key=lambda one: one.kind != fault.kind)
    assert [str(other.kind) for other in others] == [effect] * fault.apart
    assert all(other.evidence["suspected_causes"][0]["kind"] == fault.kind for other in others)
    assert (incident.kind, incident.severity) == (fault.kind, fault.severity or severity)
    assert incident.cause == {"port": "network", "host": "host"}.get(fault.of, "device")
    assert incident.ranks == (SICK,) or fault.of_host or fault.of != "gpu"
    assert fault.apart or not effect or effect in {part.kind for part in incident.parts[1:]}


def test_without_a_fault_nothing_is_reported() -> None:
    assert not incidents(reported(HardwareFault("none")))


def test_a_slow_rank_on_another_host_than_a_hot_device_is_an_incident_of_its_own() -> None:
    job = Job(RANKS, 220, 3, placement=RankPlacement(ranks_per_host=PER_HOST)).inject(
        Throttle(SICK, 100, 1.0), Slow(1, 150, 1.3)
    )
    found = sorted((str(one.kind), one.ranks, len(one.parts)) for one in incidents(generate(job)))
    assert found == [("device_degraded", (SICK,), 1), ("straggler", (1,), 1)]


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
