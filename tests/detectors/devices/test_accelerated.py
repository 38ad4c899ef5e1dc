"""Ranks that compute on devices: what a step takes on them is judged, and never the CPU time of launching their work.

A job is accelerated by what any rank says of its device, the type or the UUID, and may learn so after its first rows.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Finding, Frame, Kind, Observation, Topology
from rankwatch_detectors.pace.own_past import OwnPastConfig, OwnPastDetector
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector, came_from, units_of
from rankwatch_service.simulate.faults import Restart, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from tests.support.detection.verdicts import closed, judge, opened
from tests.support.values.presences import ATTEMPT, frame, topology

AT = 150
WAYS = [
    pytest.param(RankPlacement(launch_cpu=True), id="UUIDs"),
    pytest.param(RankPlacement(launch_cpu=True, uuids=False), id="types"),
]


def found(observations: Iterable[Observation]) -> list[Finding]:
    """What opens: whether ranks or the whole job are slow."""
    bank = [StragglerDetector(StragglerConfig()), SlowdownDetector(SlowdownConfig())]
    return opened(judge(observations, bank))


def known_late(job: Job, rows: int) -> Iterator[Observation]:
    """The job, whose ranks tell of their devices after so many steps of each launch."""
    told: AttemptStart | None = None
    seen = 0
    for observation in generate(job):
        if isinstance(observation, AttemptStart):
            told, seen = observation, 0
            nothing = ("",) * job.world_size
            topology = dataclasses.replace(observation.topology, device_uuid=nothing, device_type=())
            yield dataclasses.replace(observation, topology=topology)
            continue
        yield observation
        seen += isinstance(observation, Frame)
        if told is not None and seen == rows:
            yield told
            told = None


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("factor", [1.05, 1.1, 1.15, 1.25, 1.4, 2.0])
def test_a_level_cpu_time_beside_a_slow_device_changes_nothing(placement: RankPlacement, factor: float) -> None:
    job = Job(16, AT + 40, 1).inject(Slow(5, AT, factor))
    without = found(generate(job))
    assert (without[0].kind, without[0].ranks, without[0].cause) == (Kind.STRAGGLER, (5,), "worker")
    assert found(generate(dataclasses.replace(job, placement=placement))) == without


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("factor", [1.05, 1.1, 1.2, 1.5])
def test_so_it_is_when_all_devices_become_slower(placement: RankPlacement, factor: float) -> None:
    job = Job(16, AT + 40, 1).inject(SlowJob(AT, factor))
    without = found(generate(job))
    assert [finding.kind for finding in without] == [Kind.SLOWDOWN]
    assert found(generate(dataclasses.replace(job, placement=placement))) == without


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("fault", [Slow(5, AT, 1.15), SlowJob(AT, 1.15)], ids=lambda fault: type(fault).__name__)
def test_a_job_that_learns_of_its_devices_late_is_judged_by_them_from_then_on(
    placement: RankPlacement, fault: Slow | SlowJob
) -> None:
    job = Job(16, AT + 40, 1, placement=placement).inject(fault)
    in_time, late = found(generate(job)), found(known_late(job, rows=8))
    assert [(finding.kind, finding.ranks) for finding in late] == [(one.kind, one.ranks) for one in in_time]
    assert abs((late[0].detected_step or 0) - (in_time[0].detected_step or 0)) <= 2


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_unit_could_do_before_a_relaunch_is_known_when_its_uuid_is_told_again(rows: int) -> None:
    job = Job(16, 320, 35, placement=RankPlacement(launch_cpu=True)).inject(Slow(4, 200, 1.12), Restart(300, 290))
    findings = [one for one in found(known_late(job, rows)) if one.kind is Kind.STRAGGLER]
    assert [f.ranks for f in findings] == [(4,), (4,)]
    assert (findings[1].detected_step or 0) - 290 <= 16
    assert "standing" not in findings[1].evidence


@pytest.mark.parametrize("at_step", [100, 0], ids=["since a step", "from the first step"])
def test_what_cpu_time_had_said_ends_when_the_devices_are_known(at_step: int) -> None:
    job = Job(8, 260, 2, placement=RankPlacement(accelerated=False)).inject(Slow(3, at_step, 2.0))
    observations = [*generate(job)]
    start = next(one for one in observations if isinstance(one, AttemptStart))
    known = dataclasses.replace(start, topology=dataclasses.replace(start.topology, device_type=("cuda",) * 8))
    at = next(i for i, one in enumerate(observations) if isinstance(one, Frame) and one.step == 200)
    detector = StragglerDetector(StragglerConfig())
    findings = judge([*observations[:at], known, *observations[at:]], [detector])
    (by_cpu, by_device), (end,) = opened(findings), closed(findings)
    assert (by_cpu.evidence["witness"], end.ranks, by_device.evidence["witness"]) == ("cpu", (3,), "wall")
    assert (by_device.detected_step or 0) > 200


def test_ranks_at_their_own_pace_are_judged_by_their_devices_too() -> None:
    assert own_past(accelerated=False) == []
    (finding,) = own_past(accelerated=True)
    assert finding.ranks == (1,)


def own_past(*, accelerated: bool) -> list[Finding]:
    """Three ranks of 20 s a step, one of which takes twice as long from some step on, with level CPU times."""
    start = dataclasses.replace(topology(3, devices=False), lockstep=False)
    start = dataclasses.replace(start, device_type=("cuda" if accelerated else "cpu",) * 3)
    random = np.random.default_rng(1)
    observations: list[Observation] = [AttemptStart(ATTEMPT, start, 0.0)]
    for step in range(500):
        busy = 20.0 * np.exp(0.02 * random.standard_normal(3))
        busy[1] *= 2.0 if step >= 300 else 1.0
        seconds = {"busy_s": [*busy], "busy_cpu_s": [1.0, 1.0, 1.0], "step_time_s": [*busy]}
        observations.append(frame(step, seconds, time_s=20.0 * step))
    return opened(judge(observations, [OwnPastDetector(OwnPastConfig())]))


@pytest.mark.parametrize(
    ("uuids", "types", "expected"),
    [
        (("", ""), (), False),
        (("", ""), ("cpu", ""), False),
        (("", ""), ("meta", "cpu"), False),
        (("", "GPU-a"), (), True),
        (("GPU-a", ""), ("cpu", "cpu"), True),
        (("", ""), ("cpu", "mps"), True),
    ],
)
def test_one_rank_on_a_device_makes_a_job_an_accelerated_one(
    uuids: tuple[str, ...], types: tuple[str, ...], expected: bool
) -> None:
    known = dataclasses.replace(topology(2, devices=False), device_uuid=uuids, device_type=types)
    assert known.accelerated is expected


# ---- units ---------------------------------------------------------------------------------------------------------


def on(*places: str) -> Topology:
    """Ranks at these places, each "host/uuid"."""
    hosts, uuids = zip(*(place.split("/") for place in places), strict=True)
    return dataclasses.replace(topology(len(places)), host=hosts, device_uuid=uuids)


def moves(before: list[str], now: Topology, *, same_attempt: bool) -> list[int]:
    return came_from(units_of(now, before), before, same_attempt=same_attempt).tolist()


def test_units_are_named_apart() -> None:
    units = units_of(on("a/", "a/", "b/", "b/g", "b/g"), [])
    assert len(set(units)) == 5


def test_baselines_follow_devices_to_other_ranks_and_hosts_without_uuids_keep_their_order() -> None:
    before = units_of(on("a/g", "a/h", "b/", "b/"), [])
    assert moves(before, on("a/h", "a/g", "b/", "c/"), same_attempt=False) == [1, 0, 2, -1]


def test_until_devices_are_told_a_rank_is_taken_for_the_one_in_its_place_on_the_host() -> None:
    before = units_of(on("a/g", "a/h", "b/i"), [])
    start = on("b/", "a/", "a/")
    assert moves(before, start, same_attempt=False) == [2, 0, 1]
    assumed = units_of(start, before)
    # As it was taken for; and the other way round, as on a host whose devices are listed in another order.
    assert moves(assumed, on("b/i", "a/g", "a/h"), same_attempt=True) == [0, 1, 2]
    assert moves(assumed, on("b/i", "a/h", "a/g"), same_attempt=True) == [0, 2, 1]
    # Another device in its place has no past.
    assert moves(assumed, on("b/new", "a/g", "a/h"), same_attempt=True) == [-1, 1, 2]


def test_a_device_that_is_told_for_the_first_time_goes_on_with_what_its_rank_had() -> None:
    before = units_of(on("a/", "a/", "a/"), [])
    assert moves(before, on("a/g", "a/", "a/"), same_attempt=True) == [0, 1, 2]
    half = units_of(on("a/g", "a/", "a/"), before)
    assert moves(half, on("a/g", "a/h", "a/i"), same_attempt=True) == [0, 1, 2]
    assert moves(before, on("a/g", "a/", "a/"), same_attempt=False) == [-1, 1, 2]
