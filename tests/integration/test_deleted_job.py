"""A job is deleted in a service that runs, by commands, on both databases."""

import pytest
from sqlalchemy import select, update

from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import Incident, Job, SeriesChunk
from tests.support.service.machine import machines
from tests.support.service.process import until
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.ci]
FIVE_MINUTES_NS = 300 * 10**9


@pytest.fixture(params=[pytest.param("sqlite", marks=long_trial), "postgresql"])
def service(request, tmp_path):
    with machines(request, tmp_path, request.param, 1) as (machine,):
        machine.start()
        yield machine


def train(service, *arguments):
    """A job from its begin to its end."""
    job = service.simulated("--steps", "120", "--speed", "0", *arguments)
    job.start()
    assert job.process.wait(120) == 0, job.said()
    return until("end of the job", lambda: [one for one in service.items("jobs") if one["state"] == "ended"])[0]


def delete_after_five_minutes(service, engine):
    """Date the last report back until the job is deleted: stream writes the row anew while its ranks become silent."""

    def delete():
        with write(engine) as connection:
            earlier = Job.last_seen_unix_ns - FIVE_MINUTES_NS
            connection.execute(update(Job).values(last_seen_unix_ns=earlier))
        status, said = service.command("jobs", "delete", "gpt", typed="gpt\n")
        return status == 0 and "deleted gpt" in said

    until("deletion of the job", delete)


def test_a_deleted_job_is_gone_also_after_a_restart_and_sends_as_a_new_one(service):
    train(service, "--fault", "nonfinite:rank=3,at=40")
    engine = open_engine(service.database_url)
    status, said = service.command("jobs", "delete", "gpt", typed="gpt\n")
    assert (status, "reported" in said) == (2, True), said
    delete_after_five_minutes(service, engine)
    service.stop()
    service.start()
    assert service.items("jobs") == []
    with read(engine) as connection:
        for column in (Incident.job, SeriesChunk.job):
            assert connection.scalars(select(column).limit(1)).all() == []
    assert ("job.delete", "gpt") in service.audit()
    train(service)
    (attempt,) = service.items("jobs/gpt/attempts")
    assert attempt["number"] == 1
    assert service.items("incidents") == []
    engine.dispose()
