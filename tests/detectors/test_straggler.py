"""Slow ranks are named, soon, and nobody else is.

What holds from the first steps is a fact of the job: told once, known to the baseline, and no cause of anything.
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Kind, Observation, Severity
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.pace.load import Crowding, CrowdingConfig
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_detectors.pace.witness import WitnessConfig
from rankwatch_detectors.scope import ScopeLevel
from rankwatch_service.incidents.model import Incident
from rankwatch_service.replay.run import replay
from rankwatch_service.replay.sources import open_source
from rankwatch_service.simulate.faults import Congestion, Hang, MissingRows, RecurringStall, Restart, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from suite.cases import bound, straggler
from suite.scoring import judged
from tests.support.detection.verdicts import closed, judge, opened
from tests.support.values.presences import ATTEMPT, frame, topology


def found(job: Job, config: StragglerConfig | None = None) -> list[Finding]:
    return judge(generate(job), [StragglerDetector(config or StragglerConfig())])


def demo_job(steps: int = 400, seed: int = 0, contention: float = 0.3) -> Job:
    """Four CPU ranks on two cores at ten steps a second: wall time says little, CPU time scatters by 4 %."""
    noise = Noise(busy=0.04, contention=contention)
    return Job(4, steps, seed, step_s=0.1, noise=noise, placement=RankPlacement(accelerated=False))


def test_the_slow_rank_of_a_seeded_job_is_named_at_the_golden_step() -> None:
    findings = opened(found(Job(world_size=64, steps=400, seed=1).inject(Slow(17, 300, 1.6))))
    assert [(str(f.scope), f.ranks, f.onset_step, f.detected_step) for f in findings] == [("rank:17", (17,), 300, 305)]


@pytest.mark.parametrize(
    ("world_size", "factor", "noise", "steps_max"),
    [
        # Lorden's bound at 1,024 ranks and one step a second is 8 steps for +5 % on 2 % noise: twice it, and five.
        (8, 1.05, 0.02, 25),
        (1024, 1.05, 0.02, 22),
        (1024, 1.10, 0.02, 10),
        (1024, 1.30, 0.02, 8),
        (256, 1.03, 0.02, 80),
        (256, 1.05, 0.05, 150),
    ],
)
def test_a_slow_rank_is_named_within_the_bound_at_any_size(
    world_size: int, factor: float, noise: float, steps_max: int
) -> None:
    for seed in range(2):
        job = Job(world_size=world_size, steps=150 + steps_max, seed=seed, noise=Noise(busy=noise)).inject(
            Slow(5, 150, factor)
        )
        named = opened(found(job))
        assert [f.ranks for f in named] == [(5,)], seed
        assert (named[0].detected_step or 0) - 150 <= steps_max, seed


def test_a_rank_twice_as_slow_on_shared_cores_is_named_within_thirty_steps_by_its_cpu_time() -> None:
    for seed in range(3):
        findings = opened(found(demo_job(seed=seed).inject(Slow(2, 200, 2.0))))
        assert [f.ranks for f in findings] == [(2,)], seed
        assert (findings[0].detected_step or 0) <= 230
        assert findings[0].evidence["witness"] == "cpu"
        assert findings[0].cause == "worker"


@pytest.mark.parametrize("seed", range(2))
def test_a_clean_job_on_crowded_cores_names_nobody(seed: int) -> None:
    assert found(demo_job(seed=seed, contention=0.6, steps=2000)) == []


def test_a_descheduled_rank_is_told_after_a_minute_and_the_host_is_the_cause() -> None:
    findings = opened(found(demo_job(steps=2500, contention=0.1).inject(Slow(1, 300, 1.7, wall_only=True))))
    assert [(f.ranks, f.cause) for f in findings] == [((1,), "host")]
    assert findings[0].detected_time_s - findings[0].onset_time_s >= 60.0


@pytest.mark.parametrize("world_size", [2, 3, 4, 6])
def test_the_smallest_groups_name_the_slow_rank(world_size: int) -> None:
    assert [
        f.ranks for f in opened(found(Job(world_size=world_size, steps=250, seed=3).inject(Slow(1, 150, 1.5))))
    ] == [(1,)]


@pytest.mark.parametrize("world_size", [2, 3, 4, 64])
def test_a_rank_that_becomes_fast_accuses_nobody(world_size: int) -> None:
    assert found(Job(world_size=world_size, steps=400, seed=4).inject(Slow(1, 150, 1 / 1.5))) == []


def test_half_of_a_small_group_is_named_when_half_is_slow() -> None:
    findings = opened(found(Job(world_size=4, steps=250, seed=5).inject(Slow((0, 3), 150, 1.5))))
    assert sorted(f.ranks for f in findings) == [(0,), (3,)]


def test_two_ranks_with_different_onsets_are_both_named() -> None:
    findings = opened(found(Job(world_size=64, steps=300, seed=6).inject(Slow(3, 120, 1.1), Slow(40, 200, 1.2))))
    assert [f.ranks for f in findings] == [(3,), (40,)]


def test_a_whole_host_is_named_rank_by_rank_as_long_as_the_noise_of_hosts_is_not_known() -> None:
    findings = opened(
        found(
            Job(world_size=64, steps=120, seed=7, placement=RankPlacement(tp=2)).inject(
                Slow(tuple(range(8, 16)), 80, 1.15)
            )
        )
    )
    assert sorted(f.ranks[0] for f in findings if f.scope.level is ScopeLevel.RANK) == list(range(8, 16))


def test_a_rank_that_is_slow_from_its_first_step_is_held_against_its_peers() -> None:
    for seed in range(4):
        findings = opened(found(Job(world_size=32, steps=80, seed=seed).inject(Slow(9, 0, 1.3))))
        assert [f.ranks for f in findings] == [(9,)]
        assert findings[0].evidence["ratio"] == pytest.approx(1.3, rel=0.12)


@pytest.mark.parametrize("world_size", [8, 64])
def test_a_rank_slow_from_its_first_step_is_named_within_thirty_steps_whatever_silicon_it_is_among(
    world_size: int,
) -> None:
    for seed in range(4):
        (finding,) = opened(found(Job(world_size=world_size, steps=40, seed=seed).inject(Slow(seed, 0, 1.3))))
        assert (finding.ranks, (finding.detected_step or 0) <= 30) == ((seed,), True)


def test_the_first_slow_rank_among_four_is_found_within_thirty_steps() -> None:
    findings = opened(found(demo_job(steps=60).inject(Slow(2, 0, 2.0))))
    assert [f.ranks for f in findings] == [(2,)]
    assert (findings[0].detected_step or 0) <= 30


def test_a_staircase_of_small_steps_is_found() -> None:
    job = Job(world_size=64, steps=500, seed=8)
    for number in range(5):
        job = job.inject(Slow(11, 150 + 60 * number, 1.03))
    assert {f.ranks for f in opened(found(job))} == {(11,)}


def test_a_rank_slow_in_every_second_step_is_one_episode() -> None:
    findings = found(Job(world_size=64, steps=500, seed=9).inject(Slow(11, 150, 1.2, every=2)))
    assert [(f.change, f.ranks) for f in findings if f.change is not Change.UPDATE] == [(Change.OPEN, (11,))]


def test_waiting_for_data_is_found_and_called_by_its_name() -> None:
    findings = opened(found(Job(world_size=64, steps=250, seed=10).inject(Slow(21, 150, 1.3, data_wait=True))))
    assert [(f.ranks, f.cause) for f in findings] == [((21,), "data")]


def test_rate_and_cost_are_told() -> None:
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
        assert f"{evidence['ratio']:.2f} times" in finding.summary
        assert evidence["busy_s"] == pytest.approx(evidence["ratio"] * evidence["peers_busy_s"])
    assert update.evidence["ratio"] == pytest.approx(factor, rel=0.05)
    assert update.evidence["cost_gpu_hours_per_hour"] < first.evidence["cost_gpu_hours_per_hour"]


def test_recovery_is_told_within_thirty_steps() -> None:
    (end,) = closed(found(Job(world_size=16, steps=400, seed=12).inject(Slow(4, 150, 2.0, until_step=250))))
    assert 250 < (end.detected_step or 0) <= 290


def test_a_rank_that_becomes_slower_still_is_updated_not_opened_again() -> None:
    findings = found(Job(world_size=16, steps=500, seed=13).inject(Slow(4, 150, 1.2), Slow(4, 300, 1.5)))
    assert [f.change for f in findings] == [Change.OPEN, Change.UPDATE]
    assert findings[1].evidence["ratio"] == pytest.approx(1.8, rel=0.1)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(world_size=64, steps=800, seed=20), id="clean"),
        pytest.param(Job(world_size=64, steps=800, seed=21).inject(SlowJob(400, 1.5)), id="all ranks slower"),
        pytest.param(
            Job(world_size=64, steps=800, seed=22, placement=RankPlacement(pp=4, heavy_stage=(3, 1.6))),
            id="heavy stage",
        ),
        pytest.param(
            Job(world_size=32, steps=800, seed=22, placement=RankPlacement(pp=16, heavy_stage=(3, 1.6))),
            id="heavy stage, two replicas",
        ),
        pytest.param(
            Job(world_size=64, steps=800, seed=23, placement=RankPlacement(tp=2, pp=2), noise=Noise(uneven_cv=0.15)),
            id="uneven, unknown",
        ),
        pytest.param(
            Job(world_size=64, steps=800, seed=24, report_tokens=True, noise=Noise(uneven_cv=0.15)),
            id="uneven, reported",
        ),
        pytest.param(
            Job(world_size=64, steps=800, seed=25, noise=Noise(hiccup_probability=0.01, hiccup_s=0.5)),
            id="garbage collection",
        ),
        pytest.param(
            Job(world_size=64, steps=400, seed=3, noise=Noise(hiccup_probability=0.1, hiccup_s=0.3)),
            id="garbage collection in each tenth step",
        ),
        pytest.param(
            Job(world_size=64, steps=1500, seed=26, noise=Noise(burst_probability=0.0002)), id="bursts of slow steps"
        ),
        pytest.param(Job(world_size=64, steps=800, seed=27, noise=Noise(silicon=0.03)), id="silicon spread"),
        pytest.param(Job(world_size=64, steps=800, seed=28).inject(Restart(400, 350)), id="restart"),
        pytest.param(
            Job(world_size=64, steps=800, seed=29).inject(MissingRows(7, 0, 300), MissingRows(9, 200, 260)),
            id="late ranks",
        ),
        pytest.param(Job(world_size=64, steps=800, seed=30, step_s=30.0, noise=Noise(wave=0.02)), id="daily wave"),
        pytest.param(Job(world_size=64, steps=800, seed=31).inject(RecurringStall(50, 60, "eval")), id="evaluation"),
    ],
)
def test_what_is_no_straggler_accuses_nobody(job: Job) -> None:
    assert found(job) == []


def test_uneven_loads_hide_no_slow_rank() -> None:
    reported = Job(world_size=64, steps=300, seed=32, report_tokens=True, noise=Noise(uneven_cv=0.15)).inject(
        Slow(7, 200, 1.1)
    )
    unknown = Job(
        world_size=64, steps=300, seed=33, placement=RankPlacement(tp=2, pp=4), noise=Noise(uneven_cv=0.15)
    ).inject(Slow(7, 200, 1.1))
    for job in (reported, unknown):
        findings = opened(found(job))
        assert [f.ranks for f in findings] == [(7,)]
        assert (findings[0].detected_step or 0) <= 225


def test_missing_rows_are_unknown_and_neither_accuse_nor_clear() -> None:
    job = Job(world_size=16, steps=400, seed=34).inject(Slow(4, 150, 1.5), MissingRows(4, 200, 300))
    assert [f.change for f in found(job)] == [Change.OPEN]


def test_baselines_follow_the_hardware_through_a_relaunch() -> None:
    """After the relaunch the slow rank is judged by what its unit could do before: named after a few steps again."""
    findings = opened(found(Job(world_size=16, steps=320, seed=35).inject(Slow(4, 200, 1.12), Restart(300, 290))))
    assert [f.ranks for f in findings] == [(4,), (4,)]
    assert (findings[1].detected_step or 0) - 290 <= 14


def test_false_findings_keep_the_budget_when_it_is_set_a_thousand_times_higher() -> None:
    """At the default budget nothing would ever be seen to fail; at 20,000 a week a short run shows the rate."""
    steps, budget = 1500, 20_000.0
    wall = WitnessConfig(ratios=(1.05, 1.1), ratio_min=1.0, rows_min=1)
    config = StragglerConfig(budget=3 * budget, wall=wall)
    allowed = budget * steps / 604_800
    for world_size in (8, 256):
        count = len(opened(found(Job(world_size=world_size, steps=steps, seed=36), config)))
        assert count <= allowed + 3 * math.sqrt(allowed), world_size


@pytest.mark.parametrize(("ranks", "ratio", "noise"), [(256, 1.03, 0.02), (1024, 1.05, 0.05)])
def test_small_shifts_are_found_within_one_and_a_half_times_the_bound(ranks: int, ratio: float, noise: float) -> None:
    case = straggler(ranks, ratio, noise)
    delays = []
    for seed in range(20):
        job = case.job(seed)
        (finding,) = opened(found(job))
        assert finding.ranks == job.labels[0].ranks
        delays.append((finding.detected_step or 0) - job.labels[0].at_step)
    assert statistics.median(delays) <= 1.5 * bound(job, ratio)


def test_pauses_that_only_add_time_are_judged_by_a_higher_threshold() -> None:
    """Lorden's bound holds whatever the noise is like; that of normal noise, five times longer, does not."""
    limits = []
    for probability in (0.0, 0.1):
        detector = StragglerDetector(StragglerConfig())
        judge(generate(Job(64, 300, 3, noise=Noise(hiccup_probability=probability, hiccup_s=0.3))), [detector])
        witness = detector.witnesses["wall"]
        limits.append(witness.limit + math.log(witness.step_s))  # pauses make steps longer, of which a week has fewer
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


def test_other_kinds_are_left_to_others() -> None:
    assert all(
        f.kind is Kind.STRAGGLER for f in found(Job(world_size=8, steps=300).inject(Slow(2, 100, 1.5), Hang(1, 200)))
    )


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
    return judge(observations, [detector])


@pytest.mark.parametrize("shift", [1.25, 1.4, 1.5])
@pytest.mark.parametrize("wall", [1.02, 1.5, 4.0])
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
    crowding = Crowding(CrowdingConfig())
    crowding.regroup(("a", "a", "a", "b", "b", "b"))
    cpu = np.ones(6)
    doubt = crowding.doubt(np.array([1.0, 1.5, 1.5, 1.0, 1.0, 9.0]), cpu)
    assert doubt[:3] == pytest.approx(0.25 * math.log(1.5))
    assert doubt[3:] == pytest.approx(0.0)


def test_four_real_ranks_with_a_tenth_of_two_cores_are_accused_of_nothing() -> None:
    # `python -m tests.support.ranks.crowded_rows tests/golden/crowded-cores.csv.gz 4 120`, with a load of 20 beside it.
    golden = Path(__file__).parents[1] / "golden" / "crowded-cores.csv.gz"
    settings = {"job": "crowded", "until_step": None, "progress": lambda _done, _total: None}
    outcome = replay([open_source(golden)], {}, [CatalogueConfig()], **settings)  # type: ignore[arg-type]
    assert (outcome.ranks, outcome.broken, outcome.incidents) == (4, None, [[]])


LAST_STAGE = (12, 13, 14, 15)


def heavy(steps: int = 420, factor: float = 1.25) -> Job:
    return Job(16, steps, 3, placement=RankPlacement(pp=4, heavy_stage=(3, factor)))


def told(job: Job) -> list[tuple[str, str, str, bool, tuple[int, ...]]]:
    return [line(incident) for incident in judged(job)[1]]


def line(incident: Incident) -> tuple[str, str, str, bool, tuple[int, ...]]:
    return (
        str(incident.kind), str(incident.severity), str(incident.scope), incident.first.standing, incident.ranks
    )  # fmt: skip


FACT = ("slowdown", "info", "stage:3", True, ())


@pytest.mark.parametrize("factor", [1.15, 1.6, 6.0])
def test_a_heavy_stage_is_one_fact_for_information_whatever_its_size(factor: float) -> None:
    assert told(heavy(factor=factor)) == [FACT]


@pytest.mark.parametrize(
    ("later", "news"),
    [
        pytest.param(
            lambda job: job.inject(SlowJob(300, 1.08)), ("slowdown", "info", "job", False, ()), id="all slower"
        ),
        pytest.param(
            lambda job: job.inject(Congestion(300, 3.0)), ("slowdown", "warning", "job", False, ()), id="collectives"
        ),
        pytest.param(
            lambda job: job.inject(Slow(LAST_STAGE, 300, 1.12)),
            ("slowdown", "warning", "stage:3", False, ()),
            id="the stage itself",
        ),
        pytest.param(
            lambda job: job.inject(Slow(13, 300, 1.1)),
            ("straggler", "warning", "rank:13", False, (13,)),
            id="one of its ranks",
        ),
    ],
)  # fmt: skip
def test_what_begins_later_is_an_incident_of_its_own(later: Any, news: tuple[object, ...]) -> None:
    assert told(later(heavy())) == [FACT, news]


def test_several_heavy_stages_are_one_fact() -> None:
    job = Job(32, 100, 3, placement=RankPlacement(pp=4))
    heavy_stages = (Slow(tuple(range(8)), 0, 1.2), Slow(tuple(range(24, 32)), 0, 1.5))
    (incident,) = judged(job.inject(*heavy_stages))[1]
    assert line(incident) == FACT
    assert list(incident.evidence["ratios"]) == ["3", "0"]


def test_a_stage_that_is_lighter_later_is_no_fact_any_more() -> None:
    findings = judge(generate(heavy(500).inject(Slow(LAST_STAGE, 300, 1 / 1.25))), [StageDetector(StageConfig())])
    assert [(f.change, f.evidence["standing"]) for f in findings] == [(Change.OPEN, True), (Change.CLOSE, True)]


def test_a_rank_slow_from_the_start_stays_a_warning_and_what_comes_later_is_told_apart() -> None:
    slow = ("straggler", "warning", "rank:2", True, (2,))
    assert told(Job(16, 420, 1).inject(Slow(2, 0, 1.3), SlowJob(300, 1.08))) == [
        slow,
        ("slowdown", "info", "job", False, ()),
    ]
    later = told(Job(16, 420, 1).inject(Slow(2, 0, 1.3), Slow(2, 300, 1.2)))
    assert later == [slow, ("straggler", "warning", "rank:2", False, (2,))]


def test_ranks_of_one_host_that_are_slow_from_the_start_are_one_incident() -> None:
    host = tuple(range(8, 16))
    (incident,) = judged(Job(64, 120, 1).inject(Slow(host, 0, 1.3)))[1]
    assert line(incident)[:4] == ("straggler", "warning", "host:host-1", True)
    assert set(incident.ranks) == set(host)


def test_a_rank_or_host_slower_by_less_than_a_tenth_is_one_fact_for_information() -> None:
    job = Job(64, 420, 1, noise=Noise(silicon=0.005)).inject(Slow(2, 0, 1.08), Slow(5, 0, 1.07))
    assert told(job) == [("straggler", "info", "job", True, (2, 5))]
    host = Job(64, 420, 1, noise=Noise(silicon=0.005)).inject(Slow(tuple(range(8, 16)), 0, 1.07), SlowJob(300, 1.2))
    assert [known[:4] for known in told(host)] == [
        ("straggler", "info", "host:host-1", True),
        ("slowdown", "warning", "job", False),
    ]


def test_a_rank_that_recovers_is_told_and_accused_of_nothing_afterwards() -> None:
    findings = judge(
        generate(Job(16, 700, 1).inject(Slow(2, 0, 1.3, until_step=300))), [StragglerDetector(StragglerConfig())]
    )
    assert [(f.change, str(f.scope)) for f in findings] == [(Change.OPEN, "rank:2"), (Change.CLOSE, "rank:2")]
    assert (findings[0].onset_step, findings[0].severity) == (0, Severity.WARNING)
    assert 300 < (findings[1].detected_step or 0) <= 330


def test_a_relaunch_tells_again_what_still_stands_and_it_stays_the_same_incident() -> None:
    slow = ("straggler", "warning", "rank:2", True, (2,))
    job = Job(16, 500, 1).inject(Slow(2, 0, 1.3), Restart(200, 190))
    incidents = judged(job)[1]
    assert [line(incident) for incident in incidents] == [slow]
    assert [line(incident) for incident in judged(heavy(500).inject(Restart(200, 190)))[1]] == [FACT]


def test_a_slow_rank_that_goes_into_a_relaunch_is_no_standing_one() -> None:
    (incident,) = judged(Job(64, 400, 1).inject(Slow(7, 200, 1.2), Restart(240, 230)))[1]
    assert (incident.first.standing, incident.first.onset_step) == (False, 200)


def test_a_rollback_leaves_a_fact_as_it_is() -> None:
    findings = judge(
        generate(heavy(500).inject(Restart(200, 150, relaunch=False))), [StageDetector(StageConfig())]
    )  # fmt: skip
    assert [f.change for f in findings] == [Change.OPEN]


@pytest.mark.parametrize("cut", [12, 17, 40, 200, 305, 420])
def test_a_snapshot_taken_anywhere_goes_on_as_if_nothing_had_been(cut: int) -> None:
    def made() -> StragglerDetector:
        return StragglerDetector(StragglerConfig())

    job = Job(16, 460, 1, noise=Noise(silicon=0.005)).inject(
        Slow(2, 0, 1.3, until_step=400), Slow(2, 300, 1.2, 400), Slow(9, 0, 1.08)
    )
    observations: list[Observation] = list(generate(job))
    wanted = judge(observations, [made()])
    at = next(index for index, one in enumerate(observations) if isinstance(one, Frame) and one.step == cut)
    first, second = made(), made()
    findings = judge(observations[:at], [first])
    second.restore(first.snapshot())
    findings += judge(observations[at:], [second])
    assert findings == wanted
    assert [(f.kind, str(f.scope), f.change) for f in wanted if str(f.scope) == "rank:2"] == [
        (Kind.STRAGGLER, "rank:2", change) for change in (Change.OPEN, Change.OPEN, Change.CLOSE, Change.CLOSE)
    ]
