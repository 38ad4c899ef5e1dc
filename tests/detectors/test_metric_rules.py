"""Rules on metrics: what each condition finds, when it is over, and what a person's acceptance does."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable

import numpy as np
import pytest

from rankwatch_detectors.base import (
    AttemptStart,
    Finding,
    Frame,
    Kind,
    Observation,
    Occurrence,
    Severity,
    StepKind,
    Tick,
)
from rankwatch_detectors.catalogue import detectors
from rankwatch_detectors.metric_detector import MetricDetector
from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, Condition, Direction, MetricRule
from tests.detectors.test_conformance import answers, troubled
from tests.support.detection.verdicts import closed, opened, restored_all_along
from tests.support.values.presences import ATTEMPT, frame, topology


class Watched:
    """A job of some ranks with rules, one step a second."""

    def __init__(self, *rules: MetricRule, ranks: int = 4) -> None:
        self.detector = MetricDetector()
        self.ranks, self.step = ranks, 0
        self.found: list[Finding] = []
        self.rule(*rules)

    def rule(self, *rules: MetricRule, attempt: str = ATTEMPT) -> list[Finding]:
        start = AttemptStart(attempt, topology(self.ranks), float(self.step), rules)
        return self._keep(self.detector.observe(start))

    def follow(self, name: str, values: Iterable[float]) -> None:
        for value in values:
            self.log(name, value)

    def log(self, name: str, *values: float, steps: int = 1) -> list[Finding]:
        """One value for all ranks, or one for each."""
        found = []
        for _ in range(steps):
            column = list(values) if len(values) == self.ranks else [values[0]] * self.ranks
            found += self.detector.observe(frame(self.step, {name: column}))
            self.step += 1
        return self._keep(found)

    def accept(self, *scopes: str) -> list[Finding]:
        reported = {"kinds": ["metric"], "scopes": list(scopes)}
        return self._keep(self.detector.observe(Occurrence("accepted", ATTEMPT, "", self.step, None, None, reported)))

    def _keep(self, found) -> list[Finding]:
        self.found += found
        return list(found)


def above(value: float, **more) -> MetricRule:
    return MetricRule("high", "memory", Condition.ABOVE, value, **more)


def test_a_value_beyond_its_threshold_for_the_hold_time_opens_and_ends_after_as_long_within_it() -> None:
    job = Watched(above(10.0, hold_s=3.0, severity="critical"))
    job.log("memory", 9.0, steps=5)
    assert job.log("memory", 11.0, steps=3) == []
    (found,) = job.log("memory", 12.0)
    assert (found.kind, found.severity, str(found.scope)) == (Kind.METRIC, Severity.CRITICAL, "rule:high")
    assert (found.onset_step, found.detected_step, found.ranks) == (5, 8, ())
    reported = {"rule": "high", "metric": "memory", "when": "above", "value": 12.0, "threshold": 10.0}
    assert found.evidence == {**reported, "since_step": 5, "hold_s": 3.0}
    assert found.summary == "Rule high: memory is 12, above 10, since step 5."
    assert job.log("memory", 9.0, steps=2) == []
    assert job.log("memory", 11.0) == []  # not back for long enough
    assert job.log("memory", 9.0, steps=3) == []
    assert closed(job.log("memory", 9.0)) == job.found[-1:]


def test_a_short_excess_and_a_value_on_the_threshold_are_nothing() -> None:
    job = Watched(above(10.0, hold_s=3.0))
    for _ in range(20):
        job.log("memory", 11.0, steps=3)
        job.log("memory", 10.0)
    job.log("memory", 1.0, 1.0, 1.0, 99.0, steps=9)  # the median over ranks is judged, unless each rank is
    assert job.found == []


def test_a_value_below_its_threshold_opens_without_a_hold_time_at_once() -> None:
    job = Watched(MetricRule("accuracy", "val/accuracy", Condition.BELOW, 0.5))
    assert opened(job.log("val/accuracy", 0.4))
    assert closed(job.log("val/accuracy", 0.6))


def test_each_rank_by_itself_names_the_ranks_that_are_beyond_and_adds_those_that_follow() -> None:
    job = Watched(above(10.0, each_rank=True))
    (found,) = job.log("memory", 1.0, 11.0, 1.0, 1.0)
    assert found.ranks == (1,)
    (more,) = job.log("memory", 1.0, 11.0, 1.0, 12.0)
    assert (more.ranks, more.evidence["ranks_beyond"]) == ((1, 3), 2)
    assert job.log("memory", 1.0, 1.0, 1.0, 12.0) == []
    assert closed(job.log("memory", 1.0))


@pytest.mark.parametrize("logged", [3, 0])
def test_a_metric_that_is_logged_no_more_or_never_is_absent_and_its_first_value_ends_that(logged: int) -> None:
    job = Watched(MetricRule("gone", "reward", Condition.ABSENT, hold_s=5.0))
    job.log("reward", 1.0, steps=logged)
    assert job.log("loss", 1.0, steps=5) == []
    (found,) = job.log("loss", 1.0)
    assert found.evidence["absent_s"] == 5.0
    assert closed(job.log("reward", 1.0))


def test_nan_is_present_and_beyond_no_threshold_and_does_not_silence_a_rule() -> None:
    rules = [
        MetricRule("gone", "reward", Condition.ABSENT, hold_s=5.0),
        MetricRule("low", "reward", Condition.BELOW, 0.0),
        MetricRule("moved", "reward", Condition.CHANGE),
    ]
    job, random = Watched(*rules), np.random.default_rng(1)
    for value in random.normal(5.0, 0.1, 200):
        job.log("reward", value)
        for corrupted in (math.nan, math.inf, -math.inf):
            job.log("reward", corrupted)
    assert job.found == []
    job.follow("reward", random.normal(-5.0, 0.1, 40))
    assert [str(found.scope) for found in opened(job.found)] == ["rule:low", "rule:moved"]


@pytest.mark.parametrize(("ratio", "value"), [(2.0, 3.0), (0.5, 0.2)])
def test_a_rank_beyond_a_ratio_to_its_peers_is_named(ratio: float, value: float) -> None:
    job = Watched(MetricRule("uneven", "tokens/s", Condition.PEERS, ratio))
    assert job.log("tokens/s", 1.0, steps=5) == []
    (found,) = job.log("tokens/s", 1.0, 1.0, value, 1.0)
    assert found.ranks == (2,)
    assert found.evidence["ratio"] == pytest.approx(value)
    assert closed(job.log("tokens/s", 1.0))


@pytest.mark.parametrize("values", [(0.0, 0.0, 5.0, 0.0), (-1.0, -1.0, 5.0, -1.0), (1.0, 9.0)])
def test_without_a_median_above_zero_there_are_no_ratios_and_two_ranks_have_no_peers(values: tuple[float, ...]) -> None:
    job = Watched(MetricRule("uneven", "tokens/s", Condition.PEERS, 2.0), ranks=len(values))
    assert job.log("tokens/s", *values, steps=9) == []


def noise(level: float, count: int, seed: int, correlation: float = 0.0) -> list[float]:
    random, values, at = np.random.default_rng(seed), [], 0.0
    for fresh in random.normal(0.0, math.sqrt(1 - correlation**2), count):
        at = correlation * at + fresh
        values.append(level + at)
    return values


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.8])
def test_a_lasting_change_opens_and_ends_after_the_hold_time_at_the_old_level(correlation: float) -> None:
    job = Watched(MetricRule("moved", "kl", Condition.CHANGE, hold_s=5.0))
    job.follow("kl", noise(10.0, 400, 3, correlation))
    assert job.found == []
    job.follow("kl", noise(16.0, 200, 4, correlation))
    (found,) = job.found
    assert 400 < found.detected_step < 480
    assert found.evidence["level"] == pytest.approx(10.0, abs=1.5)
    job.follow("kl", noise(10.0, 60, 5, correlation))
    assert len(closed(job.found)) == 1


def test_a_single_value_far_off_is_no_change() -> None:
    job = Watched(MetricRule("moved", "kl", Condition.CHANGE))
    for number, value in enumerate(noise(10.0, 1_000, 6)):
        job.log("kl", 1e6 if number % 200 == 199 else value)
    assert job.found == []


def test_a_change_that_is_accepted_is_the_new_level() -> None:
    job = Watched(MetricRule("moved", "kl", Condition.CHANGE), MetricRule("other", "kl", Condition.ABOVE, 15.0))
    job.follow("kl", [*noise(10.0, 200, 3), *noise(16.0, 100, 4)])
    assert job.accept("rule:moved") == job.found[-1:] == closed(job.found)[-1:]
    before = len(job.found)
    job.follow("kl", noise(16.0, 300, 5))
    assert [found for found in job.found[before:] if str(found.scope) == "rule:moved"] == []
    job.follow("kl", noise(10.0, 100, 6))
    assert str(opened(job.found)[-1].scope) == "rule:moved"


def test_a_threshold_that_is_accepted_is_reported_again_only_after_it_was_over() -> None:
    job = Watched(above(10.0))
    job.log("memory", 11.0)
    assert closed(job.accept("rule:high"))
    assert job.log("memory", 11.0, steps=50) == []
    job.log("memory", 9.0)
    assert opened(job.log("memory", 11.0))


def test_a_change_in_the_direction_that_is_not_watched_sets_a_new_level() -> None:
    job = Watched(MetricRule("fell", "reward", Condition.CHANGE, direction=Direction.DOWN))
    for level in (10.0, 20.0, 30.0):
        job.follow("reward", noise(level, 300, int(level)))
    assert job.found == []
    job.follow("reward", noise(20.0, 100, 7))
    (found,) = job.found
    assert found.evidence["level"] == pytest.approx(30.0, abs=1.0)


def test_a_changed_rule_begins_anew_and_the_others_go_on() -> None:
    kept = MetricRule("gone", "reward", Condition.ABSENT, hold_s=5.0)
    job = Watched(above(10.0), kept)
    job.log("memory", 11.0, steps=3)
    (found,) = closed(job.rule(above(20.0), kept))
    assert found.summary == "The rule high was changed or deleted."
    assert [str(one.scope) for one in opened(job.log("memory", 11.0, steps=4))] == ["rule:gone"]


def test_an_attempt_that_ends_ends_what_was_found_and_keeps_the_level_within_a_launch() -> None:
    rule = MetricRule("moved", "kl", Condition.CHANGE)
    job = Watched(rule)
    job.follow("kl", noise(10.0, 100, 3))
    job.rule(rule, attempt="run.1")
    for value in noise(16.0, 60, 4):
        column = np.full(4, value)
        job.step += 1
        one = Frame("run.1", "steps", job.step, StepKind.TRAIN, float(job.step), {"kl": column}, {"kl": column > 0})
        job.found += job.detector.observe(one)
    assert len(opened(job.found)) == 1
    assert closed(job.rule(rule, attempt="run.2"))


def test_no_more_rules_are_judged_in_a_job_than_the_limit() -> None:
    job = Watched(*[MetricRule(f"r{n}", "memory", Condition.ABOVE, 1.0) for n in range(RULES_PER_JOB_MAX + 5)])
    assert len(opened(job.log("memory", 2.0))) == RULES_PER_JOB_MAX


RULES = (
    above(10.0, each_rank=True, hold_s=2.0),
    MetricRule("gone", "reward", Condition.ABSENT, hold_s=5.0),
    MetricRule("uneven", "memory", Condition.PEERS, 3.0),
    MetricRule("moved", "memory", Condition.CHANGE, hold_s=1.0),
)


def test_a_detector_restored_at_any_step_goes_on_as_if_nothing_had_happened() -> None:
    random = np.random.default_rng(8)
    frames = []
    for step in range(1_200):
        values = random.normal(5.0 if step < 700 else 12.0, 0.5, 4)
        values[0] += 30.0 * (300 <= step < 320)
        if 900 <= step < 950:
            values[:] = math.nan
        frames.append(frame(step, {"memory": values, **({} if 400 <= step < 420 else {"reward": values})}))
    observations = [AttemptStart(ATTEMPT, topology(4), 0.0, RULES), *frames]
    assert len(restored_all_along(MetricDetector, observations, 37)) >= 8


def test_a_rule_survives_its_plain_form() -> None:
    assert [MetricRule.of(json.loads(json.dumps(rule.fields()))) for rule in RULES] == list(RULES)


def test_rules_that_change_in_the_middle_change_nothing_that_other_detectors_find() -> None:
    plain = troubled()
    start, changed = plain[0], list[Observation]()
    for number, observation in enumerate(plain):
        start = observation if isinstance(observation, AttemptStart) else start
        changed.append(observation)
        if number % 25 == 24:
            now_s = observation.now_s if isinstance(observation, Tick) else observation.time_s
            changed.append(dataclasses.replace(start, time_s=now_s, rules=RULES))
    others = [one.name for one in detectors() if one.name != "metric"]
    wanted, found = (
        [finding for answer in answers(detectors(), some) for name in others for finding in answer[name]]
        for some in (plain, changed)
    )
    assert found == wanted
