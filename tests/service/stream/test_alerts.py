"""Alerts survive restarts of the stream: what began before one ends after it, and a replay ends where it was."""

from sqlalchemy import select

from rankwatch_service.incidents.correlator import QUIET_S
from rankwatch_service.policy.control_records import AlertsReceived, ReportedAlert
from rankwatch_service.store import models
from tests.support.service.stream import Service
from tests.support.values.batches import ranks


def step(service, stream):
    service.clock.advance(1.0)
    stream.step()


def report(service, *states, name="DiskFull"):
    told = [ReportedAlert(key, name, state, "critical", "full", ("node-1:9100",)) for key, state in states]
    service.tell("gpt", AlertsReceived(tuple(told)))


def incidents(service):
    columns = (models.Incident.scope, models.Incident.severity, models.Incident.state, models.Incident.hosts)
    with service.engine.connect() as connection:
        return [
            tuple(row)
            for row in connection.execute(
                select(*columns).order_by(models.Incident.detected_unix_ns, models.Incident.id)
            )
        ]


def test_an_alert_that_fires_through_restarts_is_one_incident_that_ends_with_it(engine):
    service = Service(engine)
    stream = service.started()
    service.send("gpt", ranks=ranks(2))
    step(service, stream)
    report(service, ("a", "firing"), ("b", "firing"))
    step(service, stream)
    firing = [("alert:DiskFull", "critical", "open", ["node-1"])]
    assert incidents(service) == firing
    stream = service.started()
    step(service, stream)
    assert incidents(service) == firing
    report(service, ("a", "resolved"))
    report(service, ("c", "firing"), name="LinkDown")
    step(service, stream)
    stream = service.started()
    step(service, stream)
    assert [state for _, _, state, _ in incidents(service)] == ["open", "open"]
    report(service, ("b", "expired"))
    step(service, stream)
    service.clock.advance(QUIET_S)
    step(service, stream)
    assert [state for _, _, state, _ in incidents(service)] == ["resolved", "open"]


def test_an_alert_about_a_job_that_stream_does_not_know_is_dropped(engine):
    service = Service(engine)
    stream = service.started()
    report(service, ("a", "firing"))
    step(service, stream)
    assert incidents(service) == []
