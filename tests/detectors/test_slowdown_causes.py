"""Why the whole job is slower: named where what it measures tells, and left open where it does not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rankwatch_detectors.base import Finding, Frame, Kind, Observation
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.step_parts import StepParts, cause_of, parts_of
from rankwatch_service.simulate.faults import Congestion, Fault, Slow, SlowJob, Throttle
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from tests.support.detection.verdicts import judge, opened
from tests.support.values.presences import frame

RANKS = 16
EVERYBODY = tuple(range(RANKS))
DEVICES = RankPlacement(device_times=True)
HOSTS = RankPlacement(accelerated=False)


def job(placement: RankPlacement, *faults: Fault, late_values: bool = False) -> Iterator[Observation]:
    return generate(Job(RANKS, 400, 3, placement=placement, late_values=late_values).inject(*faults))


def without(observations: Iterator[Observation], *names: str) -> Iterator[Observation]:
    """The same, with some metrics not reported."""
    for one in observations:
        if not isinstance(one, Frame):
            yield one
            continue
        yield replace(one, values={name: column for name, column in one.values.items() if name not in names})


def slowdown(observations: Iterator[Observation]) -> Finding:
    (finding,) = opened(judge(observations, [SlowdownDetector(SlowdownConfig())]))
    assert finding.onset_step is not None
    assert 295 <= finding.onset_step <= 305
    return finding


@pytest.mark.parametrize("late_values", [False, True])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        pytest.param(Congestion(300, 3.0), "communication", id="collectives"),
        pytest.param(SlowJob(300, 1.3), "device", id="devices"),
        pytest.param(Slow(EVERYBODY, 300, 1.3, data_wait=True), "data", id="data"),
    ],
)
def test_devices_tell_what_has_grown(fault: Fault, cause: str, late_values: bool) -> None:
    finding = slowdown(job(DEVICES, fault, late_values=late_values))
    assert finding.cause == cause
    grown = finding.evidence["grown_s"]
    assert math.isclose(grown[cause], grown["step"], rel_tol=0.35)
    assert cause.removesuffix("s") in finding.summary.partition(" Most of it is ")[2]


def test_ranks_on_hosts_that_report_no_cpu_time_tell_that_collectives_have_grown() -> None:
    finding = slowdown(without(job(HOSTS, Congestion(300, 3.0)), "busy_cpu_s"))
    assert finding.cause == "communication"
    assert finding.summary.endswith("communication: even the rank that comes last waits longer in collectives.")


def test_ranks_on_hosts_that_all_work_for_longer_tell_no_cause() -> None:
    """Their own time has grown, for which a host has many reasons; their waiting has not."""
    observations = list(job(HOSTS, SlowJob(300, 1.5)))
    finding = slowdown(without(iter(observations), "busy_cpu_s"))
    assert finding.cause == ""
    assert max(finding.evidence["grown_s"], key=finding.evidence["grown_s"].get) in ("step", "own")
    assert slowdown(iter(observations)).cause == ""


def test_what_the_host_of_a_device_waits_for_tells_nothing() -> None:
    assert slowdown(job(RankPlacement(), Congestion(300, 3.0))).cause == ""


def test_nothing_but_the_step_time_tells_no_cause() -> None:
    names = ("busy_s", "wait_s", "phase.data_wait", "phase.forward", "phase.backward", "busy_cpu_s")
    finding = slowdown(without(job(HOSTS, Congestion(300, 6.0)), *names))
    assert (finding.cause, "Most of it" in finding.summary) == ("", False)


def test_one_slow_device_is_a_straggler_by_its_device_and_no_communication_although_all_others_wait() -> None:
    findings = opened(judge(job(DEVICES, Throttle(5, 300, 1.4))))
    causes = {(finding.kind, finding.cause) for finding in findings}
    assert (Kind.STRAGGLER, "device") in causes
    assert (Kind.SLOWDOWN, "communication") not in causes


def row(*wait_s: float, data_s: float = 0.1) -> Frame:
    count = len(wait_s)
    return frame(0, {"step_time_s": [1.0] * count, "device_wait_s": wait_s, "phase.data_wait": [data_s] * count})


def test_what_collectives_take_is_what_the_last_to_come_waits() -> None:
    assert parts_of(row(0.5, 0.2, 0.9), on_devices=True)[0] == 0.2
    assert math.isnan(parts_of(row(math.nan, math.nan, 0.9), on_devices=True)[0])


def test_a_part_that_grew_by_less_than_half_is_no_cause() -> None:
    assert cause_of({"step": 1.0, "communication": 0.5, "data": 0.1}) == "communication"
    assert cause_of({"step": 1.0, "communication": 0.49, "data": 0.3}) == ""
    assert cause_of({"step": -1.0, "communication": -0.1}) == ""
    assert cause_of({}) == ""


def test_a_part_that_is_not_measured_in_some_rows_keeps_what_is_usual() -> None:
    parts = StepParts()
    for number in range(20):
        parts.push(row(*[math.nan if number % 2 else 0.25] * 3), 1.0, on_devices=True)
        parts.learn()
    parts.push(row(0.75, 0.75, 0.75), 1.5, on_devices=True)
    assert parts.grown_s(1) == pytest.approx({"step": 0.5, "communication": 0.5, "data": 0.0})


def test_until_it_is_known_what_is_usual_nothing_has_grown() -> None:
    parts = StepParts()
    parts.push(row(0.5, 0.5), 1.0, on_devices=True)
    parts.learn()
    assert parts.grown_s(1) == {}
