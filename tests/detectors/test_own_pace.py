"""Where ranks do not wait for each other, each is judged against its own past, and none against another."""

from __future__ import annotations

import dataclasses

import pytest

from rankwatch_detectors.base import AttemptStart, Finding
from rankwatch_detectors.progress.hang import HangConfig, HangDetector
from rankwatch_detectors.progress.own_pace import OwnPaceDetector
from tests.support.values.presences import Clockwork, topology

STEP_S = (1, 3, 7, 20)
"""What a step of each rank takes."""


def rollouts(*, lockstep: bool = False, hang: bool = False) -> Clockwork:
    job = Clockwork(HangDetector(HangConfig()) if hang else OwnPaceDetector(HangConfig()), len(STEP_S))
    job.detector.observe(AttemptStart(job.attempt, dataclasses.replace(topology(4), lockstep=lockstep), 0.0))
    job.step = [0] * 4
    return job


def roll(job: Clockwork, seconds: int, *, but: tuple[int, ...] = ()) -> list[Finding]:
    findings: list[Finding] = []
    for _ in range(seconds):
        for rank, step_s in enumerate(STEP_S):
            if rank not in but and (job.now_s + 1) % step_s == 0:
                job.step[rank] += 1
                job.entered_s[rank] = job.now_s + 1
        findings += job.tick()
    return findings


def told(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.change, f.severity, str(f.scope)) for f in findings]


def test_ranks_that_go_at_their_own_pace_are_no_hang() -> None:
    assert roll(rollouts(), 600) == []


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 60), (1, 60), (2, 140), (3, 400)])
def test_a_rank_that_stands_is_found_by_its_own_past_while_the_others_go_on(rank: int, limit_s: int) -> None:
    job = rollouts()
    roll(job, 600)
    findings = roll(job, 500, but=(rank,))
    assert told(findings) == [("open", "warning", f"rank:{rank}")]
    assert findings[0].detected_time_s - findings[0].onset_time_s == pytest.approx(limit_s, abs=2)
    assert told(roll(job, 40)) == [("close", "warning", f"rank:{rank}")]


def test_a_rank_that_a_signal_stopped_is_critical_sooner() -> None:
    job = rollouts()
    roll(job, 600)
    job.os_state[1] = "T"
    findings = roll(job, 60, but=(1,))
    assert told(findings) == [("open", "critical", "rank:1")]
    assert findings[0].detected_time_s - findings[0].onset_time_s <= 15


def test_a_job_of_which_every_rank_stands_is_critical() -> None:
    job = rollouts()
    roll(job, 600)
    findings = job.stand(600)
    assert {str(f.scope) for f in findings if f.severity == "critical"} >= {"rank:3"}


def test_pauses_that_ended_well_are_a_ranks_past() -> None:
    job = rollouts()
    roll(job, 600)
    roll(job, 55, but=(0,))
    roll(job, 100)
    findings = roll(job, 300, but=(0,))
    assert findings[0].detected_time_s - findings[0].onset_time_s == pytest.approx(165, abs=5)


def test_ranks_that_march_together_are_left_to_the_job_as_a_whole() -> None:
    job = rollouts(lockstep=True)
    roll(job, 600)
    assert job.stand(600) == []
    apart = rollouts(hang=True)
    assert roll(apart, 600) + apart.stand(600) == []


def test_before_it_is_known_that_ranks_do_not_wait_one_that_goes_on_is_progress() -> None:
    job = rollouts(lockstep=True, hang=True)
    assert roll(job, 100) + roll(job, 120, but=(0, 2, 3)) == []


def test_a_hang_of_the_job_ends_when_ranks_turn_out_to_go_at_their_own_pace() -> None:
    job = rollouts(lockstep=True, hang=True)
    roll(job, 100)
    assert told(job.stand(60))[-1][1] == "critical"
    apart = dataclasses.replace(topology(4), lockstep=False)
    (closed,) = job.detector.observe(AttemptStart(job.attempt, apart, job.now_s))
    assert closed.change == "close"


def test_a_snapshot_goes_on_with_the_same_answers() -> None:
    job = rollouts()
    roll(job, 600)
    again = OwnPaceDetector(HangConfig())
    again.restore(job.detector.snapshot())
    job.detector = again
    assert told(roll(job, 200, but=(1,))) == [("open", "warning", "rank:1")]


def test_a_rank_that_is_stopped_in_its_first_seconds_is_found_before_its_pace_is_known() -> None:
    job = rollouts()
    roll(job, 1)
    job.os_state[1] = "T"
    assert told(roll(job, 12, but=(1,))) == [("open", "critical", "rank:1")]
