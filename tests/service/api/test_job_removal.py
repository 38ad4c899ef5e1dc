"""Deleting jobs by REST, on both databases. What stream does is in `stream/test_deleted_jobs.py`."""

import threading

import pytest
from sqlalchemy import delete, insert, select

from rankwatch.wire import View
from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.routes import jobs
from rankwatch_service.orders.running_attempt import ReceivedView, store_views
from rankwatch_service.policy.control_records import JobDeleted, decode_control
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Command, Incident, Job, Order, SeriesChunk
from tests.support.service.process import until
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
JOB = "/api/v1/jobs/gpt-small"


def job_row(api, name, ago_s, **columns):
    seen = api.clock.unix_ns() - int(ago_s * 1e9)
    row = {"state": "ended", "attempt": "launch.0", "world_size": 4, "ranks_reporting": 0, "step": 500}
    return row | {"name": name, "first_seen_unix_ns": seen, "last_seen_unix_ns": seen, "dropped": {}} | columns


@pytest.fixture
def old(api):
    """An ended job of yesterday with an incident, and one that runs."""
    with write(api.engine) as connection:
        connection.execute(insert(Job).values(**job_row(api, "gpt-small", 86_400)))
        connection.execute(insert(Job).values(**job_row(api, "other", 1, state="running")))
        connection.execute(insert(Incident).values(**incident_row()))
        chunk = {"job": "gpt-small", "attempt": "l.0", "metric": "loss", "first_step": 0, "steps": 1, "ranks": 1}
        chunk |= {"data": b"x", "size_bytes": 1}
        chunk["at_unix_ns"] = api.clock.unix_ns()  # older rows would be removed by retention meanwhile
        connection.execute(insert(SeriesChunk), [{**chunk, "chunk": number} for number in range(1_200)])
    return api


def names(api, path):
    return [one.get("name") or one["id"] for one in api.get(path).json()["items"]]


def audited(api):
    rows = api.get("/api/v1/audit").json()["items"]
    return [(row["action"], row["target"]) for row in rows if row["action"].startswith("job.")]


def requested(api):
    records = [decode_control(one.value) for one in api.controls.read(0, 1_000)]
    return [one.job for one in records if isinstance(one, JobDeleted)]


def act_as_stream(api):
    """Delete the job's row once its deletion is requested."""

    def work():
        until("request", lambda: requested(api), 30.0)
        with write(api.engine) as connection:
            connection.execute(delete(Job).where(Job.name == "gpt-small"))

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
    with read(old.engine) as connection:
        assert connection.scalars(select(SeriesChunk.chunk)).all() == []
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
    view = ReceivedView(View("gpt-small", "launch.0", "h", "b", 0, ()))
    store_views(old.engine, [view], old.clock.unix_ns())
    assert old.ask("DELETE", JOB).status_code == 409
    assert requested(old) == []


def test_a_job_with_an_open_order_is_not_deleted(old):
    old.app.state.context.driver.stop()  # it would close an order of which nobody reports
    with write(old.engine) as connection:
        times = {"requested_unix_ns": 1, "expires_unix_ns": 2**62}
        what = {"job": "gpt-small", "attempt": "launch.0", "action": "pause"}
        connection.execute(
            insert(Command).values(
                id="cmd_1", params={}, reason="", requested_by="ann", state="applied", result="", **what, **times
            )
        )
        numbers = {"step": 1, "try_number": 1, "checkpoint_step": -1, "k": 0, "version": 1}
        words = {"checkpoint": "", "location": "", "culprits": [], "detail": "", "mode": ""}
        times = {"phase_unix_ns": 1, "lease_unix_ns": 2**62}
        connection.execute(
            insert(Order).values(id="ord_1", command_id="cmd_1", phase="do", **what, **numbers, **words, **times)
        )
    answer = old.ask("DELETE", JOB)
    assert (answer.status_code, "open order (pause)" in answer.json()["detail"]) == (409, True)
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
