"""A loop that evaluates or saves between two steps hangs only when that is beyond what this job does."""

from __future__ import annotations

import json

import pytest

from rankwatch_detectors.base import UNREPORTED, Finding
from rankwatch_detectors.progress.hang import HangConfig, HangDetector
from tests.support.values.presences import Clockwork


def training_job(seconds: int = 20) -> Clockwork:
    """Four ranks, ten steps a second."""
    job = Clockwork(HangDetector(HangConfig()), 4)
    assert job.train(seconds) == []
    return job


def after_s(job: Clockwork, seconds: int) -> list[tuple[str, int]]:
    """What is told while all stand still, and how many seconds later."""
    begin_s = job.now_s
    return [(f"{f.change} {f.severity}", round(f.detected_time_s - begin_s)) for f in job.stand(seconds)]


def others_go_on(job: Clockwork, paused: int) -> None:
    """All ranks but one enter the next step, and wait for it there."""
    for rank in range(job.ranks):
        if rank != paused:
            job.step[rank] += 1
            job.entered_s[rank] = job.now_s
            job.phase[rank] = "backward"


def test_eight_seconds_of_evaluation_every_hundred_steps_are_nothing_for_ever() -> None:
    job = training_job()
    for _ in range(60):
        job.pause()
        assert job.stand(8) + job.train(3) == []


def test_an_endless_pause_is_a_warning_after_a_minute_and_critical_after_a_quarter_of_an_hour() -> None:
    job = training_job()
    job.pause()
    job.cpu_s = [1e6] * 4  # busy or not: who evaluates computes
    assert after_s(job, 1200) == [("open warning", 60), ("update critical", 900)]


def test_a_job_of_long_steps_may_pause_for_twenty_of_them() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    for _ in range(30):
        job.stand(5)
        job.step = [step + 1 for step in job.step]
        job.entered_s = [job.now_s] * 4
    job.pause()
    assert after_s(job, 1200) == [("open warning", 100), ("update critical", 900)]


@pytest.mark.parametrize(("known_s", "critical_s"), [(10, 60), (50, 150), (400, 1200)])
def test_a_pause_that_ended_well_says_how_long_the_next_one_may_last(known_s: int, critical_s: int) -> None:
    job = training_job()
    job.pause()
    job.stand(known_s)
    job.train(60)
    job.pause()
    told = after_s(job, 1500)
    assert (told[0][1], told[-1]) == (60, (f"{'open' if critical_s == 60 else 'update'} critical", critical_s))


def test_what_a_job_has_shown_survives_a_snapshot_and_a_relaunch() -> None:
    job = training_job()
    job.pause()
    job.stand(100)
    job.train(20)
    saved = json.loads(json.dumps(job.detector.snapshot(), default=lambda array: array.tolist()))
    assert saved["_patience"]["_longest"]["pause"] == 100.0
    again = HangDetector(HangConfig())
    again.restore(job.detector.snapshot())
    job.detector = again
    job.begin("next.0")
    job.train(20)
    job.pause()
    assert after_s(job, 400) == [("open warning", 60), ("update critical", 300)]


def test_a_pause_that_a_new_attempt_ends_did_not_end_well() -> None:
    job = training_job()
    job.pause()
    job.stand(100)
    job.begin("next.0")
    job.train(20)
    job.pause()
    assert after_s(job, 400) == [("open warning", 60)]


def test_a_rank_that_is_stopped_in_a_pause_is_told_and_critical_as_soon_as_within_a_step() -> None:
    job = training_job()
    job.pause()
    job.os_state[2] = "T"
    told = job.stand(30)
    assert [(f"{f.change} {f.severity}", f.ranks) for f in told] == [("open info", (2,)), ("update critical", (2,))]
    assert told[-1].detected_time_s - told[-1].onset_time_s <= 8.0


def test_one_rank_that_saves_while_the_others_wait_is_known_once_it_was_seen() -> None:
    job = training_job()
    told = []
    for _ in range(10):
        job.pause(0)
        others_go_on(job, 0)
        told.append([f"{f.change} {f.severity}" for f in job.stand(8)])
        job.step, job.phase = [job.step[1]] * 4, [""] * 4
        job.train(5)
    assert told == [["open info"], *([[]] * 9)]


def test_one_rank_that_does_not_come_out_of_its_pause_while_the_others_wait_is_critical_after_a_minute() -> None:
    job = training_job()
    job.pause(0)
    others_go_on(job, 0)
    findings = job.stand(100)
    assert [(f"{f.change} {f.severity}", f.ranks) for f in findings] == [("open info", (0,)), ("update critical", (0,))]
    told, critical = (finding.detected_time_s - finding.onset_time_s for finding in findings)
    assert told <= 5
    assert 60 <= critical <= 61


def test_where_steps_follow_at_once_the_others_wait_for_the_rank_that_has_not_begun_its_work() -> None:
    job = training_job()
    job.rest(0)
    job.phase[1:] = ["forward"] * 3
    opened, graver = job.stand(100)
    told = [(f"{finding.change} {finding.severity}", finding.ranks) for finding in (opened, graver)]
    assert told == [("open info", (0,)), ("update critical", (0,))]
    assert "it has not begun its step, the others have" in opened.summary
    assert 60 <= graver.detected_time_s - graver.onset_time_s <= 61


def test_a_log_in_which_no_line_comes_is_information_and_critical_after_a_minute() -> None:
    job = Clockwork(HangDetector(HangConfig()), 1)
    job.phase = [UNREPORTED]
    job.train(20, steps_per_s=1)
    assert after_s(job, 100) == [("open info", 8), ("update critical", 60)]


def test_a_rank_that_never_finishes_its_step_while_the_others_pause_is_a_hang_within_the_step() -> None:
    job = training_job()
    job.pause(0, 1, 3)
    job.phase[2] = "forward"
    findings = job.stand(10)
    assert [f"{f.change} {f.severity}" for f in findings] == ["open info", "update critical"]


def test_a_labelled_evaluation_keeps_its_own_deadline_between_steps() -> None:
    job = training_job()
    for _ in range(2):
        job.pause()
        job.phase = ["eval"] * 4
        assert job.stand(40) == []
        job.phase = [""] * 4
        assert job.train(20) == []
    job.pause()
    job.phase = ["eval"] * 4
    assert after_s(job, 200) == [("open critical", 120)]


def test_a_step_that_was_slow_and_then_done_is_no_hang_while_the_job_evaluates() -> None:
    job = training_job()
    assert [f"{f.change} {f.severity}" for f in job.stand(4)] == ["open info"]
    job.pause()
    (closed,) = job.stand(50)
    assert closed.summary == f"The work of step {job.step[0]} is done."


def test_pauses_do_not_make_the_watch_over_steps_more_patient() -> None:
    job = training_job()
    for _ in range(30):
        job.pause()
        assert job.stand(20) + job.train(5) == []
    assert after_s(job, 10) == [("open info", 4), ("update critical", 5)]


def test_one_hiccup_of_little_more_than_twice_the_usual_step_wakes_nobody() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    findings: list[Finding] = []
    for count in range(60):
        for _ in range(39 if count == 50 else 15):
            job.now_s += 0.1 - 1.0  # ten ticks a second
            findings += job.tick()
        job.step = [step + 1 for step in job.step]
        job.entered_s = [job.now_s] * 4
    assert {str(f.severity) for f in findings} <= {"info"}


def test_stalls_that_end_by_themselves_again_and_again_are_soon_known_to_be_this_jobs_way() -> None:
    """An evaluation within the loop's body that nothing tells apart from a step: twice told, then waited for."""
    job = training_job(100)
    told = []
    for _ in range(40):
        told.append(len(job.stand(8)))
        job.train(3)
    assert sum(told[:6]) > 0
    assert sum(told[6:]) == 0


def test_a_rank_stopped_again_and_again_never_becomes_this_jobs_way() -> None:
    job = training_job(100)
    for _ in range(20):
        job.os_state[1] = "T"
        assert "critical" in {f.severity for f in job.stand(8)}
        job.os_state[1] = "R"
        job.train(3)
