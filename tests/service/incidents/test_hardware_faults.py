"""Faults of hardware as they occur in fleets, with all that is heard of each: one incident, of its kind and device.

What drivers, agents and ranks tell of each is as field reports describe it; the job around them is simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, DeviceCounters, Finding, Observation, Occurrence, Tick
from rankwatch_service.incidents.model import Incident
from rankwatch_service.job.device_boards import CLOSE_AFTER_S
from rankwatch_service.simulate.faults import Fault, Hang, Kill, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from suite.pipeline import recording_pipeline, topology_state_of, updates_of

RANKS, PER_HOST, SICK, AT = 8, 4, 5, 200
SLOT_S = 5.0
USUAL = {
    "utilization_ratio": 1.0, "power_w": 600.0, "sm_clock_hz": 1.98e9, "pcie_width": 16.0, "pcie_width_max": 16.0,
    "ecc_uncorrected": 0.0, "remap_failed": 0.0, "remap_pending": 0.0, "recovery_action": 0.0,
    "nvlink_replay_errors": 0.0, "temperature_margin_celsius": 20.0,
}  # fmt: skip
USUAL_OF_HOST = {
    "port": {"link_up": 1.0, "link_downs": 0.0, "link_bits_per_s": 4e11, "port_errors": 0.0},
    "host": {"cpu_steal_ratio": 0.0, "memory_pressure_ratio": 0.0, "oom_kills": 0.0},
}


@dataclass(frozen=True)
class HardwareFault:
    """What is heard of one fault of the device of rank 5, from step 200 on, and what it has to become."""

    name: str
    kind: str
    severity: str
    consequences: tuple[str, ...] = ()
    training: tuple[Fault, ...] = ()
    xids: tuple[int, ...] = ()
    events: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    of_host: bool = False
    """The incident names the host, since nothing tells which of its devices it is."""
    of_kind: str = "gpu"
    """Kind of device whose counters these are."""
    cause: str = "device"
    besides: tuple[str, ...] = ()
    """Incidents of their own, of which it is a suspected cause."""


STUCK, KILLED, SLOW = Hang(SICK, AT + 2, 90.0), Kill(SICK, AT + 2), Slow(SICK, AT, 1.25)
HOT = tuple(("device_throttled", {"minutes": n, "reasons": ["heat"], "temperature_celsius": 91}) for n in (1, 2))
BRAKE = tuple(("device_throttled", {"minutes": n, "reasons": ["power brake"]}) for n in (1, 2))

FAULTS = [
    HardwareFault("fell off the bus", "device_fault", "critical", ("hang",), (STUCK,), (79,)),
    HardwareFault("fell off the bus, rank ends", "device_fault", "critical", ("rank_lost",), (KILLED,), (79,)),
    HardwareFault(
        "gone without an Xid", "device_fault", "critical", ("hang",), (STUCK,),
        events=(("device_lost", {"reason": "the driver does not list it any more"}),),
    ),
    HardwareFault("double-bit error", "device_fault", "critical", ("rank_lost",), (KILLED,), (48, 63, 45)),
    HardwareFault("uncontained memory error", "device_fault", "critical", ("hang",), (STUCK,), (95, 154)),
    HardwareFault("contained memory error", "device_fault", "critical", ("rank_lost",), (KILLED,), (94, 45)),
    HardwareFault("row remapped, training goes on", "device_fault", "info", xids=(63,)),
    HardwareFault("row remap failed, training goes on", "device_fault", "warning", xids=(64,)),
    HardwareFault("micro-controller halts", "device_fault", "critical", ("hang",), (STUCK,), (62, 45)),
    HardwareFault("GSP does not answer", "device_fault", "critical", ("hang",), (STUCK,), (119, 119, 119)),
    HardwareFault("NVLink error", "device_fault", "critical", ("hang",), (STUCK,), (74,)),
    HardwareFault("NVLink 5 error", "device_fault", "critical", ("hang",), (STUCK,), (145, 149)),
    HardwareFault(
        "NVSwitch error", "device_fault", "critical", ("hang",), (STUCK,), of_host=True,
        events=(("switch_error", {"sxid": 20034, "pci_bus_id": "0000:c1:00", "text": "Fatal, Link 28"}),),
    ),
    HardwareFault(
        "memory cannot be retired, training goes on", "device_fault", "warning",
        events=(("device_event", {"event": "dram_retirement_failure"}),),
    ),
    HardwareFault(
        "driver is silent", "device_fault", "critical", ("hang",), (STUCK,), of_host=True,
        events=(("driver_silent", {"silent_s": 3.0}),),
    ),
    HardwareFault("heat", "device_degraded", "warning", ("straggler",), (SLOW,), events=HOT),
    HardwareFault("power brake", "device_degraded", "warning", ("straggler",), (SLOW,), events=BRAKE),
    HardwareFault(
        "clock falls", "device_degraded", "warning", ("straggler",), (SLOW,), counters={"sm_clock_hz": 1.5e9}
    ),
    HardwareFault("power falls, training goes on", "device_degraded", "info", counters={"power_w": 400.0}),
    HardwareFault("link loses lanes, training goes on", "device_degraded", "info", counters={"pcie_width": 8.0}),
    HardwareFault(
        "link loses lanes", "device_degraded", "warning", ("straggler",), (SLOW,), counters={"pcie_width": 8.0}
    ),
    HardwareFault(
        "memory errors that only counters tell, training goes on", "device_degraded", "info",
        counters={"ecc_uncorrected": 1.0},
    ),
    HardwareFault(
        "memory errors that only counters tell, rank ends", "device_degraded", "critical", ("rank_lost",), (KILLED,),
        counters={"ecc_uncorrected": 1.0},
    ),
    HardwareFault(
        "memory errors with an Xid", "device_fault", "critical", ("rank_lost",), (KILLED,), (48,),
        counters={"ecc_uncorrected": 1.0, "remap_pending": 1.0},
    ),
    HardwareFault("NVLink replays", "device_degraded", "info", counters={"nvlink_replay_errors": 4.0}),
    HardwareFault(
        "link lost", "network_degraded", "warning", training=(STUCK,), counters={"link_up": 0.0},
        of_host=True, of_kind="port", cause="network", besides=("hang",),
    ),
    HardwareFault(
        "link flaps, training goes on", "network_degraded", "warning", counters={"link_downs": 2.0},
        of_host=True, of_kind="port", cause="network",
    ),
    HardwareFault(
        "link at half its speed", "network_degraded", "warning", ("straggler",), (SLOW,),
        counters={"link_bits_per_s": 2e11}, of_host=True, of_kind="port", cause="network",
    ),
    HardwareFault(
        "the hypervisor takes processors away", "host_degraded", "warning", ("straggler",), (SLOW,),
        counters={"cpu_steal_ratio": 0.3}, of_host=True, of_kind="host", cause="host",
    ),
    HardwareFault(
        "a rank is killed for want of memory", "host_degraded", "critical", ("rank_lost",), (KILLED,),
        counters={"oom_kills": 1.0}, of_host=True, of_kind="host", cause="host",
    ),
    HardwareFault(
        "memory is short, training goes on", "host_degraded", "info", counters={"memory_pressure_ratio": 0.2},
        of_host=True, of_kind="host", cause="host",
    ),
    HardwareFault(
        "at the limit of temperature, training goes on", "device_degraded", "info",
        counters={"temperature_margin_celsius": 0.0},
    ),
]  # fmt: skip


def told(fault: HardwareFault) -> Iterator[Observation]:
    """The job with all that is heard of the fault, in the order of time."""
    job = Job(RANKS, 400, 3, step_s=1.0, placement=RankPlacement(ranks_per_host=PER_HOST)).inject(*fault.training)
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
            if fault.of_kind != "gpu":
                yield host_counters(start, slot, fault.of_kind, sick)
            yield counters(start, slot, sick if fault.of_kind == "gpu" else {})


def step_of(observation: Observation) -> int:
    """The newest step of any rank, as a tick tells it; -1 for other observations."""
    if not isinstance(observation, Tick) or observation.presence is None:
        return -1
    return int(observation.presence.step.max())


def counters(start: AttemptStart, slot: int, sick: Mapping[str, float]) -> DeviceCounters:
    values = {name: np.full(RANKS, usual) for name, usual in USUAL.items()}
    for name, value in sick.items():
        values[name][SICK] = value
    named = tuple(zip(start.topology.host, start.topology.device_uuid, strict=True))
    present = {name: np.ones(RANKS, dtype=bool) for name in values}
    return DeviceCounters(slot, (slot + 1) * SLOT_S + CLOSE_AFTER_S, named, values, present)


def host_counters(start: AttemptStart, slot: int, kind: str, sick: Mapping[str, float]) -> DeviceCounters:
    """Of one port on each host, or of the hosts; those of the host of rank 5 are sick."""
    hosts = sorted(set(start.topology.host))
    values = {name: np.full(len(hosts), usual) for name, usual in USUAL_OF_HOST[kind].items()}
    for name, value in sick.items():
        values[name][hosts.index(start.topology.host[SICK])] = value
    present = {name: np.ones(len(hosts), dtype=bool) for name in values}
    named = tuple((host, "mlx5_0/1" * (kind == "port")) for host in hosts)
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
    incident, *others = sorted(incidents(told(fault)), key=lambda one: one.kind != fault.kind)
    assert tuple(str(other.kind) for other in others) == fault.besides
    assert all(other.evidence["suspected_causes"][0]["kind"] == fault.kind for other in others)
    assert (incident.kind, incident.severity) == (fault.kind, fault.severity)
    assert incident.cause == fault.cause
    if not fault.of_host:
        assert incident.ranks == (SICK,)
    assert set(fault.consequences) <= {str(part.kind) for part in incident.parts[1:]}
    assert incident.parts[1:] or others or not fault.training


def test_without_a_fault_nothing_is_told() -> None:
    assert not incidents(told(HardwareFault("none", "", "")))
