"""A stage that is slow as a whole is told as a stage, and none of its ranks is accused."""

from __future__ import annotations

import pytest

from rankwatch_detectors.base import Change, Finding, Frame, Kind, Severity
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_service.simulate.faults import Slow
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement


def told(job: Job) -> list[Finding]:
    bank = detectors()
    findings = [f for observation in generate(job) for one in bank for f in one.observe(observation)]
    return [finding for finding in findings if finding.kind in (Kind.STRAGGLER, Kind.SLOWDOWN)]


STAGE_ONE = tuple(range(16, 32))


def test_a_stage_that_becomes_slower_is_named_and_no_rank_of_it() -> None:
    job = Job(world_size=64, steps=600, seed=2, placement=RankPlacement(pp=4)).inject(
        Slow(STAGE_ONE, 300, 1.1, until_step=450)
    )
    findings = told(job)
    stage = [finding for finding in findings if str(finding.scope) == "stage:1"]
    assert [finding.change for finding in stage] == [Change.OPEN, Change.CLOSE]
    assert (stage[0].severity, stage[0].ranks, stage[0].onset_step) == (Severity.WARNING, (), 300)
    assert stage[0].detected_step is not None
    assert stage[0].detected_step <= 312
    assert not [finding for finding in findings if finding.kind is Kind.STRAGGLER]


@pytest.mark.parametrize("pp", [4, 16])
def test_a_stage_that_is_heavier_by_design_is_told_once_for_information(pp: int) -> None:
    findings = told(Job(world_size=32, steps=400, seed=22, placement=RankPlacement(pp=pp, heavy_stage=(3, 1.6))))
    assert [(str(f.scope), f.change, f.severity, f.ranks) for f in findings] == [
        ("stage:3", Change.OPEN, Severity.INFO, ()),
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
    assert told(job) == []


def test_one_slow_rank_is_no_slow_stage() -> None:
    findings = told(Job(world_size=64, steps=400, seed=6, placement=RankPlacement(pp=4)).inject(Slow(17, 300, 1.2)))
    assert [str(finding.scope) for finding in findings if finding.kind is Kind.STRAGGLER] == ["rank:17"]
    assert not [finding for finding in findings if str(finding.scope).startswith("stage:")]


@pytest.mark.parametrize("cut", [15, 250, 303, 306, 330, 460])
def test_a_snapshot_taken_anywhere_goes_on_as_if_nothing_had_been(cut: int) -> None:
    job = Job(world_size=32, steps=520, seed=7, placement=RankPlacement(pp=4, heavy_stage=(3, 1.5))).inject(
        Slow(tuple(range(8, 16)), 300, 1.1, 450)
    )
    observations = list(generate(job))
    whole = StageDetector(StageConfig())
    wanted = [finding for observation in observations for finding in whole.observe(observation)]
    first, second = StageDetector(StageConfig()), StageDetector(StageConfig())
    at = next(index for index, one in enumerate(observations) if isinstance(one, Frame) and one.step == cut)
    findings = [finding for observation in observations[:at] for finding in first.observe(observation)]
    second.restore(first.snapshot())
    findings += [finding for observation in observations[at:] for finding in second.observe(observation)]
    assert findings == wanted
    assert len(wanted) >= 3
