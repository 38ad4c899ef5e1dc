"""Noise that lasts, as that of hosts, makes no rank of theirs a straggler, and hides none that is large."""

from __future__ import annotations

import numpy as np
import pytest

from rankwatch_detectors.base import Floats
from rankwatch_detectors.statistics.baseline import BlockCorrelation
from suite.cases import LabelledCase
from suite.cluster_cases import ClusterCase
from suite.cluster_model import ClusterJob, CorrelatedNoise, SlowDevice, hosts_for
from suite.scoring import score

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
    assert score(case_of(), range(2)).false == []


@pytest.mark.parametrize("ranks", [(5,), tuple(range(8, 16))], ids=["a rank", "a host"])
def test_who_becomes_a_tenth_slower_there_is_found_as_fast(ranks: tuple[int, ...]) -> None:
    got = score(case_of(SlowDevice(300, 1.1, ranks)), range(1))
    assert (got.found, got.named, got.false) == (got.labels, got.labels, [])
    assert max(got.delays) <= 12
