"""How far a series wanders by itself, and what is no wandering."""

from __future__ import annotations

import json

import numpy as np
import pytest

from rankwatch_detectors.base import Floats
from rankwatch_detectors.statistics.anchor import BlockSpread

NOISE = 0.02


def spread_of(level: Floats, seed: int = 1) -> float:
    """The spread that is seen when a level is read through noise of two percent."""
    blocks = BlockSpread()
    for value in level + NOISE * np.random.default_rng(seed).standard_normal(level.size):
        blocks.push(float(value))
    return blocks.spread


def wandering(rows: int, low: float, high: float, seed: int) -> Floats:
    """Every 100 to 500 rows up by an amount between two others, or back."""
    random, parts, up = np.random.default_rng(seed), [], False
    while sum(part.size for part in parts) < rows:
        parts.append(np.full(int(random.integers(100, 500)), random.uniform(low, high) if up else 0.0))
        up = not up
    return np.concatenate(parts)[:rows]


def test_the_levels_of_the_newest_rows_come_with_the_one_just_before_them() -> None:
    blocks = BlockSpread()
    for row in range(5 * 32 + 10):
        blocks.push(float(row // 32))
    assert blocks.newest(5) == [4.0]
    assert blocks.newest(10) == [4.0]
    assert blocks.newest(11) == [3.0]
    assert blocks.newest(10 + 64) == [2.0, 3.0, 4.0]
    assert blocks.newest(10 + 70) == [1.0, 3.0, 4.0]
    assert blocks.newest(10 + 5 * 32) == []


@pytest.mark.parametrize("seed", range(5))
def test_levels_that_come_and_go_are_as_wide_as_they_are_apart(seed: int) -> None:
    assert 0.02 < spread_of(wandering(6000, 0.05, 0.13, seed), seed) < 0.12


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(np.zeros(6000), id="noise alone"),
        pytest.param(np.repeat([0.0, 0.3], [3000, 1500]), id="one shift for good"),
        pytest.param(np.repeat([0.0, 0.3, 0.0], [2000, 400, 2000]), id="one bout"),
        pytest.param(np.linspace(0.0, 2.0, 6000), id="a steady trend"),
        pytest.param(np.where(np.arange(6000) % 40 == 0, 3.0, 0.0), id="an evaluation every 40 rows"),
    ],
)
def test_what_happens_once_or_steadily_is_no_wandering(level: Floats) -> None:
    assert spread_of(level) < 0.006


def test_nothing_is_known_of_a_young_series() -> None:
    assert spread_of(wandering(190, 0.3, 0.5, 1)) == 0.0


def test_a_restored_one_goes_on_as_if_nothing_had_been() -> None:
    values = wandering(3000, 0.05, 0.13, 3).tolist()
    whole, first, second = BlockSpread(), BlockSpread(), BlockSpread()
    for value in values:
        whole.push(value)
    for value in values[:1717]:
        first.push(value)
    second.restore(json.loads(json.dumps(first.snapshot())))
    for value in values[1717:]:
        second.push(value)
    assert second.snapshot() == whole.snapshot()
