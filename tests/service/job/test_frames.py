"""Frames of the steps of all ranks, and those that wait for what their devices measure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
import pytest

from rankwatch import wire
from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Observation, StepKind
from rankwatch_service.job import frames as frames_module
from rankwatch_service.job.detection import EXPECTED_STEPS, HELD_MAX, TimedFrames
from rankwatch_service.job.frames import FAR_STEPS, LATE_STEPS, MISSES_MAX, STREAK, FrameWindow
from rankwatch_service.simulate.faults import Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, RankPlacement
from rankwatch_service.stream.saved import pack, unpack
from suite.pipeline import recording_pipeline, topology_state_of
from tests.support.values.batches import column, rows, table
from tests.support.values.presences import ATTEMPT, frame, topology


def window(ranks: int = 2, family: str = "steps") -> FrameWindow:
    return FrameWindow("l.0", family, ranks)


@pytest.fixture
def target() -> FrameWindow:
    return window()


def add(target: FrameWindow, step: int, ranks: list[int], now_s: float = 0.0, **values) -> list[Frame]:
    values = values or {"busy_s": [float(step)] * len(ranks)}
    return target.add(rows(table([step] * len(ranks), ranks, **values)), now_s)


def steps(closed: list[Frame]) -> list[int]:
    return [frame.step for frame in closed]


def test_a_frame_closes_when_every_rank_has_reported(target):
    add(target, 1, [0], loss=[1.0])
    assert list(target.ready(0.0, 1.0)) == []
    add(target, 1, [1], loss=[2.0])
    (frame,) = target.ready(0.0, 1.0)
    assert (frame.attempt, frame.family, frame.step, frame.kind) == ("l.0", "steps", 1, StepKind.TRAIN)
    assert frame.values["loss"].tolist() == [1.0, 2.0]
    assert frame.present["loss"].tolist() == [True, True]


@pytest.mark.parametrize("masked", [False, True])
def test_whole_steps_of_a_table_are_the_frames_of_their_rows_one_by_one(masked: bool) -> None:
    random = np.random.default_rng(2)
    step, rank = np.repeat(np.arange(5, 25), 3), np.tile(np.arange(3), 20)
    order = random.permutation(60)
    loss, busy_s = random.random(60), np.where(np.arange(60) == 31, np.inf, 1.0)
    absent = masked & (random.random(60) < 0.1)
    losses = [None if gone else float(one) for one, gone in zip(loss, absent, strict=True)]
    given = [(int(step[at]), int(rank[at]), losses[at], float(busy_s[at])) for at in order]
    together, apart = window(3), window(3)
    for target in (together, apart):
        add(target, 0, [0, 1, 2], lr=[1.0, 1.0, 1.0])
    frames = [list(together.ready(0.0, 1.0)), list(apart.ready(0.0, 1.0))]

    def put(target: FrameWindow, chosen: list[int]) -> None:
        steps_of, ranks_of, of_loss, seconds = zip(*(given[at] for at in chosen), strict=True)
        target.add(rows(table(steps_of, ranks_of, loss=of_loss, busy_s=seconds)), 0.0)

    put(together, list(range(60)))
    for at in range(60):
        put(apart, [at])
    frames[0] += together.ready(0.0, 1.0)
    frames[1] += apart.ready(0.0, 1.0)
    assert steps(frames[0]) == [0, *range(5, 25)]
    assert [repr(one) for one in frames[0]] == [repr(one) for one in frames[1]]


def test_frames_close_in_step_order_whatever_order_they_came_in(target):
    for step in (3, 1, 2):
        add(target, step, [0])
    add(target, 3, [1])
    add(target, 2, [1])
    assert list(target.ready(0.0, 1.0)) == []
    add(target, 1, [1])
    assert steps(list(target.ready(0.0, 1.0))) == [1, 2, 3]


def test_a_late_frame_closes_with_what_is_missing_unknown(target):
    add(target, 0, [0])
    for step in range(1, LATE_STEPS + 1):
        add(target, step, [0, 1])
    assert list(target.ready(1.9, 0.1)) == []
    closed = list(target.ready(2.0, 0.1))
    assert steps(closed) == list(range(LATE_STEPS + 1))
    assert closed[0].present["busy_s"].tolist() == [True, False]
    assert target.counts["incomplete"] == 1


def test_a_frame_of_a_slow_job_is_late_after_eight_steps(target):
    add(target, 0, [0])
    assert list(target.ready(79.0, 10.0)) == []
    assert steps(list(target.ready(80.0, 10.0))) == [0]


def test_a_row_that_comes_after_its_frame_closed_does_not_change_it(target):
    add(target, 1, [0])
    assert steps(list(target.ready(100.0, 1.0))) == [1]
    add(target, 1, [1])
    assert list(target.ready(200.0, 1.0)) == []
    assert target.counts["late"] == 1


def test_late_rows_are_kept_for_the_charts(target):
    add(target, 1, [0], loss=[1.0])
    list(target.ready(100.0, 1.0))
    (frame,) = add(target, 1, [1], loss=[2.0])
    assert (frame.step, frame.values["loss"].tolist()) == (1, [0.0, 2.0])
    assert frame.present["loss"].tolist() == [False, True]


def test_the_first_of_repeated_step_records_counts(target):
    add(target, 1, [0, 0], loss=[1.0, 9.0])
    add(target, 1, [0], loss=[8.0])
    add(target, 1, [1], loss=[2.0])
    (frame,) = target.ready(0.0, 1.0)
    assert frame.values["loss"].tolist() == [1.0, 2.0]
    assert target.counts["repeated"] == 2


def test_nan_is_a_value_and_an_absent_value_is_not(target):
    add(target, 1, [0, 1], loss=[math.nan, None], busy_s=[1.0, 1.0])
    (frame,) = target.ready(0.0, 1.0)
    assert math.isnan(frame.values["loss"][0])
    assert frame.present["loss"].tolist() == [True, False]


def test_exact_columns_keep_all_their_bits():
    target = window(1)
    target.add(rows(table([1], [0], exact={"fingerprint": [2**62 + 3]})), 0.0)
    (frame,) = target.ready(0.0, 1.0)
    assert frame.exact["fingerprint"].tolist() == [2**62 + 3]
    assert frame.present["fingerprint"].tolist() == [True]
    assert "fingerprint" not in frame.values


def test_a_metric_that_no_rank_reported_is_not_in_the_frame():
    target = window(1)
    add(target, 1, [0], loss=[1.0])
    add(target, 2, [0], busy_s=[1.0])
    first, second = target.ready(0.0, 1.0)
    assert set(first.values) == {"loss"}
    assert set(second.values) == {"busy_s"}


def test_one_row_of_another_kind_labels_the_step(target):
    evaluated = table([1, 1], [0, 1], exact={"kind": [0, 1]})
    target.add(rows(evaluated), 0.0)
    assert next(target.ready(0.0, 1.0)).kind is StepKind.EVAL


def test_a_departed_rank_is_not_waited_for(target):
    add(target, 1, [0])
    target.depart(1)
    assert steps(list(target.ready(0.0, 1.0))) == [1]


def test_a_rank_missing_for_long_is_not_waited_for_until_it_reports_again(target):
    for step in range(MISSES_MAX):
        add(target, step, [0])
    assert len(list(target.ready(100.0, 1.0))) == MISSES_MAX
    add(target, 100, [0], now_s=100.0)
    assert steps(list(target.ready(100.0, 1.0))) == [100]
    add(target, 101, [1], now_s=100.0)
    add(target, 101, [0], now_s=100.0)
    assert steps(list(target.ready(100.0, 1.0))) == [101]
    add(target, 102, [0], now_s=100.0)
    assert list(target.ready(100.0, 1.0)) == []


def test_a_wrong_step_number_of_one_rank_makes_no_later_row_late():
    target = window(3)
    add(target, 1, [0, 1, 2])
    assert steps(list(target.ready(0.0, 1.0))) == [1]
    add(target, 1 + FAR_STEPS + 1, [2])
    assert list(target.ready(100.0, 1.0)) == []
    add(target, 2, [0, 1, 2], now_s=100.0)
    assert steps(list(target.ready(100.0, 1.0))) == [2]
    assert target.counts["far"] == 1


def test_ranks_that_the_attempt_does_not_have_are_counted(target):
    add(target, 1, [0, 1, 7])
    assert steps(list(target.ready(0.0, 1.0))) == [1]
    assert target.counts["rank"] == 1


def test_open_frames_are_bounded(target, monkeypatch):
    monkeypatch.setattr(frames_module, "OPEN_MAX", 10)
    for step in range(15):
        add(target, step, [0])
    assert len(list(target.ready(0.0, 1.0))) == 5
    assert target.counts["pushed"] == 5


def test_metric_names_are_bounded(monkeypatch):
    monkeypatch.setattr(frames_module, "NAMES_MAX", 2)
    target = window(1)
    add(target, 1, [0], a=[1.0], b=[2.0], c=[3.0])
    assert set(next(target.ready(0.0, 1.0)).values) == {"a", "b"}
    assert target.counts["names"] == 1


def test_several_late_values_of_a_rank_and_step_are_merged():
    target = window(1, "values")
    target.add(rows(table([1, 1], [0, 0], a=[1.0, None], b=[None, 2.0])), 0.0)
    (frame,) = target.ready(0.0, 1.0)
    assert (frame.values["a"][0], frame.values["b"][0]) == (1.0, 2.0)


def test_a_late_value_that_usually_comes_is_waited_for():
    target = window(1, "values")
    for step in range(STREAK):
        add(target, step, [0], a=[1.0], b=[1.0])
        assert steps(list(target.ready(0.0, 1.0))) == [step]
    add(target, 50, [0], a=[1.0])
    assert list(target.ready(0.0, 1.0)) == []
    add(target, 50, [0], b=[2.0])
    (frame,) = target.ready(0.0, 1.0)
    assert frame.values["b"].tolist() == [2.0]


def test_no_frame_is_late_because_the_service_could_not_receive(target):
    add(target, 0, [0])
    target.discount_outage(60.0)
    assert list(target.ready(61.0, 1.0)) == []
    assert steps(list(target.ready(68.0, 1.0))) == [0]


def test_flushing_closes_everything_in_order(target):
    for step in (2, 1):
        add(target, step, [0])
    assert steps(list(target.flush(0.0))) == [1, 2]
    assert list(target.flush(0.0)) == []


def test_an_attempt_that_turns_out_larger_keeps_its_values():
    target = window(1)
    target.add(rows(table([1], [0], loss=[1.0], exact={"fingerprint": [5]})), 0.0)
    target.resize(2)
    add(target, 1, [1], loss=[2.0])
    (frame,) = target.ready(0.0, 1.0)
    assert frame.values["loss"].tolist() == [1.0, 2.0]
    assert frame.exact["fingerprint"].tolist() == [5, 0]
    assert frame.present["fingerprint"].tolist() == [True, False]


def test_a_closed_frame_cannot_be_written_to():
    target = window(1)
    add(target, 1, [0])
    (frame,) = target.ready(0.0, 1.0)
    with pytest.raises(ValueError, match="read-only"):
        frame.values["busy_s"][0] = 2.0


@pytest.mark.parametrize("split", range(0, 40, 3))
def test_a_restored_window_closes_the_same_frames(split):
    chance = np.random.default_rng(7)
    moves = [(int(s), int(r)) for s, r in chance.permuted(np.indices((20, 2)).reshape(2, -1).T, axis=0)]

    def play(restore_at: int | None) -> list[tuple]:
        target, seen = window(2, "values"), []
        for index, (step, rank) in enumerate(moves):
            if index == restore_at:
                target = FrameWindow.restored(unpack(pack(target.state())))
            add(target, step, [rank], float(index), a=[float(step)])
            seen += [(f.step, f.values["a"].tolist(), f.present["a"].tolist()) for f in target.ready(float(index), 1.0)]
        return [*seen, dict(target.counts)]

    assert play(split) == play(None)


def test_columns_in_another_order_land_in_the_same_place():
    target = window(2)
    add(target, 1, [0], a=[1.0], b=[2.0])
    swapped = {"b": column([4.0]), "a": column([3.0]), "step": column([1], "i8"), "rank": column([1], "u1")}
    target.add(rows(wire.Table(1, swapped)), 0.0)
    (frame,) = target.ready(0.0, 1.0)
    assert (frame.values["a"].tolist(), frame.values["b"].tolist()) == ([1.0, 3.0], [2.0, 4.0])


@pytest.mark.parametrize(("loss", "finite"), [(2.0, True), (math.nan, False), (-math.inf, False)])
def test_a_frame_says_whether_all_its_values_are_finite(target, loss, finite):
    add(target, 1, [0, 1], loss=[1.0, loss], busy_s=[0.5, 0.5])
    (frame,) = target.ready(0.0, 1.0)
    assert frame.finite is finite


def test_rows_of_several_batches_may_come_in_any_order():
    target = window(ranks=4)
    table_of_six = rows(table([2, 1, 2, 1, 1, 2], [3, 2, 0, 0, 1, 1], loss=[23.0, 12.0, 20.0, 10.0, 11.0, 21.0]))
    assert target.fits(table_of_six, 0.0)
    target.add(table_of_six, 0.0)
    assert list(target.ready(0.0, 1.0)) == []
    add(target, 1, [3], loss=[13.0])
    add(target, 2, [2], loss=[22.0])
    first, second = target.ready(0.0, 1.0)
    assert first.values["loss"].tolist() == [10.0, 11.0, 12.0, 13.0]
    assert second.values["loss"].tolist() == [20.0, 21.0, 22.0, 23.0]


@pytest.mark.parametrize("far", [1, 2**40])
def test_rows_of_a_step_are_sorted_by_rank_and_a_table_with_a_rank_twice_in_a_step_does_not_fit(far):
    target = window(ranks=4)
    once = rows(table([far, 0, far], [1, 1, 0], loss=[1.0, 2.0, 3.0]))
    assert [(step, chosen.tolist()) for step, chosen in once.by_step] == [(0, [1]), (far, [2, 0])]
    assert target.fits(once, 0.0)
    twice = rows(table([far, 0, far], [1, 1, 1], loss=[1.0, 2.0, 3.0]))
    assert [(step, chosen.tolist()) for step, chosen in twice.by_step] == [(0, [1]), (far, [0, 2])]
    assert not target.fits(twice, 0.0)


def test_a_frame_that_a_later_batch_of_the_bundle_completes_stays_open_until_then(target):
    bundle = rows(table([1], [0], a=[1.0]), table([1, 2], [1, 0], a=[1.0, 1.0]), table([2], [1], a=[1.0]))
    target.add(bundle, 0.0)
    last = bundle.last_batches()
    assert last == {1: 1, 2: 2}
    closed = [steps(list(target.ready(0.0, 1.0, {step for step in last if last[step] > batch}))) for batch in range(3)]
    assert closed == [[], [1], [2]]


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
    reported = [one for observation in observations for one in timed.observe(observation)]
    return [(one.family, one.step, one.awaits_times) for one in reported if isinstance(one, Frame)]


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


def test_a_step_of_which_a_rank_tells_nothing_is_given_out_when_a_later_one_is_reported(timed: TimedFrames) -> None:
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
        reported = families(timed, step(number), *([late(number - behind)] if number > behind else []))
        waited += reported[0][2]
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
    job = Job(8, 190, 3, placement=RankPlacement(launch_cpu=True, device_times=True), late_values=True)
    job = job.inject(Slow(5, 150, 1.2))
    whole = findings_of(job, -1)
    assert [finding[0] for finding in whole] == ["straggler"]
    for cut in (300, 301, 302):
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
