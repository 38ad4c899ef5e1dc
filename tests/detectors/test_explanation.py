"""Why a finding was reported, why not earlier, and what would be found today."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rankwatch_detectors.base import Frame, Kind, Observation, StepKind
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.explanation import (
    HISTORIES_MAX,
    POINTS_MAX,
    Detectable,
    ExplainedDetector,
    Statistic,
    StatisticHistories,
    Suspect,
)
from rankwatch_detectors.scope import IncidentScope
from rankwatch_service.simulate.faults import Fault, LossClimb, LossLevel, LossSpike, Slow, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.stream.saved import pack, unpack
from tests.support.values.presences import frame


class Explained:
    """A job's detectors and their histories."""

    def __init__(self, observations: list[Observation], saved_at: int = -1) -> None:
        self.bank = detectors()
        self.histories = StatisticHistories()
        self.reported: list[dict] = []
        for number, one in enumerate(observations):
            if number == saved_at:
                before, self.bank, histories = self.bank, detectors(), self.histories
                for old, new in zip(before, self.bank, strict=True):
                    new.restore(unpack(pack(old.snapshot())))
                self.histories = StatisticHistories()
                self.histories.restore(unpack(pack(histories.snapshot())))
            self.observe(one)

    def observe(self, one: Observation) -> None:
        self.histories.count([one])
        for detector in self.bank:
            found = detector.observe(one)
            if isinstance(one, Frame) and isinstance(detector, ExplainedDetector):
                self.reported += self.histories.add(detector, one, found)

    @property
    def explained(self) -> list[ExplainedDetector]:
        return [detector for detector in self.bank if isinstance(detector, ExplainedDetector)]

    def smallest(self, kind: Kind, fault: str) -> Detectable:
        found = [one for detector in self.explained if detector.kind is kind for one in detector.detectable()]
        return next(one for one in found if one.fault.startswith(fault))


def explained(fault: Fault | None, steps: int = 500, ranks: int = 8) -> Explained:
    job = Job(world_size=ranks, steps=steps, seed=1)
    return Explained(list(generate(job.inject(fault) if fault else job)))


@pytest.mark.parametrize(
    ("fault", "kind", "statistic", "steps"),
    [
        (Slow(3, 300, 1.04), Kind.STRAGGLER, Statistic.EVIDENCE, 400),
        (SlowJob(300, 1.06), Kind.SLOWDOWN, Statistic.EVIDENCE, 400),
        (LossSpike(300, 4.0), Kind.LOSS_SPIKE, Statistic.DISTANCE, 310),
        (LossLevel(700, 1.2), Kind.LOSS_SPIKE, Statistic.SUM, 720),
        (LossLevel(700, 1.2), Kind.LOSS_DIVERGENCE, Statistic.LASTED, 740),
        (LossClimb(900, 1.3, 400), Kind.LOSS_DIVERGENCE, Statistic.LEFT_LEVEL, 1400),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else str(value),
)
def test_a_statistic_is_below_its_threshold_until_the_finding_is_reported(fault, kind, statistic, steps) -> None:
    reported = next(one for one in explained(fault, steps).reported if one["kind"] == kind)
    assert reported["statistic"] == statistic
    points = reported["points"]
    assert points["step"] == sorted(set(points["step"]))
    assert points["step"][-1] == reported["detected_step"]
    assert points["value"][-1] >= points["threshold"][-1]
    below = zip(points["value"][:-1], points["threshold"][:-1], points["missing"][:-1], strict=True)
    assert all(value < threshold or missing for value, threshold, missing in below)
    assert reported["why"]
    assert reported["why_not_earlier"]


def test_every_row_is_judged_or_left_out_for_a_reason() -> None:
    reported = explained(Slow(3, 300, 1.04)).reported[0]
    assert sum(reported["rows"].values()) == reported["detected_step"] + 1
    assert reported["rows"]["first rows of an attempt"] == 2
    assert reported["rows"]["the usual value was not known yet"] == 8


def test_the_rank_of_a_job_of_one_is_compared_with_nobody() -> None:
    job = explained(None, 50, ranks=1)
    (straggler,) = (one for one in job.explained if one.kind is Kind.STRAGGLER)
    assert straggler.rows(job.histories.counts) == {"no other rank to compare with": 50}


def test_evaluations_late_rows_and_values_that_are_not_finite_are_left_out() -> None:
    job = explained(None, 200)
    usual, bad = [2.0] * 8, [math.nan] * 8
    attempt = job.histories.counts.attempt
    for one in (
        frame(200, {"loss": usual}, attempt=attempt, kind=StepKind.EVAL),
        replace(frame(201, {"loss": usual}, attempt=attempt), late=True),
        frame(202, {"loss": bad}, attempt=attempt),
    ):
        job.observe(one)
    straggler, spike = (
        next(one for one in job.explained if one.kind is kind) for kind in (Kind.STRAGGLER, Kind.LOSS_SPIKE)
    )
    assert straggler.rows(job.histories.counts)["evaluation or checkpoint"] == 1
    assert straggler.rows(job.histories.counts)["arrived after its step had closed"] == 1
    assert spike.rows(job.histories.counts)["not finite"] == 1
    assert spike.rows(job.histories.counts)["judged"] == 200 - 32


def test_the_smallest_fault_found_today_is_found_and_half_of_it_is_not() -> None:
    quiet = explained(None)
    sizes = dict(quiet.smallest(Kind.STRAGGLER, "a slow rank").sizes)
    assert sizes[6] > sizes[16] >= sizes[64] > 1.0
    excess = sizes[16] - 1
    found = explained(Slow(3, 300, 1 + 1.3 * excess)).reported
    assert [one["scope"] for one in found] == ["rank:3"]
    assert found[0]["detected_step"] - 300 <= 2 * 16
    assert explained(Slow(3, 300, 1 + 0.5 * excess), steps=316).reported == []


def test_what_was_needed_earlier_is_more_the_earlier_it_is() -> None:
    reported = explained(Slow(3, 300, 1.035), ranks=64).reported[0]
    needed = [one["needed"] for one in reported["earlier"] if one["needed"] is not None]
    assert len(needed) >= 2
    assert needed == sorted(needed, reverse=True)
    assert needed[0] > 1.035
    assert next(one for one in reported["earlier"] if one["rows"] == 3)["needed"] is None


def test_a_restored_job_explains_what_it_would_have_explained() -> None:
    observations = list(generate(Job(world_size=8, steps=500, seed=1).inject(Slow(3, 300, 1.04))))
    middle = next(n for n, one in enumerate(observations) if isinstance(one, Frame) and one.step == 308)
    assert Explained(observations, middle).reported == Explained(observations).reported != []


class Endless(ExplainedDetector):
    """Suspects ranks for ever."""

    kind = Kind.STRAGGLER
    name = "endless"

    def suspects(self, frame):
        ranks = range(3) if frame.step < 5_000 else range(3 * HISTORIES_MAX)
        return [Suspect(IncidentScope.of_rank(rank), Statistic.EVIDENCE, 9.0, 10.0, frame.step + 1) for rank in ranks]

    def _rows_of_steps(self, counts):
        raise NotImplementedError

    crossed = needed = detectable = _rows_of_steps


def test_trails_do_not_grow_with_steps_or_ranks() -> None:
    histories, detector = StatisticHistories(), Endless()
    for step in range(5_001):
        histories.add(detector, frame(step, {"loss": [2.0]}), [])
    kept = histories.snapshot()["_histories"]["endless"]
    assert len(kept) == HISTORIES_MAX
    for step in range(5_001, 5_001 + 2 * POINTS_MAX):
        histories.add(detector, frame(step, {"loss": [2.0]}), [])
    assert max(map(len, histories.snapshot()["_histories"]["endless"].values())) <= POINTS_MAX
