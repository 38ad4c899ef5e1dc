"""Slow ranks are named, soon, and nobody else is; what holds from the first steps is a fact of the job, reported
once."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Observation, Severity
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.pace.load import CpuContention, CpuContentionConfig
from rankwatch_detectors.pace.peer_test import PeerTestConfig
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_detectors.words import slower_than
from rankwatch_service.incidents.model import Incident
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.simulate.faults import MissingRows, Restart, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from suite.scoring import judged
from tests.support.detection.verdicts import evaluate, opened, restored_all_along
from tests.support.values.presences import ATTEMPT, frame, topology


def found(job: Job, config: StragglerConfig | None = None) -> list[Finding]:
    return evaluate(generate(job), [StragglerDetector(config or StragglerConfig())])


def demo_job(steps: int = 400, seed: int = 0, contention: float = 0.3) -> Job:
    """Four CPU ranks on two cores at ten steps a second: wall time says little, CPU time scatters by 4 %."""
    noise = Noise(busy=0.04, contention=contention)
    return Job(4, steps, seed, step_s=0.1, noise=noise, placement=RankPlacement(accelerated=False))


def test_a_descheduled_rank_is_reported_after_a_minute_and_the_host_is_the_cause() -> None:
    findings = opened(found(demo_job(steps=2500, contention=0.1).inject(Slow(1, 300, 1.7, wall_only=True))))
    assert [(f.ranks, f.cause) for f in findings] == [((1,), "host")]
    assert findings[0].detected_time_s - findings[0].onset_time_s >= 60.0


def test_a_rank_that_sleeps_beside_ranks_that_compute_is_reported_soon_and_its_own_code_is_the_cause() -> None:
    (finding,) = opened(found(demo_job(steps=500, contention=0.1).inject(Slow(1, 300, 1.7, asleep=True))))
    assert (finding.ranks, finding.cause, finding.evidence["witness"]) == ((1,), "worker", "own")
    assert "It waits in its own code" in finding.summary
    assert finding.evidence["ratio"] == pytest.approx(1.7, rel=0.1)
    assert 295 <= (finding.onset_step or 0) <= 305
    assert (finding.detected_step or 0) <= 400


def sleepers(
    *, more_s: float, queued_s: float = 0.0, at: int = 120, until: int = 10**9, seed: int = 0
) -> list[Finding]:
    """Four ranks on one host that compute for 5 ms and sleep for 80 ms a step, one of them for longer from a step on.

    All of them wait for a core for up to twice `queued_s`, now this one and now that one.
    """
    random, detector = np.random.default_rng(seed), StragglerDetector(StragglerConfig())
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(4, devices=False), 0.0)]
    now_s = 0.0
    for step in range(360):
        cpu = 0.005 * np.exp(0.1 * np.abs(random.standard_normal(4)))
        asleep = 0.08 + 0.0005 * np.abs(random.standard_normal(4))
        asleep[2] += more_s * (at <= step < until)
        queued = queued_s * random.uniform(0.0, 2.0, 4)
        busy = cpu + asleep + queued
        step_s = float(busy.max()) + 0.003
        now_s += step_s
        seconds = {"busy_s": [*busy], "busy_cpu_s": [*cpu], "queued_s": [*queued], "step_time_s": [step_s] * 4}
        observations.append(frame(step, seconds, time_s=now_s))
    return evaluate(observations, [detector])


@pytest.mark.parametrize(("more_s", "queued_s"), [(0.03, 0.0), (0.06, 0.0), (0.15, 0.0), (0.06, 0.05), (0.15, 0.2)])
def test_ranks_that_sleep_anyway_show_which_one_sleeps_for_longer(more_s: float, queued_s: float) -> None:
    (finding,) = opened(sleepers(more_s=more_s, queued_s=queued_s))
    assert (finding.ranks, finding.cause) == ((2,), "worker")
    assert finding.evidence["ratio"] == pytest.approx((0.085 + more_s) / 0.085, rel=0.15)
    assert 117 <= (finding.onset_step or 0) <= 135
    assert finding.detected_time_s - finding.onset_time_s <= 25.0
    assert opened(sleepers(more_s=0.0, queued_s=queued_s)) == []


def test_a_sleep_of_some_steps_is_told_of_nobody() -> None:
    assert sleepers(more_s=0.06, until=125) == []


@pytest.mark.parametrize("silicon", [0.0, 0.02])
def test_ranks_of_a_host_that_is_slower_by_a_few_per_cent_are_not_accused_one_by_one(silicon: float) -> None:
    for seed, factor in enumerate((1.01, 1.02, 1.02, 1.03, 1.05)):
        job = Job(64, 600, seed, noise=Noise(silicon=silicon)).inject(Slow(tuple(range(8, 16)), 300, factor))
        assert {str(finding.scope) for finding in opened(found(job))} <= {"host:host-1"}


def test_a_rank_that_was_faster_than_its_peers_and_is_as_fast_as_they_are_delays_nobody() -> None:
    noise = Noise(busy=0.005, silicon=0.0)
    job = Job(16, 700, 5, noise=noise).inject(Slow(3, 0, 1 / 1.08), Slow(3, 300, 1.08), Slow(3, 500, 1.06))
    findings = found(job)
    assert all(finding.evidence["ratio"] > 1.0 for finding in findings)
    assert [(finding.ranks, (finding.onset_step or 0) >= 495) for finding in opened(findings)] == [((3,), True)]
    assert all(finding.evidence["cost_gpu_hours_per_hour"] > 0 for finding in findings)


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_the_smallest_groups_name_the_slow_rank(world_size: int) -> None:
    (finding,) = opened(found(Job(world_size=world_size, steps=250, seed=3).inject(Slow(1, 150, 1.5))))
    assert finding.ranks == (1,)


@pytest.mark.parametrize("world_size", [2, 3, 4, 64])
def test_a_rank_that_becomes_fast_accuses_nobody(world_size: int) -> None:
    assert found(Job(world_size=world_size, steps=400, seed=4).inject(Slow(1, 150, 1 / 1.5))) == []


def test_half_of_a_small_group_is_named_when_half_is_slow() -> None:
    findings = opened(found(Job(world_size=4, steps=250, seed=5).inject(Slow((0, 3), 150, 1.5))))
    assert sorted(f.ranks for f in findings) == [(0,), (3,)]


@pytest.mark.parametrize("world_size", [8, 64])
def test_a_rank_slow_from_its_first_step_is_named_within_thirty_steps_whatever_silicon_it_is_among(world_size):
    for seed in range(4):
        (finding,) = opened(found(Job(world_size=world_size, steps=40, seed=seed).inject(Slow(seed, 0, 1.3))))
        assert (finding.ranks, (finding.detected_step or 0) <= 30) == ((seed,), True)
        assert finding.evidence["ratio"] == pytest.approx(1.3, rel=0.12)


def test_the_first_slow_rank_among_four_is_found_within_thirty_steps() -> None:
    findings = opened(found(demo_job(steps=60).inject(Slow(2, 0, 2.0))))
    assert [f.ranks for f in findings] == [(2,)]
    assert (findings[0].detected_step or 0) <= 30


def test_rate_and_cost_are_reported() -> None:
    (finding,) = opened(found(Job(world_size=64, steps=400, seed=1).inject(Slow(17, 300, 1.6))))
    evidence = finding.evidence
    assert evidence["ratio"] == pytest.approx(1.6, rel=0.05)
    assert evidence["rate"] == pytest.approx(1 / 1.6, rel=0.05)
    # Of a step of 0.7 * 1.6 + 0.1 seconds 0.42 are added by the slow rank, for all 64 ranks.
    assert evidence["cost_gpu_hours_per_hour"] == pytest.approx(64 * 0.42 / 1.22, rel=0.15)


def test_a_recovered_rank_is_closed_and_may_be_named_again() -> None:
    job = Job(world_size=16, steps=600, seed=11).inject(Slow(4, 150, 1.5, until_step=250), Slow(4, 400, 1.5))
    findings = [(f.change, f.onset_step) for f in found(job) if f.change is not Change.UPDATE]
    assert findings == [(Change.OPEN, 150), (Change.CLOSE, 150), (Change.OPEN, 400)]


@pytest.mark.parametrize("factor", [1.2, 1.36])
def test_a_rank_that_is_only_less_slow_than_before_has_not_recovered(factor: float) -> None:
    job = Job(world_size=8, steps=600, seed=1).inject(Slow(5, 200, 2.4, 300), Slow(5, 300, factor, 500))
    first, update, last = found(job)
    assert (first.change, update.change, last.change) == (Change.OPEN, Change.UPDATE, Change.CLOSE)
    assert 500 < (last.detected_step or 0) < 530
    for finding in (first, update):
        evidence = finding.evidence
        assert slower_than(evidence["ratio"], "its peers") in finding.summary
        assert evidence["busy_s"] == pytest.approx(evidence["ratio"] * evidence["peers_busy_s"])
    assert update.evidence["ratio"] == pytest.approx(factor, rel=0.05)
    assert update.evidence["cost_gpu_hours_per_hour"] < first.evidence["cost_gpu_hours_per_hour"]


def test_a_rank_that_becomes_slower_still_is_updated_not_opened_again() -> None:
    findings = found(Job(world_size=16, steps=500, seed=13).inject(Slow(4, 150, 1.2), Slow(4, 300, 1.5)))
    assert [f.change for f in findings] == [Change.OPEN, Change.UPDATE]
    assert findings[1].evidence["ratio"] == pytest.approx(1.8, rel=0.1)


def test_garbage_collection_in_each_tenth_step_accuses_nobody() -> None:
    assert found(Job(64, 400, 3, noise=Noise(hiccup_probability=0.1, hiccup_s=0.3))) == []


def test_missing_rows_are_unknown_and_neither_accuse_nor_clear() -> None:
    job = Job(world_size=16, steps=400, seed=34).inject(Slow(4, 150, 1.5), MissingRows(4, 200, 300))
    assert [f.change for f in found(job)] == [Change.OPEN]


def test_false_findings_keep_the_budget_when_it_is_set_a_thousand_times_higher() -> None:
    """At the default budget nothing would ever be seen to fail; at 20,000 a week a short run shows the rate."""
    steps, budget = 1500, 20_000.0
    wall = PeerTestConfig(ratios=(1.05, 1.1), ratio_min=1.0, rows_min=1)
    config = StragglerConfig(budget=3 * budget, wall=wall)
    allowed = budget * steps / 604_800
    for world_size in (8, 256):
        count = len(opened(found(Job(world_size=world_size, steps=steps, seed=36), config)))
        assert count <= allowed + 3 * math.sqrt(allowed), world_size


def test_pauses_that_only_add_time_are_judged_by_a_higher_threshold() -> None:
    """Lorden's bound holds whatever the noise is like; that of normal noise, five times longer, does not."""
    limits = []
    for probability in (0.0, 0.1):
        detector = StragglerDetector(StragglerConfig())
        evaluate(generate(Job(64, 300, 3, noise=Noise(hiccup_probability=probability, hiccup_s=0.3))), [detector])
        peer_test = detector.peer_tests["wall"]
        limits.append(
            peer_test.limit + math.log(peer_test.step_s)
        )  # pauses make steps longer, of which a week has fewer
    even, skewed = limits
    assert skewed - even == pytest.approx(math.log(5))


def test_values_that_are_no_times_are_not_judged() -> None:
    detector = StragglerDetector(StragglerConfig())
    findings: list[Finding] = []
    for observation in generate(Job(world_size=8, steps=200, seed=37)):
        if isinstance(observation, Frame):
            busy = observation.values["busy_s"]
            busy[3] = [np.nan, np.inf, -1.0, 0.0][observation.step % 4]
        findings += detector.observe(observation)
    assert findings == []


def crowded(shift: float, rows: int, *, wall: float, seed: int, lasts_s: float = 1e9) -> list[Finding]:
    """Two ranks of 35 ms a step, longer by the clock than by the CPU; the CPU time of one shifts for some seconds."""
    random, detector = np.random.default_rng(seed), StragglerDetector(StragglerConfig())
    observations: list[Observation] = [AttemptStart(ATTEMPT, topology(2, devices=False), 0.0)]
    now_s = since_s = 0.0
    for step in range(rows):
        cpu = 0.03 * np.exp(0.04 * random.standard_normal(2))
        since_s = now_s if step <= 200 else since_s
        if step >= 200 and now_s - since_s < lasts_s:
            cpu[1] *= shift
        busy = cpu * wall * np.exp(0.1 * np.abs(random.standard_normal(2)))
        step_s = float(busy.max()) + 0.005
        now_s += step_s
        seconds = {"busy_s": [*busy], "busy_cpu_s": [*cpu], "step_time_s": [step_s] * 2}
        observations.append(frame(step, seconds, time_s=now_s))
    return evaluate(observations, [detector])


@pytest.mark.parametrize("shift", [1.25, 1.5])
@pytest.mark.parametrize("wall", [1.02, 4.0])
def test_seconds_of_what_shares_a_core_accuse_nobody(shift: float, wall: float) -> None:
    assert crowded(shift, 600, wall=wall, seed=1, lasts_s=10.0) == []


@pytest.mark.parametrize("shift", [1.7, 2.5])
@pytest.mark.parametrize("wall", [1.02, 1.5])
def test_tenths_of_a_second_of_twice_the_cpu_time_accuse_nobody(shift: float, wall: float) -> None:
    assert crowded(shift, 400, wall=wall, seed=1, lasts_s=0.7) == []
    (finding,) = opened(crowded(shift, 400, wall=wall, seed=1))
    assert finding.detected_time_s - finding.onset_time_s <= 4.0


@pytest.mark.parametrize("wall", [1.02, 1.5])
def test_a_rank_with_a_third_more_work_on_a_crowded_host_is_named_once_it_has_lasted(wall: float) -> None:
    (finding,) = opened(crowded(1.35, 900, wall=wall, seed=1))
    assert (finding.ranks, finding.evidence["witness"]) == ((1,), "cpu")
    assert finding.detected_time_s - finding.onset_time_s <= 25.0


def test_the_more_ranks_wait_for_cores_the_less_a_row_says() -> None:
    cpu_contention = CpuContention(CpuContentionConfig())
    cpu_contention.regroup(("a", "a", "a", "b", "b", "b"))
    cpu = np.ones(6)
    uncertainty = cpu_contention.uncertainty(np.array([1.0, 1.5, 1.5, 1.0, 1.0, 9.0]), cpu)
    assert uncertainty[:3] == pytest.approx(0.25 * math.log(1.5))
    assert uncertainty[3:] == pytest.approx(0.0)


def test_four_real_ranks_with_a_tenth_of_two_cores_are_accused_of_nothing() -> None:
    # `python -m tests.support.ranks.crowded_rows tests/golden/crowded-cores.csv.gz 4 120`, with a load of 20 beside it.
    golden = Path(__file__).parents[1] / "golden" / "crowded-cores.csv.gz"
    settings = {"job": "crowded", "until_step": None, "progress": lambda _done, _total: None}
    outcome = replay([open_source(golden)], {}, [CatalogueConfig()], **settings)  # type: ignore[arg-type]
    assert (outcome.ranks, outcome.broken, outcome.incidents) == (4, None, [[]])


LAST_STAGE = (12, 13, 14, 15)


def heavy(steps: int = 420, factor: float = 1.25) -> Job:
    return Job(16, steps, 3, placement=RankPlacement(pp=4, heavy_stage=(3, factor)))


def reported(job: Job) -> list[tuple[str, str, str, bool, tuple[int, ...]]]:
    return [line(incident) for incident in judged(job)[1]]


def line(incident: Incident) -> tuple[str, str, str, bool, tuple[int, ...]]:
    what = str(incident.kind), str(incident.severity), str(incident.scope)
    return (*what, incident.first.standing, incident.ranks)


FACT = ("slowdown", "info", "stage:3", True, ())


@pytest.mark.parametrize("factor", [1.15, 1.6, 6.0])
def test_a_heavy_stage_is_one_fact_for_information_whatever_its_size(factor: float) -> None:
    assert reported(heavy(factor=factor)) == [FACT]


def test_several_heavy_stages_are_one_fact() -> None:
    job = Job(32, 100, 3, placement=RankPlacement(pp=4))
    heavy_stages = (Slow(tuple(range(8)), 0, 1.2), Slow(tuple(range(24, 32)), 0, 1.5))
    (incident,) = judged(job.inject(*heavy_stages))[1]
    assert line(incident) == FACT
    assert list(incident.evidence["ratios"]) == ["3", "0"]


def test_a_stage_that_is_lighter_later_is_no_fact_any_more() -> None:
    findings = evaluate(generate(heavy(500).inject(Slow(LAST_STAGE, 300, 1 / 1.25))), [StageDetector(StageConfig())])
    assert [(f.change, f.evidence["standing"]) for f in findings] == [(Change.OPEN, True), (Change.CLOSE, True)]


def test_a_rank_slow_from_the_start_stays_a_warning_and_what_comes_later_is_distinguished() -> None:
    slow = ("straggler", "warning", "rank:2", True, (2,))
    for fault, more in (
        (SlowJob(300, 1.08), ("slowdown", "info", "job", False, ())),
        (Slow(2, 300, 1.2), ("straggler", "warning", "rank:2", False, (2,))),
    ):
        assert reported(Job(16, 420, 1).inject(Slow(2, 0, 1.3), fault)) == [slow, more]


def test_ranks_of_one_host_that_are_slow_from_the_start_are_one_incident() -> None:
    host = tuple(range(8, 16))
    (incident,) = judged(Job(64, 120, 1).inject(Slow(host, 0, 1.3)))[1]
    assert line(incident)[:4] == ("straggler", "warning", "host:host-1", True)
    assert set(incident.ranks) == set(host)


def test_a_rank_or_host_slower_by_less_than_a_tenth_is_one_fact_for_information() -> None:
    job = Job(64, 420, 1, noise=Noise(silicon=0.005)).inject(Slow(2, 0, 1.08), Slow(5, 0, 1.07))
    assert reported(job) == [("straggler", "info", "job", True, (2, 5))]
    host = Job(64, 420, 1, noise=Noise(silicon=0.005)).inject(Slow(tuple(range(8, 16)), 0, 1.07), SlowJob(300, 1.2))
    assert [known[:4] for known in reported(host)] == [
        ("straggler", "info", "host:host-1", True),
        ("slowdown", "warning", "job", False),
    ]


def test_a_rank_that_recovers_is_reported_and_accused_of_nothing_afterwards() -> None:
    findings = found(Job(16, 700, 1).inject(Slow(2, 0, 1.3, until_step=300)))
    assert [(f.change, str(f.scope)) for f in findings] == [(Change.OPEN, "rank:2"), (Change.CLOSE, "rank:2")]
    assert (findings[0].onset_step, findings[0].severity) == (0, Severity.WARNING)
    assert 300 < (findings[1].detected_step or 0) <= 330


def test_a_relaunch_tells_again_what_still_stands_and_it_stays_the_same_incident() -> None:
    slow = ("straggler", "warning", "rank:2", True, (2,))
    assert reported(Job(16, 500, 1).inject(Slow(2, 0, 1.3), Restart(200, 190))) == [slow]
    assert reported(heavy(500).inject(Restart(200, 190))) == [FACT]


def test_a_slow_rank_that_goes_into_a_relaunch_is_no_standing_one() -> None:
    (incident,) = judged(Job(64, 400, 1).inject(Slow(7, 200, 1.2), Restart(240, 230)))[1]
    assert (incident.first.standing, incident.first.onset_step) == (False, 200)


def test_a_rollback_leaves_a_fact_as_it_is() -> None:
    job = heavy(500).inject(Restart(200, 150, relaunch=False))
    findings = evaluate(generate(job), [StageDetector(StageConfig())])
    assert [f.change for f in findings] == [Change.OPEN]


def test_a_detector_restored_all_along_goes_on_as_if_nothing_had_been() -> None:
    slow = (Slow(2, 0, 1.3, until_step=400), Slow(2, 300, 1.2, 400), Slow(9, 0, 1.08))
    job = Job(16, 460, 1, noise=Noise(silicon=0.005)).inject(*slow)
    findings = restored_all_along(lambda: StragglerDetector(StragglerConfig()), generate(job), 7)
    assert [f.change for f in findings if str(f.scope) == "rank:2"] == [*[Change.OPEN] * 2, *[Change.CLOSE] * 2]
