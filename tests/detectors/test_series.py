"""The adapter to River: exact quantiles, finite values only, restored from its window."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rankwatch_detectors.statistics.series import RollingQuantiles


def test_quantiles_are_those_of_the_newest_window() -> None:
    values = np.random.default_rng(0).standard_normal(500)
    series = RollingQuantiles(101, (0.5,))
    for value in values:
        series.learn(float(value))
    assert series.get()[0] == pytest.approx(float(np.median(values[-101:])))


def test_a_restored_series_goes_on_with_the_same_quantiles() -> None:
    values = [float(v) for v in np.random.default_rng(1).standard_normal(400)]
    one, other = RollingQuantiles(64, (0.5, 0.99)), RollingQuantiles(64, (0.5, 0.99))
    for value in values[:200]:
        one.learn(value)
    other.restore(one.snapshot())
    for value in values[200:]:
        one.learn(value)
        other.learn(value)
        assert one.get() == other.get()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused_before_river_sees_it(bad: float) -> None:
    series = RollingQuantiles(8, (0.5,))
    series.learn(1.0)
    with pytest.raises(ValueError, match="finite"):
        series.learn(bad)
    assert series.get() == (1.0,)
