"""Why an incident was opened, and what is judged of a job, from telemetry through the stream to REST."""

import numpy as np
import pytest

from rankwatch_service.access.grants import Scope
from rankwatch_service.store.models import Incident, Job
from tests.support.service.stream import Service
from tests.support.store.database import add, job_row
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
    (reported,) = found["items"]
    assert (reported["kind"], reported["scope"], reported["unit"]) == ("straggler", "rank:1", "ratio")
    assert reported["points"]["step"][-1] == incident["detected_step"]
    assert reported["points"]["value"][-1] >= reported["points"]["threshold"][-1]
    assert sum(reported["rows"].values()) == incident["detected_step"] + 1
    assert all("why" not in one["fields"] for one in api.get(path).json()["history"])
    other = api.token(Scope.READ, job="other")
    for hidden in (f"{path}/why", "/api/v1/jobs/gpt/judged"):
        assert api.get(hidden, token=other).status_code == 404
    assert api.get("/api/v1/jobs/unknown/judged").status_code == 404


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


def test_an_incident_that_was_reported_without_an_explanation_has_none(api):
    add(api.engine, Incident, incident_row())
    assert api.get("/api/v1/incidents/inc_1/why").json()["items"] == []


def test_of_a_job_without_a_snapshot_nothing_is_known(api):
    add(api.engine, Job, job_row("new"))
    found = api.get("/api/v1/jobs/new/judged").json()
    assert (found["at_unix_ns"], found["items"]) == (None, [])
