"""What the charts of a job show: why an incident was opened, what is judged, and the heat map as bytes."""

import numpy as np
import pytest

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.scopes import Scope
from rankwatch_service.clock import SystemClock
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.models import Incident, Job
from tests.support.service.heat_tiles import read
from tests.support.service.stream import Service
from tests.support.store.rows import add, job_row
from tests.support.values.batches import ranks, table
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
SLOW_STEP = 150


def train(service, stream, steps, ranks_of_job=4):
    """Ranks that scatter by 2 %; from `SLOW_STEP` on rank 1 takes half as much time again."""
    noise = np.random.default_rng(1).standard_normal((SLOW_STEP * 2, ranks_of_job))
    for first in range(0, steps, 10):
        rows = [(step, rank) for step in range(first, first + 10) for rank in range(ranks_of_job)]
        busy = [0.08 * (1 + 0.02 * noise[row]) * (1.5 if row[0] >= SLOW_STEP and row[1] == 1 else 1) for row in rows]
        columns = {"busy_s": busy, "step_time_s": [0.1] * len(rows), "loss": [2.0] * len(rows)}
        who = {"ranks": ranks(ranks_of_job)} if first == 0 else {}
        service.send(steps=table([step for step, _ in rows], [rank for _, rank in rows], **columns), **who)
        service.clock.advance(1.0)
        stream.step()
    stream.close()


@pytest.fixture
def service(api):
    return Service(api.engine)


def test_an_incident_is_explained_and_its_history_stays_short(api, service):
    train(service, service.started(), SLOW_STEP + 30)
    (incident,) = api.get("/api/v1/incidents?kind=straggler").json()["items"]
    path = f"/api/v1/incidents/{incident['short_id']}"
    found = api.get(f"{path}/why").json()
    assert found["incident"] == incident["id"]
    (told,) = found["items"]
    assert (told["kind"], told["scope"], told["unit"]) == ("straggler", "rank:1", "ratio")
    assert told["points"]["step"][-1] == incident["detected_step"]
    assert told["points"]["value"][-1] >= told["points"]["threshold"][-1]
    assert sum(told["rows"].values()) == incident["detected_step"] + 1
    assert all("why" not in one["fields"] for one in api.get(path).json()["history"])


def test_a_silent_job_says_what_is_judged_and_how_small_a_fault_would_be_found(api, service):
    train(service, service.started(), 100)
    found = api.get("/api/v1/jobs/gpt/judged").json()
    assert found["at_unix_ns"] > 0
    straggler = next(one for one in found["items"] if one["kind"] == "straggler")
    assert (straggler["judged"], straggler["why_not"]) == (True, "")
    assert straggler["rows"] + sum(straggler["left_out"].values()) == 100
    sizes = {one["rows"]: one["size"] for one in straggler["smallest"][0]["sizes"]}
    assert 1.01 < sizes[64] <= sizes[6] < 1.5
    norm = next(one for one in found["items"] if one["kind"] == "grad_norm")
    assert (norm["judged"], norm["rows"], norm["smallest"]) == (False, 0, [])
    assert norm["why_not"] == "what it judges is not measured"
    assert "nonfinite" in [rule["kind"] for rule in found["rules"]]


def test_an_incident_of_an_older_version_has_no_explanation(api):
    add(api.engine, Incident, incident_row())
    assert api.get("/api/v1/incidents/inc_1/why").json()["items"] == []


def test_who_may_not_see_a_job_learns_nothing_of_it(api, service):
    train(service, service.started(), SLOW_STEP + 30)
    (incident,) = api.get("/api/v1/incidents").json()["items"]
    other = api.token(Scope.READ, job="other")
    for path in (f"/api/v1/incidents/{incident['id']}/why", "/api/v1/jobs/gpt/judged"):
        assert api.get(path, token=other).status_code in (403, 404)
    assert api.get("/api/v1/jobs/unknown/judged").status_code == 404


def test_of_a_job_without_a_snapshot_nothing_is_known(api):
    add(api.engine, Job, job_row("new"))
    found = api.get("/api/v1/jobs/new/judged").json()
    assert (found["at_unix_ns"], found["items"]) == (None, [])


def stored(api, ranks: int, steps: int) -> None:
    add(api.engine, Job, job_row("j", world_size=ranks, step=steps))
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
