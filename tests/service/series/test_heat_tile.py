import gzip
import math
import struct

import numpy as np
import pytest
from sqlalchemy import insert

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.heat_tile import gzipped, tile
from rankwatch_service.series.query import HeatMap
from rankwatch_service.series.rollups import ValueMark
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Job


def heat_map(value: np.ndarray) -> HeatMap:
    mark = np.full(value.shape, ValueMark.FINITE, np.uint8)
    mark[np.isnan(value)] = ValueMark.NAN
    rows, columns = value.shape
    return HeatMap(np.arange(columns) * 64, np.arange(rows), rows, value.astype(np.float32), mark)


def read(data: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Steps, ranks, values and codes, by the layout that openapi.json states."""
    magic, columns, rows, _, scale, levels = struct.unpack_from("<4sIIIff", data)
    assert magic == b"RWH1"
    at = 24
    step = np.frombuffer(data, "<f8", columns, at)
    rank = np.frombuffer(data, "<u4", rows, at := at + 8 * columns)
    centre = np.frombuffer(data, "<f4", columns, at := at + 4 * rows)
    lower = np.frombuffer(data, "u1", rows * columns, at := at + 4 * columns)
    upper = np.frombuffer(data, "u1", rows * columns, at := at + rows * columns)
    assert at + rows * columns == len(data)
    code = (lower + 256 * upper.astype(int)).reshape(rows, columns)
    n = np.where(code % 2 == 0, (code - 4) / 2, (3 - code) / 2)
    return step, rank, np.where(code < 4, np.nan, centre + scale * np.sinh(n / levels)), code


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


def stored(api, ranks: int, steps: int) -> None:
    row = {"state": "running", "attempt": "l.0", "world_size": ranks, "ranks_reporting": ranks, "step": steps}
    row |= {"step_time_s": 1.0, "loss": None, "first_seen_unix_ns": 0, "last_seen_unix_ns": 0, "dropped": {}}
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(name="j", **row))
    writer = SeriesWriter(api.engine, SystemClock())
    for step in range(steps):
        values = {"loss": np.arange(ranks) + step / 4}
        writer.add("j", Frame("l.0", "steps", step, StepKind.TRAIN, 0.0, values, {"loss": np.ones(ranks, bool)}))
    writer.flush("j")


def test_bytes_and_json_say_the_same(api):
    stored(api, 4, 20)
    shown = api.get("/api/v1/jobs/j/heatmap?metric=loss&columns=5").json()
    answer = api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5")
    assert answer.headers["content-encoding"] == "gzip"
    step, rank, values, _ = read(answer.content)
    assert step.tolist() == shown["step"] == [0, 4, 8, 12, 16]
    assert rank.tolist() == shown["rank"]
    assert np.abs(values - np.array(shown["high"])).max() < 0.01
    plain = api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == answer.content
    low = read(api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=5&side=low").content)[2]
    assert low[0].tolist() == pytest.approx([0, 1, 2, 3, 4], abs=0.01)


def test_answers_have_a_bound_whatever_the_job(api):
    stored(api, 3_000, 100)
    shown = api.get("/api/v1/jobs/j/heatmap?metric=loss&columns=1000").json()
    assert len(shown["rank"]) * len(shown["step"]) <= 60_000
    assert len(shown["rank"]) == 1_000
    _, rank, values, _ = read(api.get("/api/v1/jobs/j/heatmap.bin?metric=loss&columns=1000").content)
    assert len(rank) * values.shape[1] <= 320_000
    assert values[-1, -1] == pytest.approx(2_999 + 99 / 4, rel=0.01)
    for query in ("metric=loss&rows=0", "metric=loss&rows=2000", "metric=loss&side=middle", "columns=3"):
        assert api.get(f"/api/v1/jobs/j/heatmap.bin?{query}").status_code == 422
    assert api.get("/api/v1/jobs/none/heatmap.bin?metric=loss").status_code == 404
