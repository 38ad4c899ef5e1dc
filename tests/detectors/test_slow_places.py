"""A host, a switch or a stage that is slow as a whole is reported as one, also by less than the noise of its ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Kind, Observation, Severity
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_detectors.statistics.baseline import RunHistory
from rankwatch_detectors.statistics.peers import GroupQuartiles
from rankwatch_service.simulate.faults import MissingRows, Restart, Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from suite.cluster_model import ClusterJob
from tests.detectors.test_explanation import Explained
from tests.support.detection.verdicts import evaluate, opened, restored_all_along

AT = 320


def job(steps: int = 400, seed: int = 1, **more: int) -> Job:
    """Six hosts of four ranks, two to a switch."""
    return Job(24, steps, seed, placement=RankPlacement(**{"ranks_per_host": 4, "hosts_per_switch": 2, **more}))


def found(observations: Iterable[Observation]) -> list[Finding]:
    return evaluate(observations, [StragglerDetector(StragglerConfig())])


def scopes(observations: Iterable[Observation]) -> list[str]:
    return [str(finding.scope) for finding in opened(found(observations))]


def test_a_place_that_is_slower_by_more_is_named_with_its_first_ranks_and_in_their_place() -> None:
    host = job().inject(Slow((4, 5, 6, 7), AT, 1.15))
    (finding,) = opened(found(generate(host)))
    assert (str(finding.scope), finding.ranks, finding.detected_step) == ("host:host-1", (4, 5, 6, 7), AT + 5)
    assert finding.summary.startswith("Host host-1 is slow as a whole: its 4 ranks are 1")
    (switch,) = opened(found(generate(job().inject(Slow(tuple(range(8, 16)), AT, 1.15)))))
    assert (str(switch.scope), switch.ranks) == ("switch:switch-1", tuple(range(8, 16)))
    assert switch.evidence["ratio"] == pytest.approx(1.15, rel=0.05)


def test_slow_ranks_are_named_by_themselves_as_long_as_more_than_a_quarter_of_their_host_is_not() -> None:
    assert scopes(generate(job().inject(Slow(5, AT, 1.3)))) == ["rank:5"]
    three = Job(64, 400, 2).inject(Slow((8, 9, 10, 11, 12), AT, 1.1))
    assert sorted(scopes(generate(three))) == ["rank:10", "rank:11", "rank:12", "rank:8", "rank:9"]


@pytest.mark.parametrize(
    "more", [{"ranks_per_host": 12}, {"pp": 6}, {"ranks_per_host": 1, "hosts_per_switch": 0}], ids=str
)
def test_fewer_than_three_hosts_to_compare_and_hosts_of_one_rank_are_not_judged_as_a_whole(more: dict) -> None:
    assert all(scope.startswith("rank:") for scope in scopes(generate(job(**more).inject(Slow((4, 5), AT, 1.15)))))


def test_of_two_switches_none_is_named() -> None:
    two = job(hosts_per_switch=3).inject(Slow(tuple(range(12)), AT, 1.15))
    assert sorted(scopes(generate(two))) == ["host:host-0", "host:host-1", "host:host-2"]


def test_noise_that_the_ranks_of_a_host_share_is_learned_from_its_own_past() -> None:
    """This job has a host that is 4 % slower for a minute and a half, as its memory of a minute brings about."""
    assert not [scope for scope in scopes(ClusterJob(hosts=8, steps=750, seed=1002).observations()) if "host" in scope]


def test_a_rank_that_is_slower_than_its_slow_host_is_named_too() -> None:
    both = job(440).inject(Slow((4, 5, 6, 7), AT, 1.1), Slow(6, AT + 50, 1.2))
    host, rank = opened(found(generate(both)))
    assert (str(host.scope), str(rank.scope)) == ("host:host-1", "rank:6")
    assert rank.evidence["ratio"] == pytest.approx(1.32, rel=0.05)


def test_a_recovered_host_is_closed_and_its_rank_that_stays_slow_is_named() -> None:
    host = job(500).inject(Slow((4, 5, 7), AT, 1.15, AT + 80), Slow(6, AT, 1.15))
    reported = [(finding.change, str(finding.scope)) for finding in found(generate(host))]
    assert reported == [(Change.OPEN, "host:host-1"), (Change.OPEN, "rank:6"), (Change.CLOSE, "host:host-1")]


def test_a_slow_host_is_known_again_in_the_next_attempt() -> None:
    again = job(460).inject(Slow((4, 5, 6, 7), AT, 1.15), Restart(400, 390))
    assert scopes(generate(again)) == ["host:host-1", "host:host-1"]


def test_a_switch_that_becomes_known_while_the_job_runs_is_judged_from_then_on() -> None:
    start, *others = generate(job().inject(Slow(tuple(range(8, 16)), AT, 1.15)))
    assert isinstance(start, AttemptStart)
    unknown = replace(start, topology=replace(start.topology, switch=()))
    known = next(number for number, one in enumerate(others) if isinstance(one, Frame) and one.step == 100)
    assert scopes([unknown, *others[:known], start, *others[known:]]) == ["switch:switch-1"]


def test_a_detector_restored_within_any_block_goes_on_as_if_nothing_had_happened() -> None:
    troubled = job(420).inject(Slow((4, 5, 6, 7), AT, 1.04, AT + 50), MissingRows(13, 100, 180), Restart(200, 190))
    restored_all_along(lambda: StragglerDetector(StragglerConfig()), generate(troubled), 29)


def test_why_a_place_was_reported_is_explained_from_half_of_the_evidence_on() -> None:
    explained = Explained(list(generate(job(1_100, 3).inject(Slow((4, 5, 6, 7), 1_000, 1.03)))))
    reported = next(one for one in explained.reported if one["scope"] == "host:host-1")
    points = reported["points"]
    assert points["step"][-1] == reported["detected_step"]
    assert points["value"][-1] >= points["threshold"][-1]
    assert reported["why"].startswith("The log-likelihood ratio of a lasting change reached")
    assert reported["why_not_earlier"]


def test_a_lower_quartile_is_high_only_if_no_more_than_a_quarter_is_not() -> None:
    group = np.array([0] * 8 + [1] * 4 + [2, 2])
    quartiles = GroupQuartiles(group, 3)
    usable = np.ones(group.size, dtype=np.bool_)
    high = np.array([0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0])
    assert quartiles.whole(high > 0).tolist() == [True, True, False]
    assert quartiles.of(high.astype(float), usable).tolist() == [1.0, 1.0, 0.0]
    usable[8:10] = False  # two of four are not more than half
    assert np.isnan(quartiles.of(high.astype(float), usable)).tolist() == [False, True, False]
    equal = GroupQuartiles(np.arange(8) // 4, 2)
    values = np.array([3.0, 1.0, 2.0, 4.0, 8.0, 6.0, 7.0, 5.0])
    assert equal.of(values, np.ones(8, dtype=np.bool_)).tolist() == [1.0, 5.0]


def test_means_over_runs_are_known_once_eight_of_them_are_kept_and_follow_the_units() -> None:
    history, random = RunHistory(128), np.random.default_rng(1)
    history.begin(np.array([-1, -1]))
    noise = np.repeat(random.standard_normal((32, 2)), 4, axis=0) * (1.0, 3.0)  # each value lasts for four rows
    for number, row in enumerate(noise):
        if number == 7:
            assert history.spread(1, 1) == np.inf
        history.push(row, np.ones(2, dtype=np.bool_))
    widened = np.sqrt(2.0)
    assert history.spread(1, 1) == pytest.approx(3.0 * widened, rel=0.3)
    assert history.spread(1, 4) == pytest.approx(3.0 * 0.83 * widened, rel=0.3)
    assert history.spread(1, 30) == pytest.approx(history.spread(1, 12), rel=0.3)  # longer runs are not known
    before = history.spread(1, 4)
    history.begin(np.array([1, -1]))
    assert history.spread(0, 4) == pytest.approx(before)
    assert history.spread(1, 4) == np.inf


def test_the_smallest_faults_of_hosts_and_switches_are_known_and_found() -> None:
    """They are smaller than that of a rank, in whose noise they hide, and take longer."""
    quiet, detector = Job(64, 500, 3, placement=RankPlacement(hosts_per_switch=2)), StragglerDetector(StragglerConfig())
    evaluate(generate(quiet), [detector])
    sizes = {one.fault: dict(one.sizes) for one in detector.detectable()}
    host = sizes["a host that is slow as a whole, by wall time over 8 rows"]
    switch = sizes["a switch that is slow as a whole, by wall time over 8 rows"]
    assert host[16] is switch[16] is None
    assert 1.0 < switch[64] <= host[64] < sizes["a slow rank, by wall time"][64]
    slow = quiet.inject(Slow(tuple(range(8, 16)), 400, 1 + 1.3 * (host[64] - 1)))
    assert scopes(generate(slow)) == ["host:host-1"]


def reported(job: Job) -> list[Finding]:
    return [finding for finding in evaluate(generate(job)) if finding.kind in (Kind.STRAGGLER, Kind.SLOWDOWN)]


STAGE_ONE = tuple(range(16, 32))


def test_a_stage_that_becomes_slower_is_named_and_no_rank_of_it() -> None:
    job = Job(world_size=64, steps=600, seed=2, placement=RankPlacement(pp=4)).inject(
        Slow(STAGE_ONE, 300, 1.1, until_step=450)
    )
    findings = reported(job)
    stage = [finding for finding in findings if str(finding.scope) == "stage:1"]
    assert [finding.change for finding in stage] == [Change.OPEN, Change.CLOSE]
    assert (stage[0].severity, stage[0].ranks, stage[0].onset_step) == (Severity.WARNING, (), 300)
    assert stage[0].detected_step is not None
    assert stage[0].detected_step <= 312
    assert not [finding for finding in findings if finding.kind is Kind.STRAGGLER]


@pytest.mark.parametrize("pp", [4, 16])
def test_a_stage_that_is_heavier_by_design_is_reported_once_for_information(pp: int) -> None:
    findings = reported(Job(world_size=32, steps=400, seed=22, placement=RankPlacement(pp=pp, heavy_stage=(3, 1.6))))
    assert [(str(f.scope), f.change, f.severity, f.ranks) for f in findings] == [
        ("stage:3", Change.OPEN, Severity.INFO, ())
    ]
    assert findings[0].evidence["ratio"] == pytest.approx(1.6, rel=0.05)


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(Job(world_size=64, steps=600, seed=1, placement=RankPlacement(pp=4)), id="even stages"),
        pytest.param(
            Job(world_size=64, steps=600, seed=3, placement=RankPlacement(pp=4, tp=2), noise=Noise(uneven_cv=0.15)),
            id="uneven sequences",
        ),
        pytest.param(
            Job(world_size=64, steps=600, seed=4, placement=RankPlacement(pp=2, heavy_stage=(1, 1.6))), id="two stages"
        ),
        pytest.param(
            Job(
                world_size=64,
                steps=600,
                seed=5,
                placement=RankPlacement(pp=4),
                noise=Noise(hiccup_probability=0.01, hiccup_s=0.5, burst_probability=1e-4),
            ),
            id="hiccups",
        ),
    ],
)
def test_other_jobs_have_no_slow_stage(job: Job) -> None:
    assert reported(job) == []


def test_a_detector_restored_all_along_goes_on_as_if_nothing_had_been() -> None:
    job = Job(world_size=32, steps=520, seed=7, placement=RankPlacement(pp=4, heavy_stage=(3, 1.5)))
    job = job.inject(Slow(tuple(range(8, 16)), 300, 1.1, 450))
    assert len(restored_all_along(lambda: StageDetector(StageConfig()), generate(job), 17)) >= 3
