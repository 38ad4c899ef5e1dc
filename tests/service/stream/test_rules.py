"""Rules on metrics in a stream: they hold from their place in the control log on, whatever happens to the process."""

import pytest
from sqlalchemy import select

from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, Condition, MetricRule
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import Judgement, RulesSet, decode_control, encode_control
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store import models
from rankwatch_service.stream.saved import pack, unpack
from tests.support.service.stream import Service
from tests.support.values.batches import table

HIGH = MetricRule("high", "memory", Condition.ABOVE, 10.0, jobs=("gp*",))


@pytest.fixture
def service(engine):
    return Service(engine)


def log(service, stream, *values, job="gpt", first=0):
    for step, value in enumerate(values, first):
        columns = {"memory": [value] * 2, "loss": [2.0] * 2, "step_time_s": [0.5] * 2}
        service.send(job, steps=table([step] * 2, [0, 1], **columns))
        service.clock.advance(1.0)
        stream.step()


def incidents(service, *columns):
    chosen = [getattr(models.Incident, name) for name in columns or ("job", "state")]
    query = (
        select(*chosen)
        .where(models.Incident.kind == "metric")
        .order_by(models.Incident.detected_unix_ns, models.Incident.id)
    )
    with service.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


def test_a_rule_holds_from_its_record_on_and_for_the_jobs_of_its_patterns(service):
    stream = service.started()
    log(service, stream, 5.0, 11.0, 11.0)
    log(service, stream, 11.0, job="other")
    assert incidents(service) == []
    service.tell(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, first=3)
    log(service, stream, 11.0, job="other", first=1)
    assert incidents(service, "job", "scope", "severity", "onset_step") == [("gpt", "rule:high", "warning", 3)]
    log(service, stream, 11.0, 11.0, job="gpx")  # a job that began later
    assert incidents(service) == [("gpt", "open"), ("gpx", "open")]


def test_a_rule_that_is_deleted_ends_its_incidents(service):
    stream = service.started()
    service.tell(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, 11.0)
    service.tell(ALL_JOBS, RulesSet(()))
    log(service, stream, 11.0, first=2)
    assert incidents(service) == [("gpt", "resolved")]


def test_what_a_person_resolves_is_accepted_until_it_was_over(service):
    stream = service.started()
    service.tell(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, 11.0)
    ((incident,),) = incidents(service, "id")
    service.tell("gpt", Judgement(incident, "resolved", "ann"))
    log(service, stream, *[11.0] * 5, first=2)
    assert incidents(service) == [("gpt", "resolved")]
    log(service, stream, 9.0, 11.0, first=7)
    assert incidents(service) == [("gpt", "resolved"), ("gpt", "open")]


@pytest.mark.parametrize("saves", [True, False], ids=["from a snapshot", "by a replay"])
def test_after_a_restart_the_same_rules_hold(service, saves):
    stream = service.started()
    service.tell(ALL_JOBS, RulesSet((MetricRule("held", "memory", Condition.ABOVE, 10.0, hold_s=5.0),)))
    log(service, stream, 5.0, 11.0, 11.0)
    if saves:
        for name in (ALL_JOBS, "gpt"):
            stream.save(name)
    stream = service.started()
    log(service, stream, 11.0, 11.0, 11.0, 11.0, first=3)
    assert incidents(service, "state", "onset_step", "detected_step") == [("open", 1, 6)]


def test_an_idle_job_comes_back_under_the_rules_that_were_set_meanwhile(service):
    stream = service.started()
    log(service, stream, 5.0, 5.0)
    for _ in range(4):
        service.clock.advance(1_000.0)
        stream.step()
    stream.save_due()
    service.tell(ALL_JOBS, RulesSet((HIGH,)))
    service.clock.advance(1.0)
    stream.step()
    log(service, stream, 11.0, 11.0, first=2)
    assert incidents(service) == [("gpt", "open")]


def test_rules_beyond_the_limit_of_a_job_are_counted(service):
    stream = service.started()
    rules = [MetricRule(f"r{n}", "memory", Condition.ABOVE, 10.0) for n in range(RULES_PER_JOB_MAX + 3)]
    service.tell(ALL_JOBS, RulesSet(tuple(rules)))
    log(service, stream, 5.0, 5.0)
    (dropped,) = service.column(select(models.Job.dropped))
    assert dropped["metric_rules"] == 3


def test_the_rules_in_force_survive_their_record_and_their_snapshot():
    record = RulesSet((HIGH, MetricRule("moved", "kl", Condition.CHANGE)))
    assert decode_control(encode_control(record)) == record
    settings = SettingsInForce()
    settings.take(record)
    assert SettingsInForce.restored(unpack(pack(settings.state()))).rules == record.rules
    assert [rule.name for rule in settings.copy().rules_of("other")] == ["moved"]
