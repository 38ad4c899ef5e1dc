"""A deleted job is nowhere any more, a replay decides the same, and later telemetry begins a new job."""

import pytest
from sqlalchemy import func, insert, select

from rankwatch_service.policy.control_records import JobDeleted
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.job_removal import OF_JOB
from rankwatch_service.store.models import Base
from tests.support.service.stream import Charted

KEPT = {
    "policy_rule": "a rule is a setting",
    "silence": "a silence is a setting, and ends by itself",
    "stream_grant": "a replay decides as at the first time; removed with the records of the log",
    "token": "what a token may do is not what was stored of a job",
}
"""Tables with a column `job` whose rows a deletion leaves alone."""


@pytest.fixture
def service(engine):
    return Charted(engine)


@pytest.fixture
def stream(service):
    """It has seen two jobs, each with an incident."""
    stream = service.started()
    for job in ("gpt", "other"):
        service.train(*range(10), job=job)
        service.ill(job)
    stream.step()
    return stream


def delete(service, stream, job="gpt"):
    service.clock.advance(1.0)
    service.append(job, JobDeleted(job))
    stream.step()


def begin_again(service, stream, *steps, job="gpt", after_s=1.0):
    service.clock.advance(after_s)
    service.seq.pop(job)
    service.train(*steps, job=job)
    stream.step()


def tables_with(service, job):
    """Names of tables that have rows of the job, without those that a deletion leaves alone."""
    found = set()
    with read(service.engine) as connection:
        for table in (table for name, table in Base.metadata.tables.items() if name not in KEPT):
            column = table.c.name if table.name == "job" else table.c.get("job")
            if column is not None and connection.scalar(select(func.count()).where(column == job)):
                found.add(table.name)
    return found


def test_every_table_that_names_a_job_is_deleted_from_or_says_why_not():
    apart = {"series_chunk", "series_rollup", "feed", "command_order"}  # orders are deleted with their command
    named = {table.name for table in Base.metadata.tables.values() if "job" in table.c}
    assert named == {model.__tablename__ for model in OF_JOB} | apart | KEPT.keys()


def test_nothing_of_a_deleted_job_is_left_and_nothing_of_another_is_touched(service, stream):
    with write(service.engine) as connection:
        (incident,) = connection.scalars(select(models.Incident.id).filter_by(job="gpt"))
        sent = {"receiver": "r", "transition": 1, "body": b"", "state": "delivered", "tries": 1, "created_unix_ns": 1}
        connection.execute(insert(models.Outbox).values(id="m", incident_id=incident, next_try_unix_ns=1, **sent))
        connection.execute(insert(models.Delivery).values(outbox_id="m", at_unix_ns=1, error="", seconds=0.1))
        slow = {"host": "h", "device_uuid": "", "kind": "straggler", "severity": "warning", "at_unix_ns": 1}
        for job in ("gpt", "other"):
            connection.execute(insert(models.HostRecord).values(id=job, job=job, incident_id=incident, **slow))
    stream.close()
    before = tables_with(service, "other")
    assert tables_with(service, "gpt") == before >= {"incident", "series_chunk", "snapshot", "host_record"}
    delete(service, stream)
    assert tables_with(service, "gpt") == {"feed"}
    assert service.column(select(models.Feed.data).filter_by(job="gpt")) == [{"state": "deleted"}]
    for model in (models.Outbox, models.Delivery):
        assert service.column(select(func.count()).select_from(model)) == [0]
    assert service.column(select(models.IncidentTransition.incident_id).distinct()) == service.column(
        select(models.Incident.id)
    )
    assert tables_with(service, "other") == before
    assert set(stream.partition.jobs) == {"other"}


def test_a_browser_sees_the_deletion_although_the_newest_rows_of_the_feed_are_gone(service, stream):
    (newest,) = service.column(select(func.max(models.Feed.id)))
    delete(service, stream)
    assert service.column(select(models.Feed.job).where(models.Feed.id > newest).limit(1)) == ["gpt"]


def test_telemetry_after_the_deletion_begins_a_new_job(service, stream):
    delete(service, stream)
    begin_again(service, stream, 0, 1)
    service.ill(step=2)
    stream.step()
    assert len(service.column(select(models.Incident.id).filter_by(job="gpt"))) == 1
    assert service.column(select(models.Attempt.number).filter_by(job="gpt")) == [1]
    assert service.column(select(models.Job.first_seen_unix_ns).filter_by(name="gpt")) > service.column(
        select(models.Job.first_seen_unix_ns).filter_by(name="other")
    )


def test_what_comes_before_and_after_the_deletion_in_one_batch_is_distinguished(service):
    stream = service.started()
    service.train(*range(10))
    service.ill()
    service.clock.advance(1.0)
    service.append("gpt", JobDeleted("gpt"))
    service.clock.advance(1.0)
    service.seq.clear()
    service.train(0, 1)
    stream.step()
    assert service.column(select(models.Incident.id)) == []
    assert stream.partition.jobs["gpt"].correlator.open == []
    assert service.column(select(models.Job.step)) != [10]


def test_a_crash_before_the_series_are_removed_leaves_none_behind(service, stream, monkeypatch):
    stream.close()
    monkeypatch.setattr(SeriesWriter, "delete", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        delete(service, stream)
    assert "series_chunk" in tables_with(service, "gpt")
    monkeypatch.undo()
    service.started()
    assert tables_with(service, "gpt") == {"feed"}


def test_an_idle_job_is_deleted_from_its_row(service, stream):
    service.rest(stream)
    stream.save_due()
    assert service.column(select(models.IdleJob.job).order_by(models.IdleJob.job)) == ["gpt", "other"]
    delete(service, stream)
    assert service.column(select(models.IdleJob.job)) == ["other"]
    again = service.started()
    assert again.partition.jobs == {}
    begin_again(service, again, 0)
    assert service.column(select(models.Attempt.number).filter_by(job="gpt")) == [1]


def test_a_request_that_is_older_than_the_job_of_its_name_does_not_delete_it(service, stream):
    delete(service, stream)
    service.append("gpt", JobDeleted("gpt"))  # a second request, which stream reads late
    late, service.controls.read = service.controls.read, lambda *_: []
    begin_again(service, stream, 0, 1)
    service.controls.read = late
    service.clock.advance(1.0)
    stream.step()
    assert set(stream.partition.jobs) == {"gpt", "other"}
    assert service.column(select(models.Job.name).order_by(models.Job.name)) == ["gpt", "other"]
