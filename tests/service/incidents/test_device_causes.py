"""A device that tells what is wrong with it is the cause of what training feels of it: one incident for both."""

from __future__ import annotations

import pytest

from rankwatch_detectors.base import AttemptStart, Finding
from rankwatch_service.simulate.faults import DeviceXid, Hang, Kill, Slow, Throttle
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from suite.pipeline import recording_pipeline, topology_state_of, updates_of


def incidents(job: Job) -> list[tuple[str, str, tuple[int, ...], list[str]]]:
    """Kind, severity, ranks and consequences of each incident, as it was at the end."""
    found: list[Finding] = []
    pipeline, topology, last = recording_pipeline(found), None, {}
    for observation in generate(job):
        if isinstance(observation, AttemptStart):
            topology = topology_state_of(observation.topology)
        assert topology is not None
        for update in updates_of(pipeline, observation, topology):
            last[update.incident.id] = update
    return [
        (str(one.kind), str(one.severity), one.ranks, [str(part.kind) for part in one.parts[1:]])
        for one in [update.incident for update in last.values() if not update.text.startswith("merged into")]
    ]


def job(*faults: object) -> Job:
    return Job(8, 400, 3, placement=RankPlacement(ranks_per_host=4)).inject(*faults)


def test_a_rank_that_is_slow_on_a_throttled_device_is_one_incident_with_that_cause() -> None:
    assert incidents(job(Throttle(5, 100, 1.25))) == [("device_degraded", "warning", (5,), ["straggler"])]


def test_a_throttled_device_that_training_does_not_feel_is_told_alone() -> None:
    assert incidents(job(Throttle(5, 100, 1.0, 180))) == [("device_degraded", "info", (5,), [])]


def test_a_slow_rank_on_another_host_is_another_incident() -> None:
    found = incidents(job(Throttle(5, 100, 1.0), Slow(1, 150, 1.3)))
    assert sorted(one[:1] + one[2:] for one in found) == [("device_degraded", (5,), []), ("straggler", (1,), [])]


@pytest.mark.parametrize(
    ("fault", "consequence"), [(Hang(5, 201, 60.0), "hang"), (Kill(5, 201), "rank_lost")], ids=["hang", "lost rank"]
)
def test_a_hang_or_a_lost_rank_after_an_xid_names_the_device_first(fault: object, consequence: str) -> None:
    ((kind, severity, ranks, consequences),) = incidents(job(DeviceXid(5, 200, 79), fault))
    assert (kind, severity, ranks) == ("device_fault", "critical", (5,))
    assert consequence in consequences
