"""A restart of the service changes nothing about what is open: jobs that died stay as they were told."""

import math

import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch_service.policy.control_records import Judgement
from rankwatch_service.store import models
from rankwatch_service.store.engine import read
from tests.support.service.stream import Service
from tests.support.store.database import new_database
from tests.support.values.batches import progress, ranks, table

ALIVE_S = 40


@pytest.fixture
def service(tmp_path):
    service = Service(new_database(tmp_path))
    yield service
    service.engine.dispose()


def on_two_hosts() -> tuple[wire.RankInfo, ...]:
    return (*ranks(2, "node-0", [0]), *ranks(2, "node-1", [1]))


def alive(service, job, step, loss=2.0, **fields):
    rows = table([step] * 2, [0, 1], loss=[loss, 2.0], step_time_s=[1.0] * 2)
    first = {"ranks": on_two_hosts()} if step == 0 else {}
    service.send(job, progress=(progress(0, step), progress(1, step)), steps=rows, **first, **fields)


def standing(service, job, step, age_s):
    ages = {"phase_age_s": age_s, "step_age_s": age_s}
    service.send(job, progress=(progress(0, step, **ages), progress(1, step, **ages)))


def killed(service, job, step):
    ended = {"code": None, "signal": 9, "how": "pidfd", "error": ""}
    service.send(job, events=(wire.Event("process_exit", 1, rank=1, step=step, fields=ended),))


def second(service, stream):
    service.clock.advance(1.0)
    stream.step()


def told(service):
    """(job, kind, what) of every transition, in the order in which they came."""
    incident, transition = models.Incident.__table__, models.IncidentTransition.__table__
    joined = transition.join(incident, incident.c.id == transition.c.incident_id)
    query = select(incident.c.job, incident.c.kind, transition.c.what).select_from(joined)
    with read(service.engine) as connection:
        return [tuple(row) for row in connection.execute(query.order_by(incident.c.job, transition.c.number))]


def states(service):
    columns = select(models.Incident.job, models.Incident.kind, models.Incident.state)
    with read(service.engine) as connection:
        return sorted(tuple(row) for row in connection.execute(columns))


def dead_jobs(service):
    """A stream that has seen four jobs die, each in its way."""
    stream = service.started()
    for step in range(ALIVE_S):
        for job in ("silent", "hung", "lost"):
            alive(service, job, step)
        alive(service, "spoilt", step, loss=math.nan if step == ALIVE_S - 1 else 2.0)
        second(service, stream)
    killed(service, "lost", ALIVE_S)
    for age_s in range(1, 16):
        standing(service, "hung", ALIVE_S - 1, float(age_s))
        second(service, stream)
    for _ in range(30):
        second(service, stream)
    return stream


def test_what_is_open_of_dead_jobs_stays_as_it_is_over_restarts(service):
    stream = dead_jobs(service)
    assert {(job, kind) for job, kind, _ in states(service)} == {
        ("silent", "telemetry_lost"),
        ("hung", "hang"),
        ("lost", "rank_lost"),
        ("spoilt", "nonfinite"),
        ("spoilt", "telemetry_lost"),
    }
    with read(service.engine) as connection:
        incidents = connection.execute(select(models.Incident.job, models.Incident.id)).all()
    for job, incident in incidents:
        if job in ("silent", "lost"):
            service.tell(job, Judgement(incident, "acknowledged", "ada"))
    second(service, stream)
    before = told(service), states(service)
    assert {state for _, _, state in before[1]} == {"open", "acknowledged"}
    for down_s in (2, 30, 900):
        stream.close()
        service.clock.advance(down_s)
        stream = service.started()
        for _ in range(20):
            second(service, stream)
    assert (told(service), states(service)) == before
