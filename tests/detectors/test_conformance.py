"""What every detector of the catalogue owes: the same rules, tried on all of them."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rankwatch_detectors.base import AttemptStart, Detector, Finding, Frame, Observation, Occurrence, Presence, Tick
from rankwatch_detectors.catalogue import detectors
from rankwatch_service.simulate.scenario import Job
from rankwatch_service.stream.packing import pack, unpack
from tests.support.verdicts import judge, opened

NAMES = [detector.name for detector in detectors()]


def troubled(world_size: int = 8) -> list[Observation]:
    """One of everything, in 260 steps: what a snapshot in the middle has to carry."""
    job = (
        Job(world_size=world_size, steps=260, seed=11, ranks_per_host=4)
        .slow(2, 60, 1.6, until_step=100)
        .gradient(3, 70, 2.0)
        .norm_spike(90, 40.0, 3)
        .loss_spike(110, 4.0, 2)
        .hang(1, 130, 30.0)
        .silence("host-1", 140, 160)
        .flip(5, 165)
        .nonfinite(4, 180)
        .restart(183, 170, relaunch=False)
        .slow_all(200, 1.4)
        .kill(6, 230)
        .restart(230, 200)
        .diverge(215, 0.05)
    )
    return list(job.observations())


@pytest.fixture(scope="module")
def observations() -> list[Observation]:
    return troubled()


def one(name: str) -> Detector:
    return next(detector for detector in detectors() if detector.name == name)


def told(findings: list[Finding]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(finding) for finding in findings]


def test_names_are_unique_and_versions_are_positive() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(detector.version >= 1 for detector in detectors())


def test_the_troubled_job_of_one_stage_makes_every_detector_speak_that_can(observations: list[Observation]) -> None:
    silent = [name for name in NAMES if not judge(observations, [one(name)])]
    assert silent == ["stage", "restart_loop"]


@pytest.mark.parametrize("name", NAMES)
def test_the_same_observations_give_the_same_findings(name: str, observations: list[Observation]) -> None:
    assert told(judge(observations, [one(name)])) == told(judge(observations, [one(name)]))


@pytest.mark.parametrize("name", NAMES)
def test_findings_are_plain_and_complete(name: str, observations: list[Observation]) -> None:
    for finding in judge(observations, [one(name)]):
        json.dumps(finding.evidence, allow_nan=False)
        assert finding.summary
        assert finding.summary.endswith(".")
        assert 0.0 <= finding.confidence <= 1.0
        assert not math.isnan(finding.score)
        assert all(type(rank) is int for rank in finding.ranks)


@pytest.mark.parametrize("name", NAMES)
def test_episodes_open_before_they_change_and_close_once(name: str, observations: list[Observation]) -> None:
    open_scopes: set[tuple[str, str]] = set()
    for finding in judge(observations, [one(name)]):
        scope = (finding.kind.value, finding.scope)
        assert (scope in open_scopes) == (finding.change.value != "open")
        open_scopes = open_scopes - {scope} if finding.change.value == "close" else open_scopes | {scope}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0.0, 1.0))
def test_a_restored_detector_goes_on_as_if_nothing_had_happened(
    name: str, share: float, observations: list[Observation]
) -> None:
    split = int(share * len(observations))
    whole, first = one(name), one(name)
    expected = [told(list(whole.observe(observation))) for observation in observations]
    for observation in observations[:split]:
        first.observe(observation)
    saved = unpack(pack(first.snapshot()))
    second = one(name)
    second.restore(saved)
    for observation in observations[split:]:
        first.observe(observation)  # must not reach into the snapshot
    assert [told(list(second.observe(observation))) for observation in observations[split:]] == expected[split:]


@pytest.mark.parametrize("name", NAMES)
def test_a_snapshot_holds_nothing_but_plain_types_and_arrays(name: str, observations: list[Observation]) -> None:
    detector = one(name)
    judge(observations[: len(observations) // 2], [detector])

    def check(value: Any) -> None:
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                check(item)
        elif isinstance(value, list):
            for item in value:
                check(item)
        else:
            assert value is None or type(value) in (bool, int, float, str, bytes, np.ndarray), type(value)

    check(detector.snapshot())


@pytest.mark.parametrize("name", NAMES)
def test_observations_are_never_written_to(name: str) -> None:
    observations = [frozen(observation) for observation in troubled()]
    before = pickle.dumps(observations)
    judge(observations, [one(name)])
    for observation in observations:
        if isinstance(observation, Frame):
            observation.computed.clear()  # what follows from the values may be kept there
    assert pickle.dumps(observations) == before


def frozen(observation: Observation) -> Observation:
    """Make the arrays refuse writes, so that an attempt fails at its place."""
    groups: list[dict[str, Any]] = []
    if isinstance(observation, Frame):
        groups = [dict(observation.values), dict(observation.present), dict(observation.exact)]
    if isinstance(observation, Tick) and observation.presence is not None:
        presence = observation.presence
        groups = [{f.name: getattr(presence, f.name) for f in dataclasses.fields(presence)}]
    for group in groups:
        for value in group.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
    return observation


@pytest.mark.parametrize("name", NAMES)
def test_permuted_ranks_give_permuted_findings(name: str, observations: list[Observation]) -> None:
    order = np.random.default_rng(5).permutation(8)
    new_number = {int(old): new for new, old in enumerate(order)}
    plain = opened(judge(observations, [one(name)]))
    moved = opened(judge([permuted(observation, order) for observation in observations], [one(name)]))
    expected = sorted((f.detected_step or -1, sorted(new_number[rank] for rank in f.ranks)) for f in plain)
    assert sorted((f.detected_step or -1, sorted(f.ranks)) for f in moved) == expected


def permuted(observation: Observation, order: np.ndarray[Any, Any]) -> Observation:
    """The same job with its ranks numbered otherwise: new rank i is old rank order[i]."""
    if isinstance(observation, Frame):
        return dataclasses.replace(
            observation,
            values={name: array[order] for name, array in observation.values.items()},
            present={name: array[order] for name, array in observation.present.items()},
            exact={name: array[order] for name, array in observation.exact.items()},
        )
    if isinstance(observation, AttemptStart):
        return dataclasses.replace(observation, topology=reordered(observation.topology, order))
    if isinstance(observation, Tick):
        presence = observation.presence
        return dataclasses.replace(observation, presence=presence and reordered(presence, order))
    new_number = {int(old): new for new, old in enumerate(order)}
    rank = None if observation.rank is None else new_number[observation.rank]
    return dataclasses.replace(observation, rank=rank)


def reordered(record: Any, order: np.ndarray[Any, Any]) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = value[order]
        elif isinstance(value, tuple) and len(value) == len(order) and field.name != "parameters":
            changes[field.name] = tuple(value[index] for index in order)
    return dataclasses.replace(record, **changes)


AWKWARD = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, -1e308, 0.0]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_awkward_numbers_break_nothing_and_silence_nothing(name: str, data: st.DataObject) -> None:
    """One awkward value early on; the fault that comes later is found all the same."""
    awkward = data.draw(st.sampled_from(AWKWARD))
    step = data.draw(st.integers(0, 40))
    rank = data.draw(st.integers(0, 7))
    observations = calm_then_trouble()
    metric = data.draw(st.sampled_from(sorted(next(o for o in observations if isinstance(o, Frame)).values)))
    tampered = [with_value(o, metric, step, rank, awkward) for o in observations]
    late = [f for f in opened(judge(tampered, [one(name)])) if (f.detected_step or 0) >= 120]
    expected = [f for f in opened(judge(observations, [one(name)])) if (f.detected_step or 0) >= 120]
    assert {(f.kind, f.scope) for f in late} >= {(f.kind, f.scope) for f in expected}


def calm_then_trouble() -> list[Observation]:
    job = Job(world_size=8, steps=180, seed=3).slow(2, 120, 1.6).gradient(3, 120, 3.0).flip(5, 125)
    return list(
        job.loss_spike(130, 4.0, 2).norm_spike(140, 40.0, 2).slow_all(150, 2.0).hang(1, 160, 20.0).observations()
    )


def with_value(observation: Observation, metric: str, step: int, rank: int, value: float) -> Observation:
    if not isinstance(observation, Frame) or observation.step != step:
        return observation
    values = dict(observation.values)
    values[metric] = values[metric].copy()
    values[metric][rank] = value
    return dataclasses.replace(observation, values=values)


@pytest.mark.parametrize("name", NAMES)
def test_scaling_all_times_changes_no_verdict(name: str) -> None:
    """Twice as long steps are no slower: only ratios between ranks, and to the past, count."""
    timed = ("busy_s", "step_time_s", "wait_s", "phase.data_wait", "phase.forward", "phase.backward")
    observations = list(Job(world_size=8, steps=150, seed=4).slow(3, 90, 1.5).observations())

    def scaled(observation: Observation) -> Observation:
        if not isinstance(observation, Frame):
            return observation
        values = {key: array * 2.0 if key in timed else array for key, array in observation.values.items()}
        return dataclasses.replace(observation, values=values)

    plain = opened(judge(observations, [one(name)]))
    other = opened(judge([scaled(o) for o in observations], [one(name)]))
    assert [(f.scope, f.onset_step) for f in other] == [(f.scope, f.onset_step) for f in plain]


@pytest.mark.parametrize("name", NAMES)
def test_memory_is_constant_in_steps(name: str) -> None:
    sizes = []
    detector = one(name)
    for number, observation in enumerate(Job(world_size=8, steps=1400, seed=6, step_s=0.5).observations()):
        detector.observe(observation)
        if number in (900, 1900):
            sizes.append(len(pickle.dumps(detector.snapshot())))
    assert sizes[1] <= sizes[0] * 1.02 + 64


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoil", ["foreign attempt", "wrong size", "nothing present", "no metrics"])
def test_strange_but_legal_observations_are_survived(name: str, spoil: str) -> None:
    detector = one(name)
    for observation in Job(world_size=4, steps=30, seed=8).observations():
        detector.observe(observation)
        if isinstance(observation, Frame):
            assert detector.observe(spoiled(observation, spoil)) in ((), [])


def spoiled(frame: Frame, how: str) -> Frame:
    later = dataclasses.replace(frame, step=frame.step + 1)
    if how == "foreign attempt":
        return dataclasses.replace(later, attempt="other.0")
    if how == "no metrics":
        return dataclasses.replace(frame, values={}, present={}, exact={})
    if how == "nothing present":
        present = {name: np.zeros_like(here) for name, here in frame.present.items()}
        return dataclasses.replace(frame, present=present)
    values = {name: array[:2] for name, array in frame.values.items()}
    present = {name: array[:2] for name, array in frame.present.items()}
    exact = {name: array[:2] for name, array in frame.exact.items()}
    return dataclasses.replace(later, values=values, present=present, exact=exact)


@pytest.mark.parametrize("name", NAMES)
def test_a_detector_without_an_attempt_says_nothing(name: str) -> None:
    observations = [o for o in Job(world_size=4, steps=20).observations() if not isinstance(o, AttemptStart)]
    assert judge(observations, [one(name)]) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_the_smallest_jobs_are_judged_without_error(name: str, world_size: int) -> None:
    job = Job(world_size=world_size, steps=120, seed=2, accelerated=False).slow(0, 60, 3.0).hang(0, 100, 20)
    judge(job.observations(), [one(name)])


def test_an_occurrence_of_an_unknown_kind_or_rank_is_ignored() -> None:
    bank = detectors()
    observations = list(Job(world_size=4, steps=5, ends=False).observations())
    attempt = next(o for o in observations if isinstance(o, AttemptStart)).attempt
    strange = [
        Occurrence("no such thing", attempt, "host-0", 1.0, None, None, {}),
        Occurrence("process_exit", attempt, "host-0", 1.0, 99, None, {}),
        Occurrence("gap", attempt, "host-9", 1.0, None, None, {}),
        Occurrence("order", attempt, "", 1.0, None, None, {}),
    ]
    assert judge([*observations, *strange], bank) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_step_told_twice_changes_nothing(name: str) -> None:
    """The stream closes a frame once; a repeated step of the same attempt must still not open anything."""
    observations = list(Job(world_size=8, steps=120, seed=9).observations())
    doubled = [
        o for observation in observations for o in ([observation] * (2 if isinstance(observation, Frame) else 1))
    ]
    assert opened(judge(doubled, [one(name)])) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [4, 12])
def test_an_attempt_that_turns_out_to_have_other_ranks_is_begun_anew(name: str, ranks: int) -> None:
    detector = one(name)
    before = list(Job(world_size=8, steps=120, seed=1, ends=False).slow(7, 60, 2.0).flip(7, 60).observations())
    after = list(Job(world_size=ranks, steps=120, seed=1, ends=False).observations())
    judge(before, [detector])
    findings = judge(after, [detector])
    assert all(finding.change.value == "close" for finding in findings)


def test_presence_of_another_attempt_is_not_judged() -> None:
    observations = list(Job(world_size=4, steps=30, ends=False).observations())
    last = [o for o in observations if isinstance(o, Tick)][-1]
    presence = last.presence
    assert isinstance(presence, Presence)
    other = dataclasses.replace(presence, attempt="older.0", step_age_s=presence.step_age_s + 1e6)
    assert judge([*observations, Tick(last.now_s + 1, other)]) == []
