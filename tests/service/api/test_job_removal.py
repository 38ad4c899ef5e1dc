"""Deleting jobs by REST, on both databases. What stream does is in `stream/test_deleted_jobs.py`."""

import threading

import pytest
from sqlalchemy import delete, select, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.api.routes import jobs
from rankwatch_service.policy.control_records import JobDeleted
from rankwatch_service.store.models import Incident, Job, Order, SeriesChunk
from tests.support.orders.rows import add_command
from tests.support.service.process import until
from tests.support.store.database import FAR_NS, add, change, job_row, report, values_of
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
JOB = "/api/v1/jobs/gpt-small"


def ended(api, name, ago_s, **columns):
    seen = api.clock.unix_ns() - int(ago_s * 1e9)
    return job_row(name, **{"state": "ended", "first_seen_unix_ns": seen, "last_seen_unix_ns": seen} | columns)


@pytest.fixture
def old(api):
    """An ended job of yesterday with an incident, and one that runs."""
    add(api.engine, Job, ended(api, "gpt-small", 86_400))
    add(api.engine, Job, ended(api, "other", 1, state="running"))
    add(api.engine, Incident, incident_row())
    chunk = {"job": "gpt-small", "attempt": "l.0", "metric": "loss", "first_step": 0, "steps": 1, "ranks": 1}
    chunk |= {"data": b"x", "size_bytes": 1}
    chunk["at_unix_ns"] = api.clock.unix_ns()  # older rows would be removed by retention meanwhile
    add(api.engine, SeriesChunk, *[{**chunk, "chunk": number} for number in range(1_200)])
    return api


def names(api, path):
    return [one.get("name") or one["id"] for one in api.get(path).json()["items"]]


def audited(api):
    rows = api.get("/api/v1/audit").json()["items"]
    return [(row["action"], row["target"]) for row in rows if row["action"].startswith("job.")]


def requested(api):
    return [record.job for record in api.reported(JobDeleted)]


def act_as_stream(api):
    """Delete the job's row once its deletion is requested."""

    def work():
        until("request", lambda: requested(api), 30.0)
        change(api.engine, delete(Job).where(Job.name == "gpt-small"))

    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_deleting_needs_admin(old):
    assert old.ask("DELETE", JOB, token=old.token(Scope.OPERATE)).status_code == 403
    assert old.ask("DELETE", JOB, token=old.token(Scope.COMMAND)).status_code == 403
    assert requested(old) == []


def test_a_deletion_is_requested_of_stream_audited_and_answered_when_stream_has_acted(old):
    stream = act_as_stream(old)
    answer = old.ask("DELETE", JOB)
    stream.join()
    assert (answer.status_code, answer.json()) == (200, {"name": "gpt-small", "deleted": True})
    assert requested(old) == ["gpt-small"]
    assert audited(old) == [("job.delete", "gpt-small")]
    assert values_of(old.engine, select(SeriesChunk.chunk)) == []
    assert old.ask("DELETE", JOB).status_code == 404


def test_a_deletion_that_stream_has_not_acted_on_is_answered_as_accepted(old, monkeypatch):
    monkeypatch.setattr(jobs, "STREAM_WAIT_S", 0.1)
    answer = old.ask("DELETE", JOB)
    assert (answer.status_code, answer.json()["deleted"]) == (202, False)


def test_a_repeated_request_with_one_key_is_one_deletion(old, monkeypatch):
    monkeypatch.setattr(jobs, "STREAM_WAIT_S", 0.1)
    for _ in range(2):
        assert old.ask("DELETE", JOB, key="k").status_code == 202
    assert requested(old) == ["gpt-small"]


def test_a_job_that_reported_within_minutes_is_not_deleted(old):
    answer = old.ask("DELETE", "/api/v1/jobs/other")
    assert (answer.status_code, "for 300 s" in answer.json()["detail"]) == (409, True)
    # The stream may be behind: then the agents' views are younger than the job's row.
    report(old.engine, "gpt-small", old.clock.unix_ns())
    assert old.ask("DELETE", JOB).status_code == 409
    assert requested(old) == []


def test_a_job_with_an_open_order_is_not_deleted(old):
    old.app.state.context.driver.stop()  # it would close an order of which nobody reports
    add_command(old.engine, FAR_NS, job="gpt-small", attempt="launch.0")
    change(old.engine, update(Order).values(job="gpt-small"))
    answer = old.ask("DELETE", JOB)
    assert (answer.status_code, "open order (checkpoint)" in answer.json()["detail"]) == (409, True)
    assert requested(old) == []


def test_many_series_are_removed_by_several_requests(old, monkeypatch):
    monkeypatch.setattr(jobs, "SERIES_S", 0.0)
    answer = old.ask("DELETE", JOB)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert requested(old) == []
    monkeypatch.undo()
    stream = act_as_stream(old)
    assert old.ask("DELETE", JOB).status_code == 200
    stream.join()
