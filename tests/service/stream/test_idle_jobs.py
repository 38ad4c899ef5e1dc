"""Idle jobs are evicted from memory, and loaded as they were."""

import pytest
from sqlalchemy import delete, func, select, update

from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import IncidentReview
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.stream import loop, partition
from rankwatch_service.stream.saved import FencedError
from tests.support.values.batches import progress, ranks, table


def launch_ill(service):
    """Another launch, with an incident in its first step."""
    service.send(attempt="m.0", ranks=ranks(2))
    service.ill(attempt="m.0", step=3)


@pytest.fixture
def rested(service, stream):
    """A stream whose one job has an open incident and rests."""
    service.train(*range(10))
    service.ill()
    stream.step()
    service.rest(stream)
    stream.save_due()
    return stream


def open_incidents(stream):
    return [incident.id for incident in stream.partition.jobs["gpt"].correlator.open]


def incidents(service):
    return service.column(select(models.Incident.id).order_by(models.Incident.detected_unix_ns))


def test_an_idle_job_is_in_one_row_and_nowhere_else(service, rested):
    assert rested.partition.jobs == {}
    assert service.column(select(models.IdleJob.job)) == ["gpt"]
    assert service.column(select(models.Snapshot.job).distinct()) in ([], [ALL_JOBS])


def test_the_log_is_not_kept_for_an_idle_job(service, rested):
    service.train(*range(10), job="other")
    for _ in range(4):
        service.clock.advance(loop.SNAPSHOT_S)
        service.train(10, job="other")
        rested.step()
        rested.save_due()
    assert service.log.begin(0) > 10
    started = service.stream().start()
    assert started.jobs_without_snapshot == ()


def test_a_job_that_comes_back_goes_on_where_it_was(service, rested):
    before = service.column(select(models.Attempt.number))
    launch_ill(service)
    rested.step()
    (job,) = rested.partition.jobs.values()
    assert not job.is_idle
    assert len(incidents(service)) == 2
    assert open_incidents(rested) == incidents(service)
    assert service.column(select(models.Attempt.number).order_by(models.Attempt.number)) == [*before, 2]


def test_a_judgement_on_an_incident_of_an_idle_job_counts(service, rested):
    (incident,) = service.column(select(models.Incident.id))
    service.append("gpt", IncidentReview(incident, "resolved", "ann"))
    service.append("nobody", IncidentReview("inc", "resolved", "ann"))
    service.clock.advance(1.0)
    rested.step()
    rested.save_due()
    assert service.column(select(models.Incident.state)) == ["resolved"]
    assert rested.partition.jobs == {}, "a judgement does not make a job active"
    again = service.stream()
    assert again.start().jobs_without_snapshot == ()
    service.send(attempt="m.0", ranks=ranks(2))
    again.step()
    assert again.partition.jobs["gpt"].correlator.open == []


def test_only_active_jobs_count_against_the_limit(service, rested, monkeypatch):
    monkeypatch.setattr(partition, "JOBS_MAX", 1)
    service.train(1, job="other")
    rested.step()
    assert set(rested.partition.jobs) == {"other"}
    service.train(1, job="third")
    rested.step()
    assert service.column(select(models.DeadLetter.detail)) == [
        "partition 0, position 12: more than 1 jobs in one partition"
    ]


@pytest.fixture(params=[{"data": b"\x00"}, {"version": "0"}], ids=["damaged", "other version"])
def returned(request, service, rested):
    """A stream whose job has come back although its row cannot be read."""
    with write(service.engine) as connection:
        connection.execute(update(models.IdleJob).values(request.param))
    launch_ill(service)
    rested.step()
    return rested


def test_a_row_that_cannot_be_read_costs_the_past_and_no_incident(service, returned):
    assert len(incidents(service)) == 2
    assert open_incidents(returned) == incidents(service)
    assert service.column(select(models.Attempt.number).order_by(models.Attempt.number)) == [1, 2]


def test_a_row_that_cannot_be_read_in_a_replay_costs_no_incident_either(service, returned):
    second = incidents(service)[1]
    service.append("gpt", IncidentReview(second, "resolved", "ann"))
    service.clock.advance(1.0)
    returned.step()
    again = service.started()
    service.send(attempt="m.0", steps=table([4] * 2, [0, 1], loss=[2.0] * 2))
    again.step()
    assert open_incidents(again) == open_incidents(returned) == incidents(service)[:1]


def test_a_replay_accepts_the_jobs_that_the_stream_had_accepted_and_no_other(service, monkeypatch):
    monkeypatch.setattr(partition, "JOBS_MAX", 1)
    stream = service.started()
    service.train(*range(3))
    service.train(*range(3), job="late")
    stream.step()
    assert len(service.column(select(models.DeadLetter.reason))) == 3
    service.rest(stream)
    stream._evict(["gpt"])
    again = service.started()
    assert again.partition.jobs == {}


def test_an_owner_that_was_fenced_evicts_nothing(service):
    old = service.started()
    service.train(*range(10))
    old.step()
    service.rest(old)
    service.started().close()
    kept = service.column(select(func.count(models.Snapshot.id)))
    with pytest.raises(FencedError):
        old.save_due()
    with pytest.raises(FencedError):
        old.save("gpt")
    assert service.column(select(models.IdleJob.job)) == []
    whole = select(func.count(models.Snapshot.id)).where(models.Snapshot.complete)
    assert service.column(whole) == kept


def test_a_database_that_fails_while_a_job_is_looked_up_refuses_no_record(service, rested, monkeypatch):
    service.send(attempt="m.0", ranks=ranks(2))

    def broken(*_):
        raise OSError("the database is gone")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "load_idle_job", broken)
        with pytest.raises(OSError, match="gone"):
            rested.step()
    again = service.started()
    assert again.step() == 1
    assert service.column(select(models.DeadLetter.reason)) == []
    assert set(again.partition.jobs) == {"gpt"}


def test_an_idle_job_is_restored_from_the_tables_where_the_log_forgot_needed_records(service, rested):
    service.train(*range(5), job="other")
    rested.step()
    with write(service.engine) as connection:
        connection.execute(delete(models.LogRecord).where(models.LogRecord.position < 13))
    again = service.stream()
    assert again.start().jobs_without_snapshot.count("gpt") == 1
    launch_ill(service)
    again.step()
    assert len(incidents(service)) == 2


def live(service, stream, attempt, steps, pause_s):
    """Steps of a second, then a pause of all ranks outside of their step."""
    for second in range(steps + pause_s):
        step, outside_s = min(second, steps), float(second - steps)
        ages = {"step_age_s": 0.5 + max(outside_s, 0.0), "outside_s": max(outside_s, -1.0)}
        blocks = tuple(progress(rank, step, **ages) for rank in range(2))
        sent = {"sent_unix_ns": service.clock.now_ns, "progress": blocks}
        service.send(attempt=attempt, **sent, **({"ranks": ranks(2)} if second == 0 else {}))
        service.clock.advance(1.0)
        stream.step()


def test_how_long_a_job_pauses_is_known_after_it_was_idle(service, stream):
    live(service, stream, "l.0", 12, 30)
    service.send(attempt="l.0", progress=tuple(progress(rank, 13) for rank in range(2)))
    stream.step()
    service.rest(stream)
    stream.save_due()
    live(service, stream, "m.0", 12, 305)
    assert service.column(select(models.Incident.kind)) == ["hang"]
    assert service.column(select(models.Incident.severity)) == [
        "critical"
    ]  # after 5 minutes; without a known pause in 15
