"""Chunks and heat maps as bytes, and back."""

import gzip
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from rankwatch_service.series.chunks import ABSENT_BITS, absent, blank, decoded, encoded, is_time
from rankwatch_service.series.query import HeatMap, gzipped, tile
from rankwatch_service.series.rollups import ValueMark
from tests.support.service.stored_series import read
from tests.support.trials.selection import trials

STEPS, RANKS = 64, 256


def round_trip(cells: np.ndarray, times: bool) -> np.ndarray:
    block = np.asarray(cells, np.float32)[None]
    (data,) = encoded(block, times)
    return decoded(data)


def bytes_per_value(cells: np.ndarray, times: bool) -> float:
    block = np.asarray(cells, np.float32)[None]
    return len(encoded(block, times)[0]) / block.size


def step_times(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    cells = 0.25 * (1 + 0.02 * rng.standard_normal((STEPS, 1))) * (1 + 0.005 * rng.standard_normal((1, RANKS)))
    cells += 0.0008 * rng.standard_normal(cells.shape)
    return np.where(rng.random(cells.shape) < 0.01, cells * 1.3, cells)


def test_step_times_come_back_to_10_us_in_a_byte_and_a_half():
    cells = step_times(1)
    assert np.abs(round_trip(cells, times=True) - cells).max() <= 5.1e-6
    assert bytes_per_value(cells, times=True) <= 1.5


def test_losses_come_back_to_five_digits_in_less_than_three_bytes():
    rng = np.random.default_rng(2)
    cells = 2.5 + 0.2 * rng.standard_normal((STEPS, RANKS))
    assert np.abs(round_trip(cells, times=False) / cells - 1).max() < 4e-6
    assert bytes_per_value(cells, times=False) <= 3


def test_a_save_of_300_s_among_steps_of_10_ms_is_not_clipped():
    cells = np.full((STEPS, RANKS), 0.01)
    cells[7, 3], cells[9, :] = 300.0, 299.5
    back = round_trip(cells, times=True)
    assert back[7, 3] == 300.0
    assert (back[9] == np.float32(299.5)).all()
    assert back[0, 0] == np.float32(0.01)


def test_times_of_microseconds_keep_their_digits():
    cells = np.linspace(40e-6, 60e-6, STEPS * RANKS).reshape(STEPS, RANKS)
    assert np.abs(round_trip(cells, times=True) / cells - 1).max() < 1e-3


@pytest.mark.parametrize("times", [True, False])
def test_what_is_no_usual_number_comes_back_bit_by_bit(times):
    odd = [math.nan, math.inf, -math.inf, 1e-45, -1e-40, 3.4028235e38, -3.4028235e38, 2.0**99]
    cells = blank(STEPS, RANKS)
    cells[:, :10] = 1.0
    cells[5, : len(odd)] = odd
    back = round_trip(cells, times)
    for got, want in zip(back[5].tolist(), cells[5].tolist(), strict=True):
        assert got == want or (math.isnan(got) and math.isnan(want)) or (times and abs(got - want) < 5e-6)


def test_times_that_add_up_to_more_than_a_float32_come_back():
    cells = np.full((2, 2), 2.0**127)
    assert (round_trip(cells, times=True) == cells).all()


cells_of_any_kind = arrays.arrays(
    np.float32, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.floats(width=32, allow_subnormal=True)
)


@settings(max_examples=trials(60, 200), deadline=None)
@given(cells_of_any_kind, st.booleans(), st.data())
def test_any_values_come_back_within_the_stated_resolution(cells, times, data):
    holes = data.draw(arrays.arrays(np.bool_, cells.shape))
    cells.view(np.uint32)[np.isnan(cells)] = 0x7FC0_0000
    cells.view(np.uint32)[holes] = ABSENT_BITS
    back = round_trip(cells, times)
    assert absent(back).tolist() == holes.tolist()
    usual = np.isfinite(cells)
    assert np.isnan(back[np.isnan(cells)]).all()
    assert back[np.isinf(cells)].tolist() == cells[np.isinf(cells)].tolist()
    exact, got = cells[usual].astype(np.float64), back[usual].astype(np.float64)
    limit = np.maximum(np.abs(exact) * 2**-18, 5.001e-6 if times else 0)
    assert (np.abs(got - exact) <= limit).all()
    assert times or round_trip(back, times)[usual].tolist() == back[usual].tolist()


def test_metrics_are_encoded_together_as_they_are_alone():
    rng = np.random.default_rng(3)
    block = rng.normal(1, [[[0.001]], [[1e-5]], [[30.0]]], (3, STEPS, RANKS)).astype(np.float32)
    for times in (True, False):
        assert encoded(block, times) == [encoded(block[n : n + 1], times)[0] for n in range(3)]


@pytest.mark.parametrize("data", [b"", b"rubbish", b"\x01", b"\x01" * 40, b"\x02" * 40])
def test_bytes_that_are_no_chunk_are_refused(data):
    with pytest.raises(ValueError, match="not a series chunk"):
        decoded(data)


def test_names_tell_what_is_a_time():
    assert all(is_time(name) for name in ("step_time_s", "phase.forward"))
    assert not any(is_time(name) for name in ("loss", "grad_norm"))


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
