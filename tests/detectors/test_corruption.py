"""Replicas whose bits differ, and ranks whose local gradients leave their peers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Severity
from rankwatch_detectors.values.corruption import FingerprintDetector, LocalNormConfig, LocalNormDetector
from rankwatch_service.simulate.faults import LocalGradient
from rankwatch_service.simulate.generate import generate
from rankwatch_service.simulate.job import Job
from tests.support.detection.verdicts import evaluate, opened
from tests.support.values.presences import ATTEMPT, frame, topology


def prints(step: int, *values: int, absent: tuple[int, ...] = ()) -> Frame:
    one = frame(step, {}, {"fingerprint": values})
    one.present["fingerprint"][list(absent)] = False
    return one


def compared(*frames: Frame, ranks: int = 4, replicated: bool = True) -> list[Finding]:
    start = AttemptStart(ATTEMPT, topology(ranks, replicated=replicated), 0.0)
    return evaluate([start, *frames], [FingerprintDetector()])


BIG = 2**62 + 1


@pytest.mark.parametrize(
    ("values", "scope", "ranks", "confidence"),
    [
        pytest.param((8, 8, 9, 8), "rank:2", (2,), 1.0, id="the odd one"),
        pytest.param((BIG, BIG, BIG, BIG ^ 1), "rank:3", (3,), 1.0, id="a bit beyond what a float holds"),
        pytest.param((7, 8), "job", (0, 1), 0.7, id="one of two"),
        pytest.param((7, 7, 8, 8), "job", (0, 1, 2, 3), 0.7, id="a tie"),
    ],
)
def test_the_majority_of_replicas_names_those_that_differ(values, scope, ranks, confidence) -> None:
    same = prints(10, *[7] * len(values))
    (finding,) = compared(same, later := prints(20, *values), ranks=len(values))
    assert (str(finding.scope), finding.ranks, finding.confidence) == (scope, ranks, confidence)
    assert (finding.onset_step, finding.detected_step, finding.severity) == (11, 20, Severity.CRITICAL)
    assert (finding.onset_time_s, finding.detected_time_s) == (same.time_s, later.time_s)


def test_it_opens_once_and_closes_when_all_are_equal_again() -> None:
    findings = compared(prints(10, 7, 7, 7, 1), prints(20, 8, 8, 8, 2), prints(30, 9, 9, 9, 9))
    assert [(f.change, f.detected_step) for f in findings] == [(Change.OPEN, 10), (Change.CLOSE, 30)]


def test_sharded_parameters_are_not_compared() -> None:
    assert compared(prints(10, 1, 2, 3, 4), replicated=False) == []


def test_replicas_are_compared_within_their_shard_only() -> None:
    shards = dataclasses.replace(topology(8, replicated=True), tp=np.asarray([0, 1] * 4, dtype=np.int64))
    start = AttemptStart(ATTEMPT, shards, 0.0)
    assert evaluate([start, prints(10, 5, 6, 5, 6, 5, 6, 5, 6)], [FingerprintDetector()]) == []
    (finding,) = evaluate([start, prints(10, 5, 6, 5, 6, 5, 0, 5, 6)], [FingerprintDetector()])
    assert finding.ranks == (5,)


def slices_of(step: int, *values: int) -> Frame:
    return frame(step, {}, {"fingerprint.0": values})


def test_slices_are_compared_between_the_ranks_that_hold_the_same_and_no_others() -> None:
    held = np.array([0, 0, 0, -1, 1, 1], dtype=np.int64)
    start = AttemptStart(ATTEMPT, dataclasses.replace(topology(6), slices=(held,)), 0.0)
    assert evaluate([start, slices_of(10, 7, 7, 7, 1, 8, 8)], [FingerprintDetector()]) == []
    (finding,) = evaluate(
        [start, slices_of(10, 7, 7, 7, 1, 8, 8), slices_of(20, 7, 9, 7, 2, 8, 8)], [FingerprintDetector()]
    )
    assert (finding.ranks, finding.onset_step, finding.confidence) == ((1,), 11, 1.0)
    (finding,) = evaluate([start, slices_of(10, 7, 7, 7, 1, 8, 9)], [FingerprintDetector()])
    assert (finding.ranks, finding.confidence) == ((4, 5), 0.7)


def test_the_same_slice_is_compared_whichever_number_a_rank_gives_it() -> None:
    first, second = np.array([0, 1], dtype=np.int64), np.array([1, 0], dtype=np.int64)
    start = AttemptStart(ATTEMPT, dataclasses.replace(topology(2), slices=(first, second)), 0.0)

    def both(ours: tuple[int, int], theirs: tuple[int, int]) -> Frame:
        return frame(10, {}, {"fingerprint.0": (ours[0], theirs[0]), "fingerprint.1": (ours[1], theirs[1])})

    assert evaluate([start, both((7, 8), (8, 7))], [FingerprintDetector()]) == []
    assert len(evaluate([start, both((7, 8), (7, 8))], [FingerprintDetector()])) == 1


def test_peers_that_are_known_late_are_compared_from_then_on() -> None:
    job = Job(world_size=64, steps=260, seed=0).inject(LocalGradient(20, 200, 1.5))
    observed = list(generate(job))
    start = next(one for one in observed if isinstance(one, AttemptStart))
    half = dataclasses.replace(start.topology, tp=np.arange(64, dtype=np.int64) // 32)
    at = next(index for index, one in enumerate(observed) if isinstance(one, Frame) and one.step == 20)
    observed.insert(at, AttemptStart(start.attempt, half, observed[at].time_s))
    detector = LocalNormDetector(LocalNormConfig())
    findings = opened(evaluate(observed, [detector]))
    assert [f.ranks for f in findings] == [(20,)]
    assert findings[0].evidence["peers_compared"] < 32


def test_late_ranks_are_left_out_and_do_not_prove_agreement() -> None:
    findings = compared(prints(10, 7, 7, 7, 7), prints(20, 8, 8, 8, 0, absent=(3,)), prints(30, 9, 9, 9, 1))
    assert [(f.ranks, f.onset_step) for f in findings] == [((3,), 11)]


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_local_norms_may_leave_in_either_direction(factor: float) -> None:
    job = Job(world_size=8, steps=260, seed=4).inject(LocalGradient(2, 200, factor))
    assert [f.ranks for f in opened(evaluate(generate(job), [LocalNormDetector(LocalNormConfig())]))] == [(2,)]


@pytest.mark.parametrize("world_size", [4, 64])
def test_norms_that_differ_with_the_data_raise_nothing(world_size: int) -> None:
    job = Job(world_size=world_size, steps=1500, seed=5)
    assert evaluate(generate(job), [LocalNormDetector(LocalNormConfig())]) == []
