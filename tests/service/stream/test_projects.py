"""What stream knows of projects decides who is notified and what is done, and a replay decides the same."""

import json

import pytest
from sqlalchemy import insert, select

from rankwatch_service.job.job import REST_AFTER_S
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy import settings_in_force
from rankwatch_service.policy.control_records import (
    JobDeleted,
    JobProject,
    PolicyRuleRecord,
    PolicySet,
    ReceiverRoute,
    ReceiversSet,
)
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.stream.saved import pack
from tests.support.service.stream import Service
from tests.support.values.batches import table

NLP = JobProject("gpt", "nlp", "ann")


@pytest.fixture
def service(engine):
    service = Service(engine)
    routes = tuple(ReceiverRoute(project, projects=(project,)) for project in ("nlp", "vision"))
    service.tell(ALL_JOBS, ReceiversSet(routes))
    return service


def fall_ill(service, job="gpt", step=10):
    service.send(job, steps=table([step] * 2, [0, 1], loss=[float("nan"), 2.0]))


def step(service, stream):
    service.clock.advance(1.0)
    stream.step()


def told(service):
    query = select(models.Outbox.receiver).order_by(models.Outbox.created_unix_ns, models.Outbox.id)
    return service.column(query)


def state(stream, job="gpt"):
    return pack(stream.partition.jobs[job].state())


def restarted(service, stream):
    """Another stream, which replays all that came after the last snapshot."""
    stream.close()
    return service.started()


@pytest.mark.parametrize("when", ["before it begins", "with its first telemetry", "later"])
def test_an_incident_goes_to_the_receivers_of_its_project_whenever_the_project_was_set(service, when):
    stream = service.started()
    if when == "before it begins":
        service.tell("gpt", NLP)
        step(service, stream)
    service.train(*range(10))
    if when == "with its first telemetry":
        service.tell("gpt", NLP)
    step(service, stream)
    if when == "later":
        service.tell("gpt", NLP)
    step(service, stream)
    fall_ill(service)
    step(service, stream)
    assert told(service) == ["nlp"]
    (body,) = service.column(select(models.Outbox.body))
    data = json.loads(body)["data"]
    assert (data["project"], data["owner"]) == ("nlp", "ann")
    assert stream.partition.settings.waiting == {}


def test_a_job_that_is_moved_notifies_the_receivers_of_its_new_project(service):
    stream = service.started()
    service.tell("gpt", NLP)
    service.train(*range(10))
    step(service, stream)
    service.tell("gpt", JobProject("gpt", "vision"))
    step(service, stream)
    fall_ill(service)
    step(service, stream)
    assert told(service) == ["vision"]


def test_a_rule_of_a_project_decides_about_its_jobs_alone(service):
    stream = service.started()
    rule = PolicyRuleRecord("stop-nlp", "", "", "", 0.0, "suggest", "stop", project="nlp")
    service.tell(ALL_JOBS, PolicySet(False, (rule,), {}))
    service.tell("gpt", NLP)
    for job in ("gpt", "other"):
        service.train(*range(10), job=job)
    step(service, stream)
    for job in ("gpt", "other"):
        fall_ill(service, job)
    step(service, stream)
    query = select(models.Incident.suggestion).order_by(models.Incident.job)
    assert [one["policy"]["action"] for one in service.column(query)] == ["stop", ""]


def test_a_replay_ends_in_the_same_state_also_while_a_job_waits_to_begin(service):
    stream = service.started()
    service.tell("gpt", NLP)
    service.tell("waits", JobProject("waits", "vision"))
    step(service, stream)
    service.train(*range(10))
    step(service, stream)
    before = state(stream)
    stream = restarted(service, stream)
    assert state(stream) == before
    assert list(stream.partition.settings.waiting) == ["waits"]
    service.train(0, job="waits")
    step(service, stream)
    assert stream.partition.jobs["waits"].whose == JobProject("waits", "vision")


def test_an_idle_job_keeps_its_project(service):
    stream = service.started()
    service.tell("gpt", NLP)
    service.train(*range(10))
    step(service, stream)
    service.clock.advance(REST_AFTER_S + 1)
    for _ in range(3):
        stream.step()
        service.clock.advance(61.0)
    service.train(10)
    step(service, stream)
    assert stream.partition.jobs["gpt"].whose == NLP


def test_a_deleted_job_loses_its_project(service):
    stream = service.started()
    with write(service.engine) as connection:
        connection.execute(insert(models.JobProject).values(job="gpt", project="nlp", owner="ann"))
    service.tell("gpt", NLP)
    service.train(*range(10))
    step(service, stream)
    service.tell("gpt", JobDeleted("gpt"))
    step(service, stream)
    service.seq.clear()
    service.train(0)
    step(service, stream)
    assert stream.partition.jobs["gpt"].whose == JobProject("gpt")
    assert service.column(select(models.JobProject.job)) == []


def test_a_job_without_snapshot_has_the_project_of_the_table(service):
    stream = service.started()
    with write(service.engine) as connection:
        connection.execute(insert(models.JobProject).values(job="gpt", project="nlp", owner="ann"))
    service.train(*range(10))
    step(service, stream)
    stream.close()
    with write(service.engine) as connection:
        for table_name in ("snapshot", "log_record"):
            connection.exec_driver_sql(f"DELETE FROM {table_name}")
    stream = service.started()
    service.train(11)
    step(service, stream)
    assert stream.partition.jobs["gpt"].whose == NLP


def test_jobs_that_wait_have_a_limit_beyond_which_the_first_makes_room(service, monkeypatch):
    monkeypatch.setattr(settings_in_force, "WAITING_MAX", 2)
    stream = service.started()
    for job in ("a", "b", "c"):
        service.tell(job, JobProject(job, "nlp"))
    step(service, stream)
    assert list(stream.partition.settings.waiting) == ["b", "c"]
