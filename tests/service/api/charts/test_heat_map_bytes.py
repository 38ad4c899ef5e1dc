"""The heat map of the API as bytes: what JSON says, and within its bounds."""

import numpy as np
import pytest
from sqlalchemy import insert

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Job
from tests.support.service.heat_tiles import read


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
