"""The cluster model is what it says, what is large in its jobs is found, and noise that lasts accuses nobody."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rankwatch_detectors.base import Floats, Frame, Observation
from rankwatch_detectors.statistics.baseline import BlockCorrelation
from rankwatch_service.notify.message_limit import MESSAGES_PER_HOUR
from suite.cases import FAULTS, SILENT, Case, LabelledCase, straggler, stragglers
from suite.cluster_cases import ClusterCase, cluster_clean, cluster_faults
from suite.cluster_model import ClusterJob, CorrelatedNoise, SlowDevice, hosts_for
from suite.conditions import combined, conditions_alone, on_accelerators, slow_changes, wandering_pace
from suite.scoring import score
from tests.support.trials.selection import ALL, in_ci

LARGE = (
    "straggler +30 %, 64 ranks",
    "host +10 %, 64 ranks",
    "loader of a rank x3, 64 ranks",
    "all devices +30 %, 64 ranks",
    "loss x1.5 for 20 steps, 8 ranks",
    "loss +2 % a step, 8 ranks",
)
CLEAN = ("clean, 8 ranks", "elastic", "two kinds of devices")


def _frames(job: ClusterJob, family: str = "steps") -> list[Frame]:
    return [one for one in job.observations() if isinstance(one, Frame) and one.family == family]


def _reported(observation: Observation) -> str:
    with np.printoptions(threshold=1_000_000, precision=17):
        return repr(observation)


def test_equal_jobs_give_equal_observations_and_other_seeds_others() -> None:
    job = ClusterJob(hosts=2, steps=30, eval_every=10)
    first = [_reported(one) for one in job.observations()]
    assert first == [_reported(one) for one in job.observations()]
    assert first != [_reported(one) for one in replace(job, seed=1).observations()]


def test_all_ranks_wait_for_the_slowest_and_the_parts_of_a_step_are_the_step() -> None:
    for frame in _frames(ClusterJob(steps=50)):
        parts = frame.values["busy_s"] + frame.values["wait_s"] + frame.values["phase.data_wait"]
        assert np.ptp(frame.values["step_time_s"]) == 0
        np.testing.assert_allclose(parts, frame.values["step_time_s"])
        assert frame.values["wait_s"].min() > 0


@pytest.mark.parametrize(
    "case", [case for case in cluster_faults((8, 64)) if case.name in LARGE], ids=lambda case: case.name
)
def test_a_large_fault_is_found_and_named(case: ClusterCase) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)


@pytest.mark.parametrize(
    "case", [case for case in cluster_clean((8,)) if case.name in CLEAN], ids=lambda case: case.name
)
def test_a_clean_job_disturbs_nobody(case: ClusterCase) -> None:
    assert score(case, range(1)).false == []


RANKS, SIGMA = 64, 0.02


def measured(series: Floats, rows: int) -> float:
    """The correlation in blocks of so many rows, of series that are [rows, ranks]."""
    blocks = BlockCorrelation(rows)
    blocks.begin(series.shape[1])
    calm = np.ones(series.shape[1], dtype=np.bool_)
    for row in series:
        blocks.add(row, calm, SIGMA**2)
    return blocks.ratio


def lasting(seconds: float, rows: int) -> Floats:
    """Noise with a time constant, a row each second."""
    noise = CorrelatedNoise(np.random.default_rng(1), RANKS, SIGMA, (seconds,))
    return np.stack([noise.after(1.0) for _ in range(rows)])


def of_sum(seconds: float, rows: int) -> float:
    """Variance of a sum of so many rows of AR(1) noise over that of as many independent ones."""
    lags = np.arange(1, rows)
    return float(1.0 + 2.0 * np.sum((1.0 - lags / rows) * np.exp(-lags / seconds)))


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize("seconds", [0.1, 20.0, 60.0])
def test_blocks_show_how_long_noise_lasts(rows: int, seconds: float) -> None:
    assert measured(lasting(seconds, 2048), rows) == pytest.approx(of_sum(seconds, rows), rel=0.2)


def test_a_block_without_calm_ranks_says_nothing() -> None:
    blocks = BlockCorrelation(4)
    blocks.begin(2)
    before = blocks.ratio
    for _ in range(4):
        blocks.add(np.zeros(2), np.zeros(2, dtype=np.bool_), SIGMA**2)
    assert blocks.ratio == before


def case_of(*faults: SlowDevice) -> ClusterCase:
    """256 ranks on 32 hosts, each of which is 1 % faster or slower than usual for a minute at a time."""
    return LabelledCase(
        "noise of hosts", lambda seed: ClusterJob(hosts=hosts_for(256), steps=600, seed=seed, faults=faults), cause=""
    )


def test_a_host_that_is_slower_for_a_minute_accuses_none_of_its_ranks() -> None:
    assert score(case_of(), range(1)).false == []


@pytest.mark.parametrize("ranks", [(5,), tuple(range(8, 16))], ids=["a rank", "a host"])
def test_who_becomes_a_tenth_slower_there_is_found_as_fast(ranks: tuple[int, ...]) -> None:
    got = score(case_of(SlowDevice(300, 1.1, ranks)), range(1))
    assert (got.found, got.named, got.false) == (got.labels, got.labels, [])
    assert max(got.delays) <= 12


LINES = [*stragglers((8,)), *FAULTS]
LARGE_LINES = in_ci([*stragglers((1024,)), straggler(16_384, 1.05)])
DEVICE_LINES = in_ci(on_accelerators([*stragglers((8, 1024)), *FAULTS]))
SIZES = (16, 64, 1024) if ALL else (16, 1024)
WANDERING_SIZES = (8, 64, 256) if ALL else (8, 256)
COMBINED = [*combined((16,))]
SLOW = [*slow_changes((16,))]
REPORTED_PER_CAUSE_MAX = 3.0
"""What grows is reported again, and again when it becomes critical."""


@pytest.mark.parametrize("case", [*LINES, *LARGE_LINES, *DEVICE_LINES], ids=lambda case: case.name)
def test_a_fault_is_found_and_named_in_time_and_nothing_else_is_said(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert got.caused == got.named
    assert math.isinf(case.delay_max) or max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.notified <= REPORTED_PER_CAUSE_MAX * got.roots


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
def test_where_nothing_is_wrong_nobody_is_disturbed(case: Case) -> None:
    got = score(case, range(1))
    assert got.false == []
    assert got.notified <= MESSAGES_PER_HOUR


@pytest.mark.parametrize(
    "case", [*COMBINED[::2], *in_ci([*COMBINED[1::2], *combined(SIZES[1:])])], ids=lambda case: case.name
)
def test_a_fault_in_a_job_with_a_way_of_its_own_is_one_incident_found_and_named(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.incidents == got.roots


@pytest.mark.parametrize(
    "case",
    [
        *conditions_alone((16,)),
        *wandering_pace((8,)),
        *in_ci([*conditions_alone(SIZES[1:]), *wandering_pace(WANDERING_SIZES[1:])]),
    ],
    ids=lambda case: case.name,
)
def test_a_jobs_own_way_disturbs_nobody(case: Case) -> None:
    got = score(case, range(1))
    assert (got.named, got.false, got.incidents) == (got.labels, [], got.roots)
    assert got.labels or got.notified <= MESSAGES_PER_HOUR


@pytest.mark.parametrize("case", [*SLOW[::2], *in_ci(SLOW[1::2])], ids=lambda case: case.name)
def test_what_changes_slowly_or_on_one_rank_alone_is_found_and_named_beside_anything_else(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.incidents <= got.roots
