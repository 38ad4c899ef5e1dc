"""The whole job against its own past: slowdowns with their causes, drifts, climbs of the loss, restart loops."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

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
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.ends.restart_loop import RestartLoopConfig, RestartLoopDetector
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.step_parts import StepParts, cause_of, parts_of
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_service.simulate.faults import (
    BatchRamp,
    Congestion,
    Drift,
    Fault,
    Restart,
    Slow,
    SlowJob,
    Throttle,
    WanderingPace,
)
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from suite.scoring import judged
from tests.support.detection.verdicts import evaluate, opened, restored_all_along
from tests.support.values.presences import ATTEMPT, frame, topology


def found(job: Job, said: Iterable[tuple[int, Occurrence]] = ()) -> list[Finding]:
    """What the slowdown detector says; `said` comes before the frame of the step it stands at."""
    events, findings, detector = dict(said), [], SlowdownDetector(SlowdownConfig())
    for observation in generate(job):
        if isinstance(observation, Frame) and observation.step in events:
            findings += detector.observe(events[observation.step])
        findings += detector.observe(observation)
    return findings


@pytest.mark.parametrize(("factor", "steps_max"), [(1.07, 30), (2.0, 12)])
def test_a_uniform_slowdown_is_reported_soon(factor: float, steps_max: int) -> None:
    (finding,) = found(Job(64, 380, 1).inject(SlowJob(300, factor)))
    assert 0 < (finding.detected_step or 0) - 300 <= steps_max
    # A tenth of a step is transfer, which is not slowed.
    assert finding.evidence["ratio"] == pytest.approx(factor, rel=0.12)


def test_it_closes_when_steps_are_as_fast_as_before() -> None:
    findings = found(Job(world_size=16, steps=600, seed=1).inject(SlowJob(300, 1.5, until_step=400)))
    assert [f.change for f in findings] == [Change.OPEN, Change.CLOSE]


COLD = Noise(warm_up_steps=50, warm_up_factor=1.5)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(16, 1500, 5).inject(SlowJob(500, 0.7)), id="a faster job"),
        pytest.param(
            Job(16, 500, 6, noise=COLD).inject(Restart(300, 250, relaunch=False)), id="cold caches after a rollback"
        ),
        pytest.param(Job(64, 1000, 2, noise=Noise(burst_probability=0.001)), id="bursts that wander over the ranks"),
        pytest.param(Job(64, 400, 9).inject(Slow(7, 200, 1.6)), id="one slow rank that all wait for"),
        pytest.param(Job(64, 700, 10).inject(Slow((3, 20), 200, 1.3, until_step=400)), id="two, for a while"),
    ],
)
def test_what_is_no_slowdown_raises_nothing(job: Job) -> None:
    assert found(job) == []


def of_log(levels: Floats, seed: int, *, noise: float, work: Floats | None = None) -> list[Finding]:
    """A log with nothing but the job's step time: a level for each step, and noise; and the work of a step."""
    seconds = levels * np.exp(noise * np.random.default_rng(seed).standard_normal(levels.size))
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(1), 0.0)]
    for step, row in enumerate(seconds):
        more = {} if work is None or (work[: step + 1] == 1.0).all() else {"step_work": [work[step]]}
        observations.append(frame(step, {"step_time_s": [row]} | more, time_s=step * 0.2))
    return evaluate(observations, [SlowdownDetector(SlowdownConfig())])


def lengthening(stairs: int, ratio: float) -> Floats:
    """Seconds of 1,500 steps that come to `ratio` times as long in so many equal stairs, the first of them at once."""
    return 0.16 * ratio ** (np.arange(1500) * stairs // 1500 / (stairs - 1))


def test_a_log_of_step_times_tells_of_a_tenth_and_keeps_a_planned_change_of_three_percent_to_itself() -> None:
    later = np.arange(800) >= 400
    for seed in range(2):
        assert of_log(np.where(later, 1.03, 1.0), seed, noise=0.02) == []
        (finding,) = of_log(np.where(later, 1.1, 1.0), seed, noise=0.02)
        assert 400 <= (finding.detected_step or 0) <= 415


@pytest.mark.parametrize("stairs", [1500, 40, 15])
@pytest.mark.parametrize("noise", [0.002, 0.01])
def test_a_schedule_that_lengthens_steps_from_the_first_one_on_is_no_slowdown(stairs: int, noise: float) -> None:
    assert of_log(lengthening(stairs, 1.14), 1, noise=noise) == []


def test_a_slowdown_on_top_of_such_a_schedule_is_reported_at_its_onset() -> None:
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
    for seed in range(2):
        levels = np.where(np.arange(1500) < 500, 1.0, 1.06)
        assert [f.detected_step in range(500, 700) for f in opened(of_log(levels, seed, noise=0.06))] == [True]


def test_a_slowdown_of_all_is_reported_beside_a_slow_rank() -> None:
    (finding,) = opened(found(Job(world_size=64, steps=400, seed=11).inject(Slow(7, 200, 1.4), SlowJob(300, 1.07))))
    assert finding.onset_step in range(297, 304)


def test_a_faster_job_is_judged_by_its_new_level() -> None:
    findings = opened(found(Job(world_size=16, steps=800, seed=8).inject(SlowJob(300, 0.7), SlowJob(600, 1.15))))
    assert [f.onset_step in range(590, 605) for f in findings] == [True]


def restarts(*, progress: bool = False, intended: bool = False) -> list[Finding]:
    """Launches that each repeat steps 0 to 9, or get one step further."""
    detector = RestartLoopDetector(RestartLoopConfig())
    findings: list[Finding] = []
    for launch in range(6):
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


def test_launches_that_get_further_and_restarts_that_were_intended_are_no_loop() -> None:
    assert restarts(progress=True) + restarts(intended=True) == []


def test_progress_ends_the_loop() -> None:
    detector = RestartLoopDetector(RestartLoopConfig(launches=1))
    detector.observe(AttemptStart("a.0", topology(4), 0.0))
    detector.observe(frame(5, {"loss": [1.0] * 4}, attempt="a.0"))
    detector.observe(AttemptStart("b.0", topology(4), 10.0))
    assert detector.observe(AttemptStart("c.0", topology(4), 20.0))
    assert [f.change for f in detector.observe(frame(6, {"loss": [1.0] * 4}, attempt="c.0"))] == [Change.CLOSE]


def reported(findings: list[Finding]) -> list[tuple[str, str, bool]]:
    return [(f.change, f.severity, f.evidence.get("standing", False)) for f in findings if f.change is not Change.CLOSE]


def test_what_comes_and_goes_again_is_one_pattern_with_a_count() -> None:
    findings = found(Job(8, 3000, 1).inject(WanderingPace(0.05, 0.09, 150)))
    assert {severity for _, severity, _ in reported(findings)} == {Severity.INFO}
    patterns = [finding for finding in findings if finding.evidence.get("standing")]
    assert [finding.change for finding in patterns][:2] == [Change.OPEN, Change.UPDATE]
    assert [finding.evidence["times"] for finding in patterns][:2] == [2, 3]
    assert len(opened(findings)) <= 4


def test_a_pattern_that_stays_away_is_over_and_what_comes_then_is_reported_again() -> None:
    bouts = (SlowJob(at, 1.08, until_step=at + 100) for at in range(200, 1400, 200))
    findings = found(Job(8, 7400, 1).inject(*bouts, SlowJob(7300, 1.08)))
    assert [(f.severity, f.evidence.get("standing", False)) for f in opened(findings)] == [
        ("info", False),
        ("info", True),
        ("info", False),
    ]
    patterns = [finding.change for finding in findings if finding.evidence.get("standing")]
    assert (patterns[0], patterns[-1], set(patterns[1:-1])) == (Change.OPEN, Change.CLOSE, {Change.UPDATE})


def test_a_slowdown_like_one_that_has_passed_is_reported_once_it_has_not() -> None:
    job = Job(8, 1800, 1).inject(SlowJob(200, 1.08, until_step=300), SlowJob(500, 1.08))
    first, _, second = found(job)
    assert (first.severity, second.change, second.severity) == (Severity.INFO, Change.OPEN, Severity.WARNING)
    assert second.onset_step in range(495, 510)
    assert 900.0 <= second.detected_time_s - second.onset_time_s <= 930.0


def test_a_twentieth_that_stays_is_a_warning_with_its_cost() -> None:
    for seed in range(3):
        *_, last = found(Job(8, 1600, seed).inject(SlowJob(300, 1.06)))
        assert (last.change, last.severity) == (Change.UPDATE, Severity.WARNING)
        assert re.search(r"costs [45] % of the job's time\.$", last.summary)


def crowded(*, ratio: float, cpu_ratio: float = 1.1, rows: int = 1500, explained: float | None = None) -> list[Finding]:
    """Four ranks on shared cores at ten steps a second; from step 600 on all steps take longer by the clock.

    `explained`: the share of what they take longer for which one of the ranks wanted a core; None: not measured.
    """
    random, detector = np.random.default_rng(1), SlowdownDetector(SlowdownConfig())
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(4, devices=False), 0.0)]
    now_s = 0.0
    for step in range(rows):
        late = step >= 600
        cpu = 0.04 * np.exp(0.04 * random.standard_normal(4)) * (cpu_ratio if late else 1.0)
        step_s = 0.1 * math.exp(0.3 * abs(float(random.standard_normal()))) * (ratio if late else 1.0)
        now_s += step_s
        busy = step_s * random.uniform(0.8, 1.0, 4)
        seconds = {"busy_s": [*busy], "busy_cpu_s": [*cpu], "step_time_s": [step_s] * 4, "wait_s": [*(step_s - busy)]}
        if explained is not None:
            seconds["queued_s"] = [0.0] * 4
            seconds["queued_s"][step % 4] = explained * step_s * (1 - 1 / ratio) * late
        observations.append(frame(step, seconds, time_s=now_s))
    return evaluate(observations, [detector, StragglerDetector(StragglerConfig())])


@pytest.mark.parametrize("ratio", [5.0, 10.0])
def test_ranks_with_too_many_threads_for_their_cores_are_a_slowdown_and_no_straggler(ratio: float) -> None:
    (finding,) = opened(crowded(ratio=ratio))
    assert (finding.kind, finding.severity, finding.cause) == (Kind.SLOWDOWN, Severity.WARNING, "host")
    assert finding.onset_step in range(595, 610)
    assert finding.evidence["ratio"] == pytest.approx(ratio, rel=0.15)
    assert "times as slow as before" in finding.summary


@pytest.mark.parametrize("ratio", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("explained", [None, 0.8])
def test_other_processes_on_the_cores_of_a_job_are_no_slowdown_of_it(ratio: float, explained: float | None) -> None:
    assert crowded(ratio=ratio, explained=explained) == []


def test_ranks_that_all_wait_longer_though_cores_are_free_are_a_slowdown() -> None:
    (finding,) = opened(crowded(ratio=2.5, cpu_ratio=1.0, explained=0.1))
    assert (finding.kind, finding.severity, finding.cause) == (Kind.SLOWDOWN, Severity.WARNING, "")
    assert finding.onset_step in range(595, 610)
    assert "cores were free" in finding.summary


def test_steps_that_grow_from_the_first_one_on_wake_nobody() -> None:
    for seed in range(3):
        levels = 0.1 * np.linspace(1.0, 4.0, 900)
        assert {finding.severity for finding in of_log(levels, seed, noise=0.02)} <= {Severity.INFO}


def test_steps_that_take_longer_because_they_have_more_to_do_are_no_slowdown() -> None:
    steps = np.arange(1200)
    for work in (1.0 + (steps >= 400), 1.0 + np.clip((steps - 300) / 300, 0.0, 2.0)):
        for power in (0.7, 1.2):  # fixed costs, and attention
            assert {f.severity for f in of_log(0.1 * work**power, 1, noise=0.02, work=work)} <= {Severity.INFO}


def test_more_work_hides_no_slowdown_that_it_does_not_explain() -> None:
    steps = np.arange(1200)
    work = 1.0 + (steps >= 300)
    (finding,) = opened(of_log(0.1 * work * (1.0 + 0.3 * (steps >= 700)), 1, noise=0.02, work=work))
    assert finding.onset_step in range(695, 710)
    padded = np.exp(0.2 * np.random.default_rng(3).standard_normal(1200))
    (finding,) = opened(of_log(0.1 * padded * (1.0 + 0.5 * (steps >= 700)), 1, noise=0.02, work=padded))
    assert finding.onset_step in range(695, 710)


@pytest.mark.parametrize("steps", [40, 80, 160])
@pytest.mark.parametrize("factor", [0.8, 1.5, 3.0])
def test_a_job_that_warms_up_wakes_nobody(steps: int, factor: float) -> None:
    noise = Noise(warm_up_steps=steps, warm_up_factor=factor)
    assert {finding.severity for finding in found(Job(8, 400, 1, noise=noise))} <= {Severity.INFO}
    staged = Job(16, 45, 3, placement=RankPlacement(pp=4, heavy_stage=(3, 1.25)), noise=noise)
    assert evaluate(generate(staged), [StageDetector(StageConfig())]) == []


def test_bouts_that_take_a_third_of_the_job_are_reported_each_time() -> None:
    bouts = (SlowJob(at, 1.5, until_step=at + 100) for at in range(200, 1400, 200))
    assert reported(found(Job(8, 1400, 1).inject(*bouts))) == [("open", "warning", False)] * 6


def test_below_a_tenth_it_is_for_information_until_it_has_lasted_a_quarter_of_an_hour() -> None:
    job = Job(8, 1600, 1).inject(SlowJob(300, 1.08))
    (first, second) = found(job)
    assert (first.change, first.severity) == (Change.OPEN, Severity.INFO)
    assert (second.change, second.severity) == (Change.UPDATE, Severity.WARNING)
    assert 900.0 <= second.detected_time_s - second.onset_time_s <= 930.0


def test_a_slow_job_that_becomes_slower_still_has_another_slowdown() -> None:
    incidents = judged(Job(8, 900, 1).inject(SlowJob(300, 1.2), SlowJob(600, 1.2)))[1]
    assert [incident.state for incident in incidents] == ["resolved", "open"]
    assert [incident.first.onset_step for incident in incidents] == pytest.approx([305, 605], abs=7)


def test_a_slowdown_that_grows_is_one() -> None:
    (incident,) = judged(Job(8, 700, 1).inject(Drift(300, 1.5, 100)))[1]
    assert incident.evidence["ratio"] == pytest.approx(1.5, rel=0.1)


def test_a_detector_restored_all_along_goes_on_as_if_nothing_had_been() -> None:
    job = Job(8, 1300, 1).inject(WanderingPace(0.05, 0.09, 100), SlowJob(600, 1.3))
    assert len(restored_all_along(lambda: SlowdownDetector(SlowdownConfig()), generate(job), 37)) >= 2


RANKS = 16
EVERYBODY = tuple(range(RANKS))
DEVICES = RankPlacement(device_times=True)
HOSTS = RankPlacement(accelerated=False)


def job(placement: RankPlacement, *faults: Fault, late_values: bool = False) -> Iterator[Observation]:
    return generate(Job(RANKS, 400, 3, placement=placement, late_values=late_values).inject(*faults))


def without(observations: Iterator[Observation], *names: str) -> Iterator[Observation]:
    """The same, with some metrics not reported."""
    for one in observations:
        if isinstance(one, Frame):
            one = replace(one, values={name: one.values[name] for name in one.values if name not in names})  # noqa: PLW2901
        yield one


def slowdown(observations: Iterator[Observation]) -> Finding:
    (finding,) = opened(evaluate(observations, [SlowdownDetector(SlowdownConfig())]))
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
    findings = opened(evaluate(job(DEVICES, Throttle(5, 300, 1.4))))
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
        assert number > 5 or parts.grown_s(1) == {}, "until it is known what is usual, nothing has grown"
    parts.push(row(0.75, 0.75, 0.75), 1.5, on_devices=True)
    assert parts.grown_s(1) == pytest.approx({"step": 0.5, "communication": 0.5, "data": 0.0})


NOISE = 0.046
CLIMB_AT = 1000


def run(
    columns: Mapping[str, Floats], said: Iterable[tuple[int, Occurrence]] = (), **topology_fields: object
) -> list[Finding]:
    """What the catalogue says of two ranks that log these columns; `said` comes before the step it stands at."""
    events = dict(said)
    observations: list[Observation] = [AttemptStart(ATTEMPT, dataclasses.replace(topology(2), **topology_fields), 0.0)]
    for step, row in enumerate(zip(*columns.values(), strict=True)):
        if step in events:
            observations.append(events[step])
        observations.append(frame(step, {name: [value] * 2 for name, value in zip(columns, row, strict=True)}))
    return evaluate(observations, [one for one in detectors() if one.name.startswith("loss")])


def climbing(seed: int, then: int = 0) -> Floats:
    """3.05, and from step 1,000 on up to 6.84 over 1,300 steps, with noise of 0.046."""
    level = np.concatenate([np.full(CLIMB_AT, 3.05), np.linspace(3.05, 6.84, 1300), np.full(then, 6.84)])
    return level + NOISE * np.random.default_rng(seed).standard_normal(level.size)


def flat(steps: int, seed: int = 0, level: float = 3.05) -> Floats:
    return level + NOISE * np.random.default_rng(seed).standard_normal(steps)


def occurrence(kind: str, **fields: object) -> Occurrence:
    return Occurrence(kind, ATTEMPT, "", 0.0, None, None, fields)


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_that_doubles_over_a_thousand_steps_is_one_divergence_told_early_and_again_when_it_matters(seed):
    found = run({"loss": climbing(seed)})
    assert {finding.kind for finding in found} == {Kind.LOSS_DIVERGENCE}
    (first,) = opened(found)
    assert first.severity is Severity.INFO
    assert (first.onset_step or 0) in range(CLIMB_AT - 64, CLIMB_AT + 129)
    assert (first.detected_step or 0) <= CLIMB_AT + 200
    warned = next(finding for finding in found if finding.severity is not Severity.INFO)
    assert (warned.detected_step or 0) <= CLIMB_AT + 350
    assert Change.CLOSE not in [finding.change for finding in found]
    assert len(found) <= 5


def test_it_ends_when_the_loss_is_back() -> None:
    level = np.concatenate([np.full(1000, 3.05), np.linspace(3.05, 4.0, 600), np.linspace(4.0, 3.05, 600)])
    found = run({"loss": level + NOISE * np.random.default_rng(1).standard_normal(level.size)})
    assert [finding.change for finding in found][-1] is Change.CLOSE
    assert len(opened(found)) == 1


def test_what_is_declared_is_the_level_from_then_on() -> None:
    losses = np.concatenate([flat(1000), flat(1500, 1, 3.6)])
    found = run({"loss": losses}, [(1000, occurrence("declared", what="curriculum"))])
    assert opened(found) == []


def test_a_climb_in_which_a_change_is_declared_ends_once_it_has_stopped() -> None:
    found = run({"loss": climbing(1, then=1500)}, [(2300, occurrence("declared", what="data mix"))])
    assert found[-1].change is Change.CLOSE
    assert any("data mix" in one.summary for one in found if one.change is Change.UPDATE)
    assert len(opened(found)) == 1


def test_a_new_level_stays_open_for_information_until_a_person_accepts_it() -> None:
    losses = np.concatenate([flat(1000), flat(3000, 1, 3.4)])
    standing = run({"loss": losses})
    (opening,) = opened(standing, Kind.LOSS_DIVERGENCE)
    assert opening.severity is Severity.INFO
    assert [f for f in standing if f.kind is Kind.LOSS_DIVERGENCE][-1].change is Change.UPDATE
    accepted = run({"loss": losses}, [(2000, occurrence("accepted", kinds=["loss_divergence"]))])
    assert accepted[-1].change is Change.CLOSE
    assert "accepted" in accepted[-1].summary
    assert len(opened(accepted, Kind.LOSS_DIVERGENCE)) == 1


@pytest.mark.parametrize("name", ["lr", "learning_rate"])
def test_warm_restarts_that_are_logged_wake_nobody(name: str) -> None:
    steps, cycle = np.arange(4000), 800
    rate = 1e-5 + 3e-4 * (1 + np.cos(math.pi * (steps % cycle) / cycle)) / 2
    losses = 3.0 + 0.6 * rate / 3e-4 + NOISE * np.random.default_rng(1).standard_normal(steps.size)
    assert {finding.severity for finding in run({"loss": losses, name: rate})} <= {Severity.INFO}


def test_a_learning_rate_that_falls_excuses_no_climb() -> None:
    losses = climbing(1)
    rate = 3e-4 * np.exp(-np.arange(losses.size) / 500)
    assert Severity.WARNING in {finding.severity for finding in run({"loss": losses, "lr": rate})}


@pytest.mark.parametrize("name", ["tokens", "batch_size"])
def test_a_ramp_of_batches_that_is_logged_wakes_nobody(name: str) -> None:
    steps = np.arange(3000)
    amount = 1024.0 * (1 + np.clip((steps - 1000) / 500, 0, 2))
    losses = flat(3000) + 0.5 * np.clip((steps - 1000) / 1000, 0, 1)
    assert {finding.severity for finding in run({"loss": losses, name: amount})} <= {Severity.INFO}


@pytest.mark.parametrize("fields", [{"optimizers": 2}, {"lockstep": False}], ids=["adversaries", "own paces"])
def test_where_a_climb_is_no_news(fields: dict[str, object]) -> None:
    assert run({"loss": climbing(1)}, **fields) == []


@pytest.mark.parametrize("seed", range(2))
def test_a_loss_around_zero_that_wanders_wakes_nobody(seed: int) -> None:
    """Policy gradients: the loss has no level worth the name, and what it does says little."""
    random, steps = np.random.default_rng(seed), 6000
    wander = np.zeros(steps)
    for step in range(1, steps):
        wander[step] = 0.995 * wander[step - 1] + 0.02 * random.standard_normal()
    found = run({"loss": wander + 0.5 * random.standard_normal(steps)})
    assert {finding.severity for finding in found} <= {Severity.INFO}


@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_becomes_a_quarter_slower_over_half_an_hour_is_reported_early_by_how_much(seed: int) -> None:
    findings = found(Job(8, 2300, seed, ends=False).inject(Drift(600, 1.25, 1800)))
    (first,) = opened(findings)
    assert (first.onset_step or 0) in range(600 - 64, 600 + 321)
    assert (first.detected_step or 0) <= 600 + 600
    # Four fifths of a step are work; the level is the middle of its newest 128 rows.
    then = 1 + 0.8 * 0.25 * ((first.detected_step or 0) - 600 - 64) / 1800
    assert first.evidence["ratio"] == pytest.approx(then, abs=0.02)
    assert findings[-1].evidence["ratio"] == pytest.approx(1.17, abs=0.03)
    assert len(findings) <= 3


def wandering(seed: int, steps: int) -> Job:
    """A job that was 8 % slower twice, for 100 steps."""
    return Job(8, steps, seed, ends=False).inject(*(SlowJob(at, 1.08, until_step=at + 100) for at in (600, 800)))


def test_a_small_drift_of_a_pace_that_wanders_is_for_information_until_it_has_lasted_a_quarter_of_an_hour() -> None:
    drift = Drift(1100, 1.1, 500)
    first, _, second = (one for one in found(wandering(1, 2400).inject(drift)) if not one.evidence.get("standing"))
    assert (first.severity, second.change, second.severity) == (Severity.INFO, Change.OPEN, Severity.WARNING)
    assert 900.0 <= second.detected_time_s - second.onset_time_s <= 930.0
    (steady,) = found(Job(8, 2400, 1, ends=False).inject(drift))
    assert steady.severity is Severity.WARNING


@pytest.mark.parametrize("ratio", [1.1, 1.15])
def test_a_drift_that_came_and_went_belongs_to_the_pattern_of_a_pace_that_wanders(ratio: float) -> None:
    findings = found(wandering(0, 2000).inject(Drift(1100, ratio, 400), Drift(1600, 1 / ratio, 200)))
    assert {finding.severity for finding in findings} == {Severity.INFO}
    pattern = [finding for finding in findings if finding.evidence.get("standing")][-1]
    assert (pattern.change, pattern.evidence["times"]) == (Change.UPDATE, 3)


def test_a_drift_that_is_declared_ends_once_it_has_stopped_and_one_that_is_accepted_at_once() -> None:
    job = Job(8, 2000, 1, ends=False).inject(Drift(600, 1.15, 600))
    for kind, fields, end in (
        ("declared", {"what": "longer texts"}, 1526),
        ("accepted", {"kinds": ["slowdown"]}, None),
    ):
        findings = found(job, [(1400, Occurrence(kind, "launch0.0", "", 0.0, None, None, fields))])
        changes = [(one.change, one.detected_step) for one in findings if one.change is not Change.UPDATE]
        assert [change for change, _ in changes] == [Change.OPEN, Change.CLOSE]
        assert changes[-1][1] == end


def test_changes_declared_while_a_job_becomes_slower_and_slower_end_nothing() -> None:
    job = Job(8, 2000, 1, ends=False).inject(Drift(600, 1.6, 1400))
    said = [
        (at, Occurrence("declared", "launch0.0", "", 0.0, None, None, {"what": f"{at}"})) for at in range(900, 2000, 50)
    ]
    assert [one.change for one in found(job, said) if one.change is not Change.UPDATE] == [Change.OPEN]


@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_keeps_its_pace_or_becomes_faster_has_no_drift(seed: int) -> None:
    assert found(Job(8, 2500, seed, ends=False).inject(Drift(600, 0.8, 1000))) == []


def test_batches_that_grow_little_by_little_are_no_drift() -> None:
    ramps = (BatchRamp(700 + 30 * number, 1.03) for number in range(20))
    assert found(Job(8, 2000, 2, ends=False).inject(*ramps)) == []
