"""What every detector of the catalogue owes, tried on all of them at once: on jobs that are drawn, and at borders."""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import pickle
import tracemalloc
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from rankwatch_detectors.base import AttemptStart, Detector, Finding, Frame, Observation, Occurrence, Presence, Tick
from rankwatch_detectors.catalogue import CatalogueConfig, detectors
from rankwatch_service.simulate.faults import (
    BitFlip,
    DeviceXid,
    Hang,
    HostSilence,
    Kill,
    LocalGradient,
    LossDivergence,
    LossSpike,
    MissingRows,
    NonFinite,
    NormSpike,
    OrderedPause,
    RecurringStall,
    Restart,
    ScalerSkip,
    Slow,
    SlowJob,
    Throttle,
)
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job, Noise, RankPlacement
from rankwatch_service.stream.saved import pack, unpack
from tests.support.detection.verdicts import evaluate, opened
from tests.support.trials.selection import trials

Order = NDArray[np.int64]
TIMED_PREFIX = "phase."
"""Metrics of this name, and those whose names end in _s, are durations."""


def frozen(record: Any) -> Any:
    """The same observation; its arrays refuse writes, so that an attempt fails at its place."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            frozen(value)
        for array in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(array, np.ndarray):
                array.flags.writeable = False
    return record


def permuted(observation: Observation, order: Order) -> Observation:
    """The same job with its ranks numbered otherwise: new rank i is old rank order[i]."""
    if isinstance(observation, Frame):
        return _with_columns(observation, lambda array: array[order])
    if isinstance(observation, AttemptStart):
        return dataclasses.replace(observation, topology=_reordered(observation.topology, order))
    if isinstance(observation, Tick):
        presence = observation.presence
        return dataclasses.replace(observation, presence=presence and _reordered(presence, order))
    if observation.rank is None:
        return observation
    return dataclasses.replace(observation, rank=int(np.flatnonzero(order == observation.rank)[0]))


def scaled(observation: Observation, factor: float) -> Observation:
    """The same job on a slower clock: every duration, measured or passed, is so many times as long."""
    changes: dict[str, Any] = {
        field.name: getattr(observation, field.name) * factor
        for field in dataclasses.fields(observation)
        if field.name.endswith("_s")
    }
    if isinstance(observation, Frame):
        changes["values"] = {
            name: values * factor if name.endswith("_s") or name.startswith(TIMED_PREFIX) else values
            for name, values in observation.values.items()
        }
    if isinstance(observation, Tick) and observation.presence is not None:
        presence = observation.presence
        times = {
            f.name: getattr(presence, f.name) * factor for f in dataclasses.fields(presence) if f.name[-2:] == "_s"
        }
        changes["presence"] = dataclasses.replace(presence, **times)
    return dataclasses.replace(observation, **changes)


def scaled_config(factor: float, config: Any = None) -> Any:
    """Settings with all their seconds so many times as long, and as many false incidents for each row as before."""
    config = CatalogueConfig() if config is None else config
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = scaled_config(factor, value)
        elif field.name.endswith("_s"):
            changes[field.name] = value * factor
        elif field.name == "budget":
            changes[field.name] = value / factor
        elif field.name == "long_phases":
            changes[field.name] = tuple((name, seconds * factor) for name, seconds in value)
    return dataclasses.replace(config, **changes)


Spoiling = tuple[str, range, list[int], float]
"""A field of frames or progress blocks, and in which steps it holds what, on which ranks."""


def corrupted(observation: Observation, spoiling: Spoiling) -> Observation:
    field, steps, ranks, value = spoiling

    def written(column: NDArray[np.float64]) -> NDArray[np.float64]:
        column = column.copy()
        column[ranks] = value
        return column

    if isinstance(observation, Frame) and field in observation.values and observation.step in steps:
        values = {**observation.values, field: written(observation.values[field])}
        return dataclasses.replace(observation, values=values)
    presence = observation.presence if isinstance(observation, Tick) else None
    if presence is not None and hasattr(presence, field) and int(presence.step.max()) in steps:
        column = written(getattr(presence, field))
        return dataclasses.replace(observation, presence=dataclasses.replace(presence, **{field: column}))
    return observation


def thinned(observation: Observation, random: np.random.Generator, silent: tuple[int, ...]) -> Observation:
    """A frame of which some metrics are missing, on some ranks or on all, and on the silent ranks everything."""
    if not isinstance(observation, Frame):
        return observation
    present = {}
    for name in (*observation.values, *observation.exact):
        if random.random() > 0.15:
            present[name] = observation.present[name] & (random.random(observation.present[name].size) > 0.05)
            present[name][list(silent)] = False
    return dataclasses.replace(
        observation,
        values={name: array for name, array in observation.values.items() if name in present},
        exact={name: array for name, array in observation.exact.items() if name in present},
        present=present,
    )


def _with_columns(frame: Frame, change: Any) -> Frame:
    return dataclasses.replace(
        frame,
        values={name: change(array) for name, array in frame.values.items()},
        present={name: change(array) for name, array in frame.present.items()},
        exact={name: change(array) for name, array in frame.exact.items()},
    )


def _reordered(record: Any, order: Order) -> Any:
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if isinstance(value, np.ndarray):
            changes[field.name] = value[order]
        elif field.name == "slices":
            changes[field.name] = tuple(array[order] for array in value)
        elif isinstance(value, tuple) and value and field.name != "parameters":
            changes[field.name] = tuple(value[index] for index in order)
    return dataclasses.replace(record, **changes)


NAMES = [detector.name for detector in detectors()]
STEPS = 150
DRAWN = (Phase.explicit, Phase.generate)
"""A failing job is told as it was drawn: to make it smaller would take longer than to read it."""
FAULTS: list[Callable[[Job, int, int], Job]] = [
    lambda job, rank, at: job.inject(Slow(rank, at, 1.6, at + 30)),
    lambda job, rank, at: job.inject(Slow(rank, 0, 1.4)),
    lambda job, rank, at: job.inject(SlowJob(at, 1.4, at + 25)),
    lambda job, rank, at: job.inject(LocalGradient(rank, at, 2.0)),
    lambda job, rank, at: job.inject(BitFlip(rank, at)),
    lambda job, rank, at: job.inject(NonFinite(rank, at)),
    lambda job, rank, at: job.inject(ScalerSkip(at)),
    lambda job, rank, at: job.inject(LossSpike(at, 4.0, 3)),
    lambda job, rank, at: job.inject(LossDivergence(at, 0.05)),
    lambda job, rank, at: job.inject(NormSpike(at, 40.0, 3)),
    lambda job, rank, at: job.inject(Hang(rank, at, 25.0)),
    lambda job, rank, at: job.inject(DeviceXid(rank, at, 79), DeviceXid(rank, at + 20, 31), DeviceXid(0, at, 63)),
    lambda job, rank, at: job.inject(Throttle(rank, at, 1.3, at + 80)),
    lambda job, rank, at: job.inject(HostSilence("host-0", at, at + 20)),
    lambda job, rank, at: job.inject(MissingRows(rank, 0, at)),
    lambda job, rank, at: job.inject(OrderedPause(at, 20.0)),
    lambda job, rank, at: job.inject(RecurringStall(at // 2, 15.0, "eval")),
    lambda job, rank, at: job.inject(Restart(at, at - 20, relaunch=False)),
    lambda job, rank, at: job.inject(Restart(at, at - 20)),
    lambda job, rank, at: job.inject(Kill(rank, at)),
]


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A job of any shape, with up to four things that happen to it."""
    world_size, pp = draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2), (8, 1), (8, 4), (12, 3)]))
    job = Job(
        world_size,
        STEPS,
        draw(st.integers(0, 99)),
        step_s=draw(st.sampled_from([0.2, 1.0, 4.0])),
        late_values=draw(st.booleans()),
        placement=RankPlacement(
            pp=pp, accelerated=draw(st.booleans()), device_times=draw(st.booleans()), ranks_per_host=4
        ),
    )
    for fault in draw(st.lists(st.sampled_from(FAULTS), max_size=4, unique=True)):
        job = fault(job, draw(st.integers(0, world_size - 1)), draw(st.integers(60, 120)))
    if draw(st.booleans()):
        job = dataclasses.replace(job, noise=Noise(uneven_cv=0.15), report_tokens=draw(st.booleans()))
    return job


def troubled(world_size: int = 8) -> list[Observation]:
    """One of everything, in 280 steps."""
    job = Job(world_size=world_size, steps=280, seed=11, placement=RankPlacement(ranks_per_host=4)).inject(
        SlowJob(40, 1.4, until_step=56),
        Slow(2, 60, 1.6, until_step=100),
        LocalGradient(3, 70, 2.0),
        NormSpike(90, 40.0, 3),
        LossSpike(110, 4.0, 2),
        Hang(1, 130, 30.0),
        HostSilence("host-1", 140, 160),
        BitFlip(5, 165),
        DeviceXid(2, 170, 63),
        Throttle(7, 20, 1.0),
        NonFinite(4, 180),
        Restart(183, 170, relaunch=False),
        Kill(6, 230),
        Restart(230, 200),
        LossDivergence(215, 0.05),
    )
    return list(generate(job))


@pytest.fixture(scope="module")
def observations() -> list[Observation]:
    return troubled()


def answers(bank: Sequence[Detector], observations: Iterable[Observation]) -> list[dict[str, list[Finding]]]:
    """What each detector of a bank says to each observation."""
    return [{one.name: list(one.observe(observation)) for one in bank} for observation in observations]


def saved(bank: Sequence[Detector]) -> bytes:
    return pack({one.name: one.snapshot() for one in bank})


def restored(state: bytes) -> list[Detector]:
    bank, states = detectors(), unpack(state)
    for one in bank:
        one.restore(states[one.name])
    return bank


def check(findings: Iterable[Finding]) -> None:
    """Findings are whole and plain; an episode opens before it changes, and closes once."""
    open_scopes: set[tuple[str, str]] = set()
    for finding in findings:
        json.dumps(finding.evidence, allow_nan=False)
        assert finding.summary.endswith("."), finding.summary
        assert 0.0 <= finding.confidence <= 1.0
        assert not math.isnan(finding.score)
        assert all(type(rank) is int for rank in finding.ranks)
        assert -1e6 < finding.onset_time_s <= finding.detected_time_s < 1e6, finding
        if finding.onset_step is not None and finding.detected_step is not None:
            assert finding.onset_step <= finding.detected_step, finding
        scope = (finding.kind.value, finding.scope)
        assert (scope in open_scopes) == (finding.change.value != "open"), finding
        open_scopes = open_scopes - {scope} if finding.change.value == "close" else open_scopes | {scope}


def test_names_are_unique_and_versions_are_positive() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(detector.version >= 1 for detector in detectors())


def test_the_troubled_job_of_one_stage_makes_every_detector_speak_that_can(observations: list[Observation]) -> None:
    said = answers(detectors(), observations)
    silent = [name for name in NAMES if not any(answer[name] for answer in said)]
    assert silent == [
        "network_degraded",
        "host_degraded",
        "checkpoint_failed",
        "restore_failed",
        "own_pace",
        "stage",
        "own_past",
        "restart_loop",
        "checkpoint_overdue",
        "limit_reached",
        "forged_telemetry",
        "metric",
        "alert",
    ]


@settings(max_examples=trials(4, 10), phases=DRAWN, deadline=None)
@given(job=jobs(), shares=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=6))
def test_detectors_restored_from_bytes_any_number_of_times_go_on_as_if_nothing_had_happened(job, shares):
    """Which says as well that the same observations give the same findings, and that what is found is sound."""
    observations = list(generate(job))
    whole = detectors()
    expected = answers(whole, observations)
    for name in NAMES:
        check(finding for answer in expected for finding in answer[name])
    splits = sorted({int(share * len(observations)) for share in shares})
    bank, found = detectors(), []
    for begin, end in zip([0, *splits], [*splits, len(observations)], strict=True):
        left = bank
        bank = restored(saved(left))
        found += answers(bank, observations[begin:end])
        answers(left, observations[begin : begin + 20])  # what goes on must not reach into the snapshot
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one == other, number
    assert saved(bank) == saved(whole)


@settings(max_examples=trials(4, 10), phases=DRAWN, deadline=None)
@given(job=jobs())
def test_what_a_detector_does_not_read_changes_nothing(job: Job) -> None:
    observations = list(generate(job))
    for name, all_of, read in zip(NAMES, detectors(), detectors(), strict=True):
        for number, observation in enumerate(observations):
            wanted = list(read.observe(observation)) if type(observation) in read.reads else []
            assert list(all_of.observe(observation)) == wanted, (name, number)


def test_a_snapshot_holds_nothing_but_plain_types_and_arrays(observations: list[Observation]) -> None:
    def plain(value: Any) -> None:
        if isinstance(value, dict):
            assert all(type(key) is str for key in value)
            for item in value.values():
                plain(item)
        elif isinstance(value, list):
            for item in value:
                plain(item)
        else:
            assert value is None or type(value) in (bool, int, float, str, bytes, np.ndarray), type(value)

    bank = detectors()
    for number, observation in enumerate(observations):
        for one in bank:
            one.observe(observation)
            if number % 40 == 0:
                plain(one.snapshot())


@settings(max_examples=trials(3, 6), phases=DRAWN, deadline=None)
@given(job=jobs())
def test_observations_are_never_written_to(job: Job) -> None:
    observations = [frozen(observation) for observation in generate(job)]
    before = pickle.dumps(observations)
    evaluate(observations)
    for observation in observations:
        for kept in (observation, getattr(observation, "presence", None)):
            if isinstance(kept, Frame | Presence):
                kept.computed.clear()  # what follows from the values may be kept there
    assert pickle.dumps(observations) == before


@settings(max_examples=trials(4, 10), phases=DRAWN, deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32))
def test_permuted_ranks_give_permuted_findings(job: Job, seed: int) -> None:
    """Of ranks that an observation tells of at once, findings come in rank order, whichever that is: no tie decides."""
    order = np.random.default_rng(seed).permutation(job.world_size)
    observations = list(generate(job))
    number = np.argsort(order)

    def reported(answer: dict[str, list[Finding]], rename: Callable[[int], int]) -> list[Any]:
        found = []
        for finding in (finding for findings in answer.values() for finding in findings):
            kind, _, rank = str(finding.scope).partition(":")
            scope = f"rank:{rename(int(rank))}" if kind == "rank" else str(finding.scope)
            ranks = sorted(rename(one) for one in finding.ranks)
            steps = (finding.onset_step, finding.detected_step)
            found.append((finding.kind, finding.change, scope, ranks, finding.severity, steps))
        return sorted(found, key=repr)

    plain = answers(detectors(), observations)
    moved = answers(detectors(), [permuted(observation, order) for observation in observations])
    for index, (one, other) in enumerate(zip(moved, plain, strict=True)):
        assert reported(one, int) == reported(other, lambda rank: int(number[rank])), index


@settings(max_examples=trials(3, 8), phases=DRAWN, deadline=None)
@given(job=jobs(), factor=st.sampled_from([0.25, 0.5, 2.0, 8.0]))
def test_on_a_slower_clock_with_patience_to_match_the_same_is_found(job: Job, factor: float) -> None:
    """All durations, measured and passed, and all seconds of the settings are multiplied; false incidents are allowed
    for each row as before."""

    def reported(found: list[Finding]) -> list[Any]:
        return [(f.kind, f.change, f.scope, f.ranks, f.severity, f.onset_step, f.detected_step) for f in found]

    observations = list(generate(job))
    slower = evaluate([scaled(observation, factor) for observation in observations], detectors(scaled_config(factor)))
    assert reported(slower) == reported(evaluate(observations))


@pytest.mark.parametrize("factor", [0.1, 2.0, 15.0])
def test_a_job_of_longer_steps_has_the_same_slow_ranks_since_the_same_steps(factor: float) -> None:
    """With the settings as they are: only ratios between ranks, and to the past, count."""
    job = {"world_size": 8, "steps": 150, "seed": 4}
    plain = opened(evaluate(generate(Job(**job).inject(Slow(3, 90, 1.5)))))
    other = opened(evaluate(generate(Job(**job, step_s=factor).inject(Slow(3, 90, 1.5)))))
    assert [(f.kind, f.scope, f.onset_step) for f in other] == [(f.kind, f.scope, f.onset_step) for f in plain]
    assert [f.detected_step for f in other] == pytest.approx([f.detected_step for f in plain], abs=4)


AWKWARD = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, -1e308, 0.0]
PROGRESS_FIELDS = ["phase_age_s", "step_age_s", "cpu_s", "outside_s", "sent_s"]
CALM_STEPS = 120


@cache
def calm_then_trouble(step_s: float, accelerated: bool) -> list[Observation]:
    job = Job(8, 190, 3, step_s=step_s, report_tokens=True, placement=RankPlacement(accelerated=accelerated))
    job = job.inject(
        Slow(2, CALM_STEPS, 2.0, 150), LocalGradient(3, CALM_STEPS, 3.0), BitFlip(5, 125), LossSpike(130, 4.0, 2)
    )
    return list(generate(job.inject(NormSpike(140, 40.0, 2), SlowJob(155, 2.0), NonFinite(6, 175), Hang(1, 180, 30.0))))


@cache
def found_in_trouble(step_s: float, accelerated: bool) -> set[Any]:
    findings = opened(evaluate(calm_then_trouble(step_s, accelerated)))
    found = {(f.kind, f.scope) for f in findings if (f.detected_step or 0) >= CALM_STEPS}
    assert len(found) >= 7, found
    return found


@st.composite
def spoilings(draw: st.DrawFn) -> list[Spoiling]:
    """Cells of the calm part that hold something awkward: of one metric or of all, one rank or all, once or long."""
    metrics = sorted(next(o for o in calm_then_trouble(1.0, False) if isinstance(o, Frame)).values)
    found: list[Spoiling] = []
    for _ in range(draw(st.integers(1, 3))):
        fields = draw(st.sampled_from([[name] for name in (*metrics, *PROGRESS_FIELDS)] + [metrics, PROGRESS_FIELDS]))
        ranks = draw(st.sampled_from([[0], [2], [1, 4, 7], [*range(8)]]))
        begin, steps = draw(st.integers(0, 60)), draw(st.sampled_from([1, 2, 4]))
        value = draw(st.sampled_from(AWKWARD))
        found += [(field, range(begin, begin + steps), ranks, value) for field in fields]
    return found


@settings(max_examples=trials(6, 16), phases=DRAWN, deadline=None)
@example(spoilings=[("queued_s", range(21, 22), [1, 4, 7], -1e308)], step_s=0.1, accelerated=False)
@example(spoilings=[("cpu_s", range(19, 23), [*range(8)], math.inf)], step_s=1.0, accelerated=False)
@example(spoilings=[("busy_s", range(57, 61), [2], 5e-324)], step_s=0.1, accelerated=False)
@given(spoilings=spoilings(), step_s=st.sampled_from([0.1, 1.0]), accelerated=st.booleans())
def test_awkward_numbers_break_nothing_and_silence_nothing(spoilings, step_s, accelerated):
    """Whatever cells of the calm part hold, four steps long: the faults that come later are found all the same."""
    tampered = calm_then_trouble(step_s, accelerated)
    for spoiling in spoilings:
        tampered = [corrupted(observation, spoiling) for observation in tampered]
    said = answers(detectors(), tampered)
    late: set[Any] = set()
    for name in NAMES:
        findings = [finding for answer in said for finding in answer[name]]
        check(findings)
        late |= {(f.kind, f.scope) for f in findings if (f.detected_step or 0) >= CALM_STEPS}
    assert late >= found_in_trouble(step_s, accelerated)


@settings(max_examples=trials(4, 10), phases=DRAWN, deadline=None)
@given(job=jobs(), seed=st.integers(0, 2**32), data=st.data())
def test_metrics_that_come_and_go_and_ranks_that_never_speak_are_survived(job, seed, data):
    random = np.random.default_rng(seed)
    silent = tuple(data.draw(st.sets(st.integers(0, job.world_size - 1))))
    said = answers(detectors(), [thinned(observation, random, silent) for observation in generate(job)])
    for name in NAMES:
        check(finding for answer in said for finding in answer[name])


def eventful(steps: int) -> Iterable[Observation]:
    """A job in which something goes wrong all the time, with metrics of ever new names."""
    job = Job(8, steps, 6, step_s=0.5, placement=RankPlacement(ranks_per_host=4))
    for at in range(80, steps, 100):
        job = job.inject(Slow(2, at, 1.6, at + 30), LossSpike(at + 10, 4.0, 2), NormSpike(at + 20, 40.0, 2))
        job = job.inject(HostSilence("host-1", at + 40, at + 70), Hang(1, at + 45, 12.0), NonFinite(3, at + 50))
        job = job.inject(Restart(at + 60, at + 55, relaunch=at % 200 == 80))
    for observation in generate(job):
        if isinstance(observation, Frame):
            name = f"user.{observation.step % 64}"
            some = next(iter(observation.present.values()))
            values = {**observation.values, name: np.full(some.size, math.nan)}
            yield dataclasses.replace(observation, values=values, present={**observation.present, name: some})
        else:
            yield observation


def test_memory_is_constant_in_steps_whatever_happens() -> None:
    """Counted where memory is allocated, and in the bytes of the snapshot."""
    bank, steps = detectors(), 880
    bytes_held, bytes_saved = [], []
    marks = iter([460, 860, math.inf])  # two whole rounds apart
    mark = next(marks)
    pickle.dumps([one.snapshot() for one in detectors()])  # what is imported at first use is no growth
    tracemalloc.start()
    try:
        for observation in eventful(steps):
            for one in bank:
                one.observe(observation)
            if isinstance(observation, Frame) and observation.step >= mark:
                mark = next(marks)
                del observation
                gc.collect()
                bytes_held.append(tracemalloc.get_traced_memory()[0])
                bytes_saved.append(len(pickle.dumps({one.name: one.snapshot() for one in bank})))
    finally:
        tracemalloc.stop()
    assert bytes_saved[1] <= bytes_saved[0] * 1.05 + 1024
    assert bytes_held[1] <= bytes_held[0] * 1.1 + 32 * 1024


@pytest.mark.parametrize("spoil", ["foreign attempt", "wrong size", "nothing present", "no metrics"])
def test_strange_but_legal_frames_say_nothing(spoil: str) -> None:
    bank = detectors()
    for observation in generate(Job(world_size=4, steps=30, seed=8)):
        evaluate([observation], bank)
        if isinstance(observation, Frame):
            assert evaluate([spoiled(observation, spoil)], bank) == []


def spoiled(frame: Frame, how: str) -> Frame:
    later = dataclasses.replace(frame, step=frame.step + 1)
    if how == "foreign attempt":
        return dataclasses.replace(later, attempt="other.0")
    if how == "no metrics":
        return dataclasses.replace(frame, values={}, present={}, exact={})
    if how == "nothing present":
        return dataclasses.replace(frame, present={name: np.zeros_like(here) for name, here in frame.present.items()})
    return _with_columns(later, lambda array: array[:2])  # as it was before the other ranks were known


@pytest.mark.parametrize("who", [0, slice(None)])
def test_seconds_that_add_up_to_more_than_a_number_holds_are_no_measurement(who: int | slice) -> None:
    bank = detectors()
    for observation in generate(Job(world_size=4, steps=30, seed=8)):
        if isinstance(observation, Frame) and observation.step > 20:
            vast = observation.values["busy_s"].copy()
            vast[who] = 1.7e308
            values = {**observation.values, "busy_s": vast, "phase.data_wait": vast}
            present = {**observation.present, "phase.data_wait": observation.present["busy_s"]}
            observation = dataclasses.replace(observation, values=values, present=present)  # noqa: PLW2901
        evaluate([observation], bank)


def test_without_an_attempt_nothing_is_said() -> None:
    observations = [o for o in generate(Job(world_size=4, steps=20)) if not isinstance(o, AttemptStart)]
    assert evaluate(observations) == []


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_in_the_smallest_jobs_a_hang_is_found_and_of_two_or_more_the_slow_rank_is_named(world_size: int) -> None:
    job = Job(world_size=world_size, steps=120, seed=2).inject(Slow(0, 60, 3.0), Hang(0, 100, 20))
    found = {(finding.kind.value, finding.ranks) for finding in opened(evaluate(generate(job)))}
    who = {("straggler", (0,))} if world_size > 1 else set()
    assert found - {("slowdown", ())} == who | {("hang", (0,))}


@pytest.mark.parametrize("gone", [Frame, Tick])
def test_a_job_of_which_only_one_half_is_heard_is_followed_without_error(gone: type[Frame | Tick]) -> None:
    job = Job(world_size=4, steps=60, seed=3).inject(Hang(1, 40, 20.0))
    evaluate([observation for observation in generate(job) if not isinstance(observation, gone)])


def test_an_occurrence_of_an_unknown_kind_or_rank_is_ignored() -> None:
    bank = detectors()
    observations = list(generate(Job(world_size=4, steps=5, ends=False)))
    attempt = next(o for o in observations if isinstance(o, AttemptStart)).attempt
    reported = [
        ("no such thing", "host-0", None),
        ("process_exit", "host-0", 99),
        ("gap", "host-9", None),
        ("order", "", None),
    ]
    strange = [Occurrence(kind, attempt, host, 1.0, rank, None, {}) for kind, host, rank in reported]
    assert evaluate([*observations, *strange], bank) == []


def test_a_step_told_twice_opens_nothing() -> None:
    """The stream closes a frame once; a repeated step of the same attempt must still not open anything."""
    doubled: list[Observation] = []
    for observation in generate(Job(world_size=8, steps=120, seed=9)):
        doubled += [observation] * (2 if isinstance(observation, Frame) else 1)
    assert opened(evaluate(doubled)) == []


@pytest.mark.parametrize("ranks", [4, 12])
def test_an_attempt_that_turns_out_to_have_other_ranks_is_begun_anew(ranks: int) -> None:
    bank = detectors()
    before = list(generate(Job(world_size=8, steps=120, seed=1, ends=False).inject(Slow(7, 60, 2.0), BitFlip(7, 60))))
    after = list(generate(Job(world_size=ranks, steps=120, seed=1, ends=False)))
    assert opened(evaluate(before, bank))
    assert all(finding.change.value == "close" for finding in evaluate(after, bank))


def test_presence_of_another_attempt_is_not_judged() -> None:
    observations = list(generate(Job(world_size=4, steps=30, ends=False)))
    last = [o for o in observations if isinstance(o, Tick)][-1]
    presence = last.presence
    assert isinstance(presence, Presence)
    other = dataclasses.replace(presence, attempt="older.0", step_age_s=presence.step_age_s + 1e6)
    assert evaluate([*observations, Tick(last.now_s + 1, other)]) == []
