"""Steps that wait for what their devices measure: who gets which frame, and what happens when nothing comes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Observation, StepKind
from rankwatch_service.job.detection import EXPECTED_STEPS, HELD_MAX, TimedFrames
from rankwatch_service.simulate.faults import Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.placement import RankPlacement
from rankwatch_service.stream.saved import pack, unpack
from suite.pipeline import recording_pipeline, topology_state_of
from tests.support.values.presences import ATTEMPT, frame, topology

HOST = {"step_time_s": [1.0, 1.0], "busy_s": [0.9, 0.9], "phase.data_wait": [0.0, 0.1], "loss": [1.0, 2.0]}
DEVICE = {"device_step_s": [1.0, 1.0], "device_busy_s": [0.5, 0.6], "grad_norm": [1.0, 1.0]}


@pytest.fixture
def timed() -> TimedFrames:
    target = TimedFrames()
    list(target.observe(AttemptStart(ATTEMPT, topology(2), 0.0)))
    return target


def step(number: int, kind: StepKind = StepKind.TRAIN) -> Frame:
    return dataclasses.replace(frame(number, HOST), kind=kind)


def late(number: int, values: Mapping[str, list[float]] = DEVICE) -> Frame:
    return dataclasses.replace(frame(number, dict(values)), family="values")


def families(timed: TimedFrames, *observations: Observation) -> list[tuple[str, int, bool]]:
    told = [one for observation in observations for one in timed.observe(observation)]
    return [(one.family, one.step, one.awaits_times) for one in told if isinstance(one, Frame)]


def test_a_job_without_device_times_is_passed_on_as_it_is(timed: TimedFrames) -> None:
    values = late(1, {"grad_norm": [1.0, 1.0]})
    assert families(timed, step(1), values, step(2)) == [("steps", 1, False), ("values", 1, False), ("steps", 2, False)]


def test_once_they_come_each_step_waits_for_its_device_times(timed: TimedFrames) -> None:
    assert families(timed, step(1), late(1)) == [("steps", 1, False), ("values", 1, False)]
    assert families(timed, step(2), step(3), late(2), late(3)) == [
        ("steps", 2, True),
        ("steps", 3, True),
        ("values", 2, False),
        ("timed", 2, False),
        ("values", 3, False),
        ("timed", 3, False),
    ]


def test_a_timed_frame_has_the_times_of_both_and_the_kind_of_the_step(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    *_, last = [one for kind in (step(2, StepKind.EVAL), late(2)) for one in timed.observe(kind)]
    assert isinstance(last, Frame)
    assert last.kind is StepKind.EVAL
    assert set(last.values) == {"step_time_s", "busy_s", "phase.data_wait", "device_step_s", "device_busy_s"}
    np.testing.assert_array_equal(last.values["device_busy_s"], [0.5, 0.6])


def test_a_step_whose_times_are_lost_is_not_judged_and_holds_up_nothing(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    assert ("timed", 3, False) in families(timed, step(2), step(3), late(3))
    assert families(timed, late(2)) == [("values", 2, False)]


def test_times_that_come_in_parts_are_one_frame_once_all_ranks_have_told_them(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    parts = [part(2, 0), part(2, 1)]
    assert families(timed, step(2), parts[0]) == [("steps", 2, True), ("values", 2, False)]
    (_, whole) = [one for one in timed.observe(parts[1]) if isinstance(one, Frame)]
    assert whole.family == "timed"
    np.testing.assert_array_equal(whole.values["device_busy_s"], [0.5, 0.6])


def test_a_step_of_which_a_rank_tells_nothing_is_given_out_when_a_later_one_is_told(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    assert families(timed, step(2), step(3), part(2, 0))[-1] == ("values", 2, False)
    assert families(timed, part(3, 0)) == [("values", 3, False), ("timed", 2, False)]


def part(number: int, rank: int) -> Frame:
    """The device times of one rank, in a message that came after the others of the step."""
    whole = late(number)
    here = np.arange(2) == rank
    return dataclasses.replace(whole, present=dict.fromkeys(whole.present, here), late=True)


def test_when_no_more_device_times_come_steps_are_judged_by_their_hosts_again(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    waiting = families(timed, *(step(2 + number) for number in range(EXPECTED_STEPS + 2)))
    assert [awaits for _, _, awaits in waiting] == [True] * EXPECTED_STEPS + [False] * 2


def test_a_bounded_number_of_steps_waits(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    families(timed, *(step(2 + number) for number in range(HELD_MAX + 5)))
    assert len(timed.state()["held"]) == HELD_MAX


def test_steps_of_very_many_values_wait_in_smaller_number(timed: TimedFrames, monkeypatch: pytest.MonkeyPatch) -> None:
    families(timed, step(1), late(1))
    values_of_a_step = 3 * 2
    monkeypatch.setattr("rankwatch_service.job.detection.HELD_CELLS_MAX", 4 * values_of_a_step)
    families(timed, *(step(2 + number) for number in range(10)))
    assert [one["step"] for one in timed.state()["held"]] == [8, 9, 10, 11]


def test_times_that_always_come_too_late_keep_no_step_waiting_for_long(timed: TimedFrames) -> None:
    families(timed, step(0), late(0))
    behind = HELD_MAX + 5
    waited = 0
    for number in range(1, 4 * EXPECTED_STEPS):
        told = families(timed, step(number), *([late(number - behind)] if number > behind else []))
        waited += told[0][2]
    assert waited <= EXPECTED_STEPS


def test_another_attempt_begins_without_what_waited(timed: TimedFrames) -> None:
    families(timed, step(1), late(1), step(2))
    families(timed, AttemptStart("l.1", topology(2), 0.0))
    assert timed.state()["held"] == []


def test_ranks_at_their_own_pace_are_not_kept_waiting(timed: TimedFrames) -> None:
    families(timed, step(1), late(1))
    families(timed, AttemptStart(ATTEMPT, dataclasses.replace(topology(2), lockstep=False), 0.0))
    assert families(timed, step(2), late(2)) == [("steps", 2, False), ("values", 2, False)]


def test_a_snapshot_at_any_step_finds_what_an_unbroken_run_finds() -> None:
    job = Job(8, 220, 3, placement=RankPlacement(launch_cpu=True, device_times=True), late_values=True)
    job = job.inject(Slow(5, 150, 1.2))
    whole = findings_of(job, -1)
    assert [finding[0] for finding in whole] == ["straggler"]
    for cut in (100, 300, 301, 302, 303):
        assert findings_of(job, cut) == whole


def findings_of(job: Job, cut: int) -> list[tuple[str, int | None]]:
    """The opened findings, with a restart from a snapshot before the observation number `cut`."""
    found: list[Finding] = []
    pipeline, state = recording_pipeline(found), topology_state_of(job.topology())
    start = None
    for number, observation in enumerate(generate(job)):
        if isinstance(observation, AttemptStart):
            start = observation
        if number == cut:
            saved = unpack(pack(pipeline.state()))
            pipeline = recording_pipeline(found)
            assert pipeline.restore(saved, start) == []
        pipeline.observe(observation, state)
    return [(finding.kind.value, finding.detected_step) for finding in found if finding.change is Change.OPEN]
