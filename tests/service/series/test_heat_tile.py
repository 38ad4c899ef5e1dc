import gzip
import math

import numpy as np
import pytest

from rankwatch_service.series.query import HeatMap, gzipped, tile
from rankwatch_service.series.rollups import ValueMark
from tests.support.service.heat_tiles import read


def heat_map(value: np.ndarray) -> HeatMap:
    mark = np.full(value.shape, ValueMark.FINITE, np.uint8)
    mark[np.isnan(value)] = ValueMark.NAN
    rows, columns = value.shape
    return HeatMap(np.arange(columns) * 64, np.arange(rows), rows, value.astype(np.float32), mark)


def test_values_come_back_to_a_fraction_of_the_usual_difference_between_ranks():
    rng = np.random.default_rng(5)
    value = 2.5 + rng.normal(0, 0.5, (1, 300)) + rng.normal(0, 0.01, (1_024, 300))
    value[17, 200], value[18, 201] = 9.0, 1e20
    step, rank, back, _ = read(tile(heat_map(value)))
    assert step.tolist() == [64 * n for n in range(300)]
    assert rank.tolist() == list(range(1_024))
    usual = np.abs(value - 2.5) < 3
    assert np.abs(back - value)[usual].max() < 0.01 / 6
    assert back[17, 200] == pytest.approx(9.0, rel=0.01)
    assert back[18, 201] == pytest.approx(1e20, rel=0.01)


def test_a_large_map_of_noise_is_less_than_200_kb():
    value = 0.25 + np.random.default_rng(6).normal(0, 0.0008, (1_024, 300))
    data = gzipped(tile(heat_map(value)))
    assert len(data) <= 200_000
    assert gzip.decompress(data) == tile(heat_map(value))


def test_marks_have_codes_of_their_own():
    value = np.array([[1.0, math.nan, 2.0, 3.0]])
    found = heat_map(value)
    found.mark[0, 2], found.mark[0, 3] = ValueMark.POSITIVE_INF, ValueMark.NEGATIVE_INF
    found.mark[0, 0] = ValueMark.ABSENT
    assert read(tile(found))[3].tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize(
    "value",
    [
        np.full((4, 3), 7.5),
        np.zeros((2, 2)),
        np.array([[1.0, 1.0], [1.0, 1.0], [1.0, 2.0]]),
        np.array([[3.4e38], [-3.4e38], [1e-30]]),
        np.array([[math.nan, 1e-42], [math.nan, 3e-42]]),
    ],
)
def test_maps_of_few_different_values_come_back(value):
    _, _, back, _ = read(tile(heat_map(value)))
    spread = np.nanmax(value) - np.nanmin(value)
    assert np.array_equal(np.isnan(back), np.isnan(value))
    assert np.nanmax(np.abs(back - value)) <= 0.01 * spread + 1e-6 * np.nanmax(np.abs(value)) + 1e-40


def test_a_map_without_any_cell_has_only_its_header():
    assert len(tile(heat_map(np.zeros((0, 0))))) == 24
