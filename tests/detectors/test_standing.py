"""What holds from the first steps is a fact of the job: told once, known to the baseline, and no cause of anything."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch_detectors.base import Change, Frame, Kind, Observation, Severity
from rankwatch_detectors.pace.stage import StageConfig, StageDetector
from rankwatch_detectors.pace.straggler import StragglerConfig, StragglerDetector
from rankwatch_service.incidents.model import Incident
from rankwatch_service.simulate.faults import Congestion, Restart, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from rankwatch_service.simulate.placement import RankPlacement
from suite.scoring import judged
from tests.support.detection.verdicts import judge

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
