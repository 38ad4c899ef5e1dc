"""The whole job against its own past, and launches that lead nowhere."""

from __future__ import annotations

import numpy as np
import pytest

from rankwatch_detectors.base import (
    AttemptStart,
    Change,
    Finding,
    Floats,
    Frame,
    Kind,
    Observation,
    Occurrence,
    Severity,
)
from rankwatch_detectors.ends.restart_loop import RestartLoopConfig, RestartLoopDetector
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_service.simulate.faults import Drift, RecurringStall, Restart, Slow, SlowJob, WanderingPace
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from suite.scoring import judged
from tests.support.detection.verdicts import judge, opened
from tests.support.values.presences import ATTEMPT, frame, topology


def found(job: Job) -> list[Finding]:
    return judge(generate(job), [SlowdownDetector(SlowdownConfig())])


@pytest.mark.parametrize(("factor", "steps_max"), [(1.05, 30), (1.07, 30), (1.2, 12), (2.0, 12)])
def test_a_uniform_slowdown_is_told_soon(factor: float, steps_max: int) -> None:
    for seed in range(3):
        (finding,) = found(Job(world_size=64, steps=380, seed=seed).inject(SlowJob(300, factor)))
        assert 0 < (finding.detected_step or 0) - 300 <= steps_max
        # A tenth of a step is transfer, which is not slowed.
        assert finding.evidence["ratio"] == pytest.approx(factor, rel=0.12)


def test_it_closes_when_steps_are_as_fast_as_before() -> None:
    findings = found(Job(world_size=16, steps=600, seed=1).inject(SlowJob(300, 1.5, until_step=400)))
    assert [f.change for f in findings] == [Change.OPEN, Change.CLOSE]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(world_size=16, steps=2000, seed=2), id="clean"),
        pytest.param(Job(world_size=16, steps=2000, seed=3).inject(RecurringStall(40, 30, "eval")), id="evaluation"),
        pytest.param(
            Job(world_size=16, steps=2000, seed=4, noise=Noise(hiccup_probability=0.002, hiccup_s=1.0)),
            id="single slow steps",
        ),
        pytest.param(Job(world_size=16, steps=1500, seed=5).inject(SlowJob(500, 0.7)), id="a faster job"),
        pytest.param(Job(world_size=16, steps=900, seed=6).inject(Restart(500, 480)), id="relaunch"),
        pytest.param(
            Job(world_size=16, steps=500, seed=6, noise=Noise(warm_up_steps=50, warm_up_factor=1.5)).inject(
                Restart(300, 250, relaunch=False)
            ),
            id="cold caches after a rollback",
        ),
        pytest.param(
            Job(world_size=64, steps=1000, seed=2, noise=Noise(burst_probability=0.001)),
            id="bursts that wander over the ranks",
        ),
        pytest.param(
            Job(world_size=64, steps=400, seed=9).inject(Slow(7, 200, 1.6)), id="one slow rank that all wait for"
        ),
        pytest.param(
            Job(world_size=64, steps=700, seed=10).inject(Slow((3, 20), 200, 1.3, until_step=400)),
            id="two slow ranks, for a while",
        ),
        pytest.param(
            Job(
                world_size=4,
                steps=3000,
                seed=7,
                step_s=0.1,
                noise=Noise(busy=0.04, contention=0.6),
                placement=RankPlacement(accelerated=False),
            ),
            id="crowded cores",
        ),
    ],
)
def test_what_is_no_slowdown_raises_nothing(job: Job) -> None:
    assert found(job) == []


def logged(factor: float, seed: int) -> list[Finding]:
    """A log with nothing but the job's step time, which scatters by 2 % and shifts after 400 steps."""
    return of_log(np.where(np.arange(800) < 400, 1.0, factor), seed, noise=0.02)


def of_log(levels: Floats, seed: int, *, noise: float) -> list[Finding]:
    """A log with nothing but the job's step time: a level for each step, and noise."""
    seconds = levels * np.exp(noise * np.random.default_rng(seed).standard_normal(levels.size))
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(1), 0.0)]
    observations += [frame(step, {"step_time_s": [row]}, time_s=step * 0.2) for step, row in enumerate(seconds)]
    return judge(observations, [SlowdownDetector(SlowdownConfig())])


def lengthening(stairs: int, ratio: float) -> Floats:
    """Seconds of 1,500 steps that come to `ratio` times as long in so many equal stairs, the first of them at once."""
    return 0.16 * ratio ** (np.arange(1500) * stairs // 1500 / (stairs - 1))


def test_a_log_of_step_times_tells_of_a_tenth_and_keeps_a_planned_change_of_three_percent_to_itself() -> None:
    for seed in range(5):
        assert logged(1.03, seed) == []
        (finding,) = logged(1.1, seed)
        assert 400 <= (finding.detected_step or 0) <= 415


@pytest.mark.parametrize("stairs", [1500, 40, 15])
@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_a_schedule_that_lengthens_steps_from_the_first_one_on_is_no_slowdown(stairs: int, noise: float) -> None:
    for seed in range(3):
        assert of_log(lengthening(stairs, 1.14), seed, noise=noise) == []


def test_a_slowdown_on_top_of_such_a_schedule_is_told_at_its_onset() -> None:
    for seed in range(3):
        levels = lengthening(40, 1.14) * np.where(np.arange(1500) < 900, 1.0, 1.12)
        (finding,) = opened(of_log(levels, seed, noise=0.01))
        assert finding.severity is Severity.WARNING
        assert finding.onset_step in range(895, 905)
        assert finding.detected_step in range(900, 930)


def test_steps_that_lengthen_faster_than_schedules_do_are_a_slowdown() -> None:
    for seed in range(3):
        levels = np.minimum(0.16 * 1.25 ** (np.arange(1200) / 600), 0.2)
        (first, *_) = of_log(levels, seed, noise=0.01)
        assert (first.detected_step or 0) < 600


def test_a_small_shift_that_takes_hundreds_of_noisy_steps_to_prove_is_no_schedule() -> None:
    for seed in range(5):
        levels = np.where(np.arange(1500) < 500, 1.0, 1.06)
        assert [f.detected_step in range(500, 700) for f in opened(of_log(levels, seed, noise=0.06))] == [True]


def test_a_slowdown_of_all_is_told_beside_a_slow_rank() -> None:
    (finding,) = opened(found(Job(world_size=64, steps=400, seed=11).inject(Slow(7, 200, 1.4), SlowJob(300, 1.07))))
    assert finding.onset_step in range(297, 304)


def test_a_faster_job_is_judged_by_its_new_level() -> None:
    findings = opened(found(Job(world_size=16, steps=800, seed=8).inject(SlowJob(300, 0.7), SlowJob(600, 1.15))))
    assert [f.onset_step in range(590, 605) for f in findings] == [True]


def restarts(*, progress: bool = False, intended: bool = False, launches: int = 6) -> list[Finding]:
    """Launches that each repeat steps 0 to 9, or get one step further."""
    detector = RestartLoopDetector(RestartLoopConfig())
    findings: list[Finding] = []
    for launch in range(launches):
        attempt = f"launch{launch}.0"
        findings += detector.observe(AttemptStart(attempt, topology(4), 100.0 * launch))
        for step in range(10 + launch * progress):
            findings += detector.observe(frame(step, {"loss": [1.0] * 4}, attempt=attempt))
        if intended:
            findings += detector.observe(Occurrence("rank_left", attempt, "h", 1.0, 0, 9, {"reason": "end"}))
    return findings


def test_three_launches_without_progress_are_a_loop_told_once() -> None:
    findings = restarts()
    assert [(f.kind, f.change) for f in findings] == [(Kind.RESTART_LOOP, Change.OPEN)]
    assert findings[0].attempt == "launch4.0"


def test_launches_that_get_further_are_no_loop() -> None:
    assert restarts(progress=True) == []


def test_restarts_that_were_intended_are_no_loop() -> None:
    assert restarts(intended=True) == []


def test_progress_ends_the_loop() -> None:
    detector = RestartLoopDetector(RestartLoopConfig(launches=1))
    detector.observe(AttemptStart("a.0", topology(4), 0.0))
    detector.observe(frame(5, {"loss": [1.0] * 4}, attempt="a.0"))
    detector.observe(AttemptStart("b.0", topology(4), 10.0))
    assert detector.observe(AttemptStart("c.0", topology(4), 20.0))
    assert [f.change for f in detector.observe(frame(6, {"loss": [1.0] * 4}, attempt="c.0"))] == [Change.CLOSE]


def told(findings: list[Finding]) -> list[tuple[str, str, bool]]:
    return [(f.change, f.severity, f.evidence.get("standing", False)) for f in findings if f.change is not Change.CLOSE]


@pytest.mark.parametrize("seed", range(3))
def test_what_came_and_went_three_times_is_one_pattern_told_once(seed: int) -> None:
    findings = found(Job(8, 5000, seed).inject(WanderingPace(0.05, 0.09, 150)))
    assert {severity for _, severity, _ in told(findings)} == {Severity.INFO}
    patterns = [index for index, (_, _, standing) in enumerate(told(findings)) if standing]
    assert len(patterns) == 1
    assert len(opened(findings)) <= 5


def test_a_pattern_that_stays_away_is_over_and_what_comes_then_is_told_again() -> None:
    job = Job(8, 7400, 1)
    for at in range(200, 1400, 200):
        job = job.inject(SlowJob(at, 1.08, until_step=at + 100))
    findings = found(job.inject(SlowJob(7300, 1.08)))
    assert told(findings) == [("open", "info", False)] * 3 + [("open", "info", True), ("open", "info", False)]
    assert [f.change for f in findings if f.evidence.get("standing")] == [Change.OPEN, Change.CLOSE]


@pytest.mark.parametrize("seed", range(3))
def test_a_slowdown_that_is_none_of_its_wandering_is_told_at_once(seed: int) -> None:
    findings = found(Job(8, 3000, seed).inject(WanderingPace(0.05, 0.09, 150), SlowJob(2800, 1.3)))
    assert any(f.severity is Severity.WARNING and 2800 < (f.detected_step or 0) <= 2812 for f in findings)


def test_bouts_that_take_a_third_of_the_job_are_told_each_time() -> None:
    job = Job(8, 1400, 1)
    for at in range(200, 1400, 200):
        job = job.inject(SlowJob(at, 1.5, until_step=at + 100))
    assert told(found(job)) == [("open", "warning", False)] * 6


def test_below_a_tenth_it_is_for_information_until_it_has_lasted_a_quarter_of_an_hour() -> None:
    job = Job(8, 1600, 1).inject(SlowJob(300, 1.08))
    (first, second) = found(job)
    assert (first.change, first.severity) == (Change.OPEN, Severity.INFO)
    assert (second.change, second.severity) == (Change.UPDATE, Severity.WARNING)
    assert 900.0 <= second.detected_time_s - second.onset_time_s <= 930.0


def test_a_slow_job_that_becomes_slower_still_has_another_slowdown() -> None:
    incidents = judged(Job(8, 900, 1).inject(SlowJob(300, 1.2), SlowJob(600, 1.2)))[1]
    assert [(incident.state, incident.first.onset_step in range(at - 2, at + 12)) for incident, at in zip(
        incidents, (300, 600), strict=True
    )] == [("resolved", True), ("open", True)]  # fmt: skip


def test_a_slowdown_that_grows_is_one() -> None:
    (incident,) = judged(Job(8, 700, 1).inject(Drift(300, 1.5, 100)))[1]
    assert incident.evidence["ratio"] == pytest.approx(1.5, rel=0.1)


@pytest.mark.parametrize("cut", [250, 530, 618, 700, 1250])
def test_a_snapshot_taken_anywhere_goes_on_as_if_nothing_had_been(cut: int) -> None:
    job = Job(8, 1300, 1).inject(WanderingPace(0.05, 0.09, 100), SlowJob(600, 1.3))
    observations = list(generate(job))
    wanted = judge(observations, [SlowdownDetector(SlowdownConfig())])
    at = next(index for index, one in enumerate(observations) if isinstance(one, Frame) and one.step == cut)
    first, second = SlowdownDetector(SlowdownConfig()), SlowdownDetector(SlowdownConfig())
    findings = judge(observations[:at], [first])
    second.restore(first.snapshot())
    assert findings + judge(observations[at:], [second]) == wanted
    assert len(wanted) >= 2
