"""Ranks that compute on devices are judged by what a step takes there, and never by the CPU time of launching it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Bools, Finding, Floats, Frame, Kind, Observation, Severity, Topology
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_detectors.pace.own_past import OwnPastConfig, OwnPastDetector
from rankwatch_detectors.pace.peer_test import device_seconds
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector, came_from, units_of
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.simulate.faults import Restart, Slow, SlowJob
from rankwatch_service.simulate.files import write_job
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from tests.support.detection.verdicts import closed, evaluate, opened
from tests.support.values.presences import ATTEMPT, frame, topology

AT = 150
DEVICE_TIMES = RankPlacement(launch_cpu=True, device_times=True)
PARTS = {"work": {}, "data": {"data_wait": True}, "launches": {"wall_only": True}}


def found(observations: Iterable[Observation]) -> list[Finding]:
    """What opens: whether ranks or the whole job are slow."""
    bank = [StragglerDetector(StragglerConfig()), SlowdownDetector(SlowdownConfig())]
    return opened(evaluate(observations, bank))


def slow(factor: float, part: str, placement: RankPlacement, *, late_values: bool = False) -> Finding:
    """What names the rank that is slow in this part of its step."""
    job = Job(16, AT + 30, 1, placement=placement, late_values=late_values).inject(Slow(5, AT, factor, **PARTS[part]))  # type: ignore[arg-type]
    (finding,) = [one for one in found(generate(job)) if one.kind is Kind.STRAGGLER]
    assert finding.ranks == (5,)
    return finding


@pytest.mark.parametrize(("part", "cause"), [("work", "device"), ("data", "data"), ("launches", "host")])
@pytest.mark.parametrize("factor", [1.05, 1.25])
def test_a_slow_rank_is_named_as_soon_as_by_its_busy_time_and_for_the_right_reason(factor, part, cause):
    plain, measured = slow(factor, part, RankPlacement()), slow(factor, part, DEVICE_TIMES)
    assert abs((measured.detected_step or 0) - (plain.detected_step or 0)) <= 2
    assert measured.cause == cause
    assert measured.evidence["witness"] == ("device" if cause == "device" else "arrival")
    assert measured.evidence["ratio"] == pytest.approx(plain.evidence["ratio"], rel=0.05)


@pytest.mark.parametrize(("part", "cause"), [("work", "device"), ("data", "data"), ("launches", "host")])
def test_device_times_that_come_later_than_their_step_are_judged_as_those_that_come_with_it(part, cause):
    at_once, late = (slow(1.1, part, DEVICE_TIMES, late_values=late) for late in (False, True))
    assert (late.cause, late.evidence["witness"]) == (at_once.cause, at_once.evidence["witness"])
    assert late.cause == cause
    # The first device times are those that show that more will come; their own step is judged without them.
    assert abs((late.detected_step or 0) - (at_once.detected_step or 0)) <= 1


def test_it_ends_when_the_device_is_as_fast_as_before() -> None:
    job = Job(16, 300, 1, placement=DEVICE_TIMES).inject(Slow(5, 100, 1.3, until_step=200))
    (end,) = closed(evaluate(generate(job), [StragglerDetector(StragglerConfig())]))
    assert 200 < (end.detected_step or 0) <= 240


@pytest.mark.parametrize("factor", [1.05, 1.2])
def test_all_devices_slower_are_one_slowdown_as_soon_as_by_busy_time(factor: float) -> None:
    jobs = (Job(16, AT + 30, 1, placement=one).inject(SlowJob(AT, factor)) for one in (RankPlacement(), DEVICE_TIMES))
    (plain,), (measured,) = (found(generate(job)) for job in jobs)
    assert (measured.kind, measured.detected_step) == (Kind.SLOWDOWN, plain.detected_step)


@pytest.mark.parametrize("part", PARTS)
def test_one_slow_rank_is_no_slowdown_of_the_job_although_all_hosts_are_busy_for_longer(part: str) -> None:
    job = Job(16, AT + 60, 1, placement=DEVICE_TIMES).inject(Slow(5, AT, 1.2, **PARTS[part]))  # type: ignore[arg-type]
    severe = [one.kind for one in found(generate(job)) if one.severity is not Severity.INFO]
    assert severe == [Kind.STRAGGLER]


def test_a_clean_job_names_nobody() -> None:
    assert found(generate(Job(64, 400, 2, placement=DEVICE_TIMES))) == []


def rows(host_s: Floats, device_s: Floats, *, wait: bool) -> list[Finding]:
    """Four ranks of a second a step; of rank 2 come these times of host and device, by step."""
    random = np.random.default_rng(1)
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(4, devices=False), 0.0)]
    for step, (host, device) in enumerate(zip(host_s, device_s, strict=True)):
        noise = np.exp(0.01 * random.standard_normal((2, 4)))
        hosts, devices = 0.3 * noise[0], 0.8 * noise[1]
        hosts[2] *= host / 0.3
        devices[2] *= device / 0.8
        done = np.maximum(hosts, devices)
        step_s = float(done.max()) + 0.05
        values = {"busy_s": [*hosts], "device_busy_s": [*devices], "step_time_s": [step_s] * 4}
        values |= {"device_wait_s": [*(step_s - done)]} if wait else {}
        observations.append(frame(step, values, time_s=float(step)))
    return opened(evaluate(observations, [StragglerDetector(StragglerConfig())]))


def test_a_slow_device_is_the_cause_also_where_its_own_times_come_too_seldom_to_decide() -> None:
    random = np.random.default_rng(2)
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(4, devices=False), 0.0)]
    for step in range(260):
        device = 0.8 * np.exp(0.01 * random.standard_normal(4))
        device[2] *= 1.1 if step >= 200 else 1.0
        step_s = float(device.max()) + 0.05
        values = {"device_busy_s": [*device], "device_wait_s": [*(step_s - device)], "step_time_s": [step_s] * 4}
        row = frame(step, values, time_s=float(step))
        observations.append(without(row, 2) if step % 2 else row)
    (finding,) = opened(evaluate(observations, [StragglerDetector(StragglerConfig())]))
    assert (finding.ranks, finding.evidence["witness"], finding.cause) == ((2,), "arrival", "device")


def test_where_hosts_decide_how_long_steps_take_who_keeps_the_others_waiting_is_named_by_the_wait_alone() -> None:
    """Devices are given their work late, so none says how long its own work takes; hosts run ahead unevenly."""
    random = np.random.default_rng(3)
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(4, devices=False), 0.0)]
    for step in range(260):
        own = 0.8 * np.exp(0.01 * random.standard_normal(4))
        own[2] *= 1.1 if step >= 200 else 1.0
        step_s = float(own.max()) + 0.05
        values = {"device_wait_s": [*(step_s - own)], "device_step_s": [step_s] * 4}
        values |= {"step_time_s": [*(step_s * np.exp(0.3 * random.standard_normal(4)))]}
        observations.append(frame(step, values, time_s=float(step)))
    (finding,) = opened(evaluate(observations, [StragglerDetector(StragglerConfig())]))
    assert (finding.ranks, finding.evidence["witness"], finding.cause) == ((2,), "arrival", "host")


@pytest.mark.parametrize("known_by", ["times", "type", "nothing"])
@pytest.mark.parametrize("lockstep", [True, False])
def test_where_devices_compute_cpu_times_judge_nobody(lockstep: bool, known_by: str) -> None:
    """All of three ranks at one pace, or one of three at their own, take half again as long, with level CPU times."""
    random = np.random.default_rng(1)
    types = ("cuda" if known_by == "type" else "cpu",) * 3
    start = dataclasses.replace(topology(3, devices=False), lockstep=lockstep, device_type=types)
    observations: list[Observation] = [AttemptStart(ATTEMPT, start, 0.0)]
    for step in range(500):
        busy = 20.0 * np.exp(0.02 * random.standard_normal(3))
        busy[slice(None) if lockstep else 1] *= 1.5 if step >= 300 else 1.0
        step_s = [float(busy.max())] * 3 if lockstep else [*busy]
        values = {"busy_s": [*busy], "busy_cpu_s": [1.0] * 3, "step_time_s": step_s}
        values |= {"device_busy_s": [*busy]} if known_by == "times" else {}
        observations.append(frame(step, values, time_s=20.0 * step))
    bank = [SlowdownDetector(SlowdownConfig())] if lockstep else [OwnPastDetector(OwnPastConfig())]
    slow = () if lockstep else (1,)
    assert [one.ranks for one in opened(evaluate(observations, bank))] == ([] if known_by == "nothing" else [slow])


@pytest.mark.parametrize("wait", [True, False])
def test_a_host_that_takes_longer_is_a_cause_only_where_its_device_waits_for_it(wait: bool) -> None:
    device_s = np.full(300, 0.8)
    assert rows(np.where(np.arange(300) < 200, 0.3, 0.7), device_s, wait=wait) == []
    (finding,) = rows(np.where(np.arange(300) < 200, 0.3, 0.96), device_s, wait=wait)
    assert (finding.ranks, finding.cause) == ((2,), "host")
    assert finding.evidence["ratio"] == pytest.approx(1.2, rel=0.05)
    (finding,) = rows(np.full(300, 0.3), np.where(np.arange(300) < 200, 0.8, 0.96), wait=wait)
    assert (finding.ranks, finding.cause) == ((2,), "device")


def test_a_rank_whose_device_was_not_measured_is_not_judged_in_that_row() -> None:
    values = {"step_time_s": [1.0] * 4, "busy_s": [1.0] * 4, "device_busy_s": [0.5, 0.6, 0.7, 0.8]}
    whole = frame(1, values)
    assert device_seconds(whole) == pytest.approx([0.5, 0.6, 0.7, 0.8])
    assert device_seconds(without(whole, 1)) == pytest.approx([0.5, np.nan, 0.7, 0.8], nan_ok=True)
    assert device_seconds(without(whole, 1, 2)) is None
    assert device_seconds(frame(1, {"step_time_s": [1.0]})) is None


def without(row: Frame, *ranks: int) -> Frame:
    here: Bools = ~np.isin(np.arange(4), ranks)
    return dataclasses.replace(row, present={**row.present, "device_busy_s": here})


def test_a_time_that_is_not_finite_is_no_fault_of_training() -> None:
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    for step in range(5):
        values = {"loss": [1.0, 1.0], "device_busy_s": [np.inf, 0.5], "device_wait_s": [np.nan, 0.5]}
        observations.append(frame(step, values))
    assert evaluate(observations, detectors()) == []


def test_a_recording_of_device_times_is_replayed_by_them(tmp_path: Path) -> None:
    path = tmp_path / "job.csv"
    write_job(Job(16, AT + 40, 1, placement=DEVICE_TIMES).inject(Slow(5, AT, 1.1)), path)
    # The CPU times stay, and nothing but the device times tells of devices.
    path.write_text(path.read_text().replace("device_uuid", "note", 1))
    settings = {"job": "test", "until_step": None, "progress": lambda _done, _total: None}
    outcome = replay([open_source(path)], {}, [CatalogueConfig()], **settings)  # type: ignore[arg-type]
    (incident,) = outcome.incidents[0]
    assert (incident.kind, incident.ranks, incident.cause) == (Kind.STRAGGLER, (5,), "device")


WAYS = [
    pytest.param(RankPlacement(launch_cpu=True), id="UUIDs"),
    pytest.param(RankPlacement(launch_cpu=True, uuids=False), id="types"),
]


def known_late(job: Job, rows: int) -> Iterator[Observation]:
    """The job, whose ranks report their devices after so many steps of each launch."""
    reported: AttemptStart | None = None
    seen = 0
    for observation in generate(job):
        if isinstance(observation, AttemptStart):
            reported, seen = observation, 0
            nothing = ("",) * job.world_size
            topology = dataclasses.replace(observation.topology, device_uuid=nothing, device_type=())
            yield dataclasses.replace(observation, topology=topology)
            continue
        yield observation
        seen += isinstance(observation, Frame)
        if reported is not None and seen == rows:
            yield reported
            reported = None


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("factor", [1.05, 1.25, 2.0])
def test_a_level_cpu_time_beside_a_slow_device_changes_nothing(placement: RankPlacement, factor: float) -> None:
    job = Job(16, AT + 40, 1).inject(Slow(5, AT, factor))
    without = found(generate(job))
    assert (without[0].kind, without[0].ranks, without[0].cause) == (Kind.STRAGGLER, (5,), "worker")
    assert found(generate(dataclasses.replace(job, placement=placement))) == without


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("factor", [1.05, 1.5])
def test_so_it_is_when_all_devices_become_slower(placement: RankPlacement, factor: float) -> None:
    job = Job(16, AT + 40, 1).inject(SlowJob(AT, factor))
    without = found(generate(job))
    assert [finding.kind for finding in without] == [Kind.SLOWDOWN]
    assert found(generate(dataclasses.replace(job, placement=placement))) == without


@pytest.mark.parametrize("placement", WAYS)
@pytest.mark.parametrize("fault", [Slow(5, AT, 1.15), SlowJob(AT, 1.15)], ids=lambda fault: type(fault).__name__)
def test_a_job_that_learns_of_its_devices_late_is_judged_by_them_from_then_on(placement, fault):
    job = Job(16, AT + 40, 1, placement=placement).inject(fault)
    in_time, late = found(generate(job)), found(known_late(job, rows=8))
    assert [(finding.kind, finding.ranks) for finding in late] == [(one.kind, one.ranks) for one in in_time]
    assert abs((late[0].detected_step or 0) - (in_time[0].detected_step or 0)) <= 2


@pytest.mark.parametrize("rows", [1, 3])
def test_what_a_unit_could_do_before_a_relaunch_is_known_when_its_uuid_is_reported_again(rows: int) -> None:
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
    findings = evaluate([*observations[:at], known, *observations[at:]], [detector])
    (by_cpu, by_device), (end,) = opened(findings), closed(findings)
    by = "own" if at_step else "cpu"
    assert (by_cpu.evidence["witness"], end.ranks, by_device.evidence["witness"]) == (by, (3,), "wall")
    assert (by_device.detected_step or 0) > 200


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
def test_one_rank_on_a_device_makes_a_job_an_accelerated_one(uuids, types, expected):
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


def test_a_device_that_is_reported_for_the_first_time_goes_on_with_what_its_rank_had() -> None:
    before = units_of(on("a/", "a/", "a/"), [])
    assert moves(before, on("a/g", "a/", "a/"), same_attempt=True) == [0, 1, 2]
    half = units_of(on("a/g", "a/", "a/"), before)
    assert moves(half, on("a/g", "a/h", "a/i"), same_attempt=True) == [0, 1, 2]
    assert moves(before, on("a/g", "a/", "a/"), same_attempt=False) == [-1, 1, 2]
