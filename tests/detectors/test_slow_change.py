"""What changes too slowly for a level to be left is told all the same, unless it was wanted or is usual."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

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
from rankwatch_detectors.pace.slowdown import SlowdownConfig, SlowdownDetector
from rankwatch_service.simulate.faults import BatchRamp, Drift, SlowJob
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from rankwatch_service.simulate.noise import Noise
from tests.support.detection.verdicts import judge, opened
from tests.support.values.presences import ATTEMPT, frame, topology

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
    return judge(observations, [one for one in detectors() if one.name.startswith("loss")])


def climbing(seed: int, then: int = 0) -> Floats:
    """3.05, and from step 1,000 on up to 6.84 over 1,300 steps, with noise of 0.046."""
    level = np.concatenate([np.full(CLIMB_AT, 3.05), np.linspace(3.05, 6.84, 1300), np.full(then, 6.84)])
    return level + NOISE * np.random.default_rng(seed).standard_normal(level.size)


def flat(steps: int, seed: int = 0, level: float = 3.05) -> Floats:
    return level + NOISE * np.random.default_rng(seed).standard_normal(steps)


def told(kind: str, **fields: object) -> Occurrence:
    return Occurrence(kind, ATTEMPT, "", 0.0, None, None, fields)


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_that_doubles_over_a_thousand_steps_is_one_divergence_told_early_and_again_when_it_matters(
    seed: int,
) -> None:
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


@pytest.mark.parametrize("seed", range(3))
def test_a_loss_that_keeps_its_level_or_falls_is_no_climb(seed: int) -> None:
    steps = np.arange(6000)
    falling = 2.2 + 8.8 * np.exp(-steps / 300) + NOISE * np.random.default_rng(seed).standard_t(5, steps.size)
    assert run({"loss": falling}) == []


def test_what_is_declared_is_the_level_from_then_on() -> None:
    losses = np.concatenate([flat(1000), flat(1500, 1, 3.6)])
    found = run({"loss": losses}, [(1000, told("declared", what="curriculum"))])
    assert opened(found) == []


def test_a_declaration_ends_what_is_open() -> None:
    found = run({"loss": climbing(1, then=1500)}, [(2300, told("declared", what="data mix"))])
    assert found[-1].change is Change.CLOSE
    assert "data mix" in found[-1].summary
    assert len(opened(found)) == 1


def test_a_new_level_stays_open_for_information_until_a_person_accepts_it() -> None:
    losses = np.concatenate([flat(1000), flat(3000, 1, 3.4)])
    standing = run({"loss": losses})
    (opening,) = opened(standing, Kind.LOSS_DIVERGENCE)
    assert opening.severity is Severity.INFO
    assert [f for f in standing if f.kind is Kind.LOSS_DIVERGENCE][-1].change is Change.UPDATE
    accepted = run({"loss": losses}, [(2000, told("accepted", kinds=["loss_divergence"]))])
    assert accepted[-1].change is Change.CLOSE
    assert "accepted" in accepted[-1].summary
    assert len(opened(accepted, Kind.LOSS_DIVERGENCE)) == 1


def test_what_a_person_accepts_of_another_kind_changes_nothing() -> None:
    found = run({"loss": climbing(1)}, [(2000, told("accepted", kinds=["straggler"]))])
    assert Change.CLOSE not in [finding.change for finding in found]


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


def test_where_networks_train_against_each_other_a_climb_is_no_news() -> None:
    assert run({"loss": climbing(1)}, optimizers=2) == []


def test_where_ranks_go_at_their_own_paces_a_climb_is_no_news() -> None:
    assert run({"loss": climbing(1)}, lockstep=False) == []


@pytest.mark.parametrize("seed", range(5))
def test_a_loss_around_zero_that_wanders_wakes_nobody(seed: int) -> None:
    """Policy gradients: the loss has no level worth the name, and what it does says little."""
    random, steps = np.random.default_rng(seed), 6000
    wander = np.zeros(steps)
    for step in range(1, steps):
        wander[step] = 0.995 * wander[step - 1] + 0.02 * random.standard_normal()
    found = run({"loss": wander + 0.5 * random.standard_normal(steps)})
    assert {finding.severity for finding in found} <= {Severity.INFO}


def slow(job: Job, said: Iterable[tuple[int, Occurrence]] = ()) -> list[Finding]:
    """What the slowdown detector says; `said` comes before the frame of the step it stands at."""
    events, findings, detector = dict(said), [], SlowdownDetector(SlowdownConfig())
    for observation in generate(job):
        if isinstance(observation, Frame) and observation.step in events:
            findings += detector.observe(events[observation.step])
        findings += detector.observe(observation)
    return findings


@pytest.mark.parametrize("seed", range(3))
def test_a_job_that_becomes_a_quarter_slower_over_half_an_hour_is_told_early_by_how_much(seed: int) -> None:
    found = slow(Job(8, 2300, seed, ends=False).inject(Drift(600, 1.25, 1800)))
    (first,) = opened(found)
    assert (first.onset_step or 0) in range(600 - 64, 600 + 321)
    assert (first.detected_step or 0) <= 600 + 600
    # Four fifths of a step are work; the level is the middle of its newest 128 rows.
    then = 1 + 0.8 * 0.25 * ((first.detected_step or 0) - 600 - 64) / 1800
    assert first.evidence["ratio"] == pytest.approx(then, abs=0.02)
    assert found[-1].evidence["ratio"] == pytest.approx(1.17, abs=0.03)
    assert len(found) <= 3


def wandering(seed: int, steps: int) -> Job:
    """A job that was 8 % slower twice, for 100 steps."""
    slow_twice = (SlowJob(at, 1.08, until_step=at + 100) for at in (600, 800))
    return Job(8, steps, seed, ends=False).inject(*slow_twice)


@pytest.mark.parametrize("seed", range(2))
def test_a_small_drift_of_a_pace_that_wanders_is_for_information_until_it_has_lasted_a_quarter_of_an_hour(
    seed: int,
) -> None:
    drift = Drift(1100, 1.1, 500)
    first, second = slow(wandering(seed, 2400).inject(drift))[4:]
    assert (first.change, first.severity) == (Change.OPEN, Severity.INFO)
    assert (second.change, second.severity) == (Change.UPDATE, Severity.WARNING)
    assert 900.0 <= second.detected_time_s - second.onset_time_s <= 930.0
    (steady,) = slow(Job(8, 2400, seed, ends=False).inject(drift))
    assert steady.severity is Severity.WARNING


@pytest.mark.parametrize("ratio", [1.1, 1.15])
def test_a_drift_that_came_and_went_belongs_to_the_pattern_of_a_pace_that_wanders(ratio: float) -> None:
    found = slow(wandering(0, 2000).inject(Drift(1100, ratio, 400), Drift(1600, 1 / ratio, 200)))
    assert {finding.severity for finding in found} == {Severity.INFO}
    *_, drift, pattern = opened(found)
    assert "best_s" in drift.evidence
    assert (pattern.evidence["standing"], pattern.evidence["times"]) == (True, 3)


def test_a_drift_that_is_declared_ends_and_one_that_is_accepted_is_the_level() -> None:
    job = Job(8, 2000, 1, ends=False).inject(Drift(600, 1.15, 600))
    declared = Occurrence("declared", "launch0.0", "", 0.0, None, None, {"what": "longer texts"})
    accepted = Occurrence("accepted", "launch0.0", "", 0.0, None, None, {"kinds": ["slowdown"]})
    for event in (declared, accepted):
        found = slow(job, [(1400, event)])
        assert [finding.change for finding in found if finding.change is not Change.UPDATE] == [
            Change.OPEN,
            Change.CLOSE,
        ]


@pytest.mark.parametrize("seed", range(2))
def test_a_job_that_keeps_its_pace_or_becomes_faster_has_no_drift(seed: int) -> None:
    assert slow(Job(8, 2500, seed, ends=False).inject(Drift(600, 0.8, 1000))) == []


def test_batches_that_grow_little_by_little_are_no_drift() -> None:
    job = Job(8, 2000, 2, ends=False)
    for number in range(20):
        job = job.inject(BatchRamp(700 + 30 * number, 1.03))
    assert slow(job) == []


def test_steps_that_become_longer_from_the_first_one_on_have_left_no_level() -> None:
    """Attention windows that grow over a whole run: the job's own way."""
    assert slow(Job(8, 2000, 3, ends=False, noise=Noise(busy=0.01)).inject(Drift(0, 1.18, 2000))) == []
