"""What people set decides whom stream notifies and what it does, from its position in the control log on."""

import json

import pytest
from sqlalchemy import insert, select

from rankwatch_detectors.metric_rule import RULES_PER_JOB_MAX, Condition, MetricRule
from rankwatch_service.incidents.hang import HangEvidence, StacksReceived
from rankwatch_service.job.detection import DetectionPipeline
from rankwatch_service.job.effects import Effects
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.orders import commands
from rankwatch_service.policy import settings_in_force
from rankwatch_service.policy.actions import CommandRequest
from rankwatch_service.policy.control_records import (
    IncidentReview,
    JobDeleted,
    JobOwnership,
    PolicyRuleRecord,
    PolicySet,
    PrecisionSet,
    RulesSet,
    decode_control,
    encode_control,
)
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from rankwatch_service.stream.saved import pack, unpack
from rankwatch_service.tuning import TuningSet, read_tunings
from tests.support.service.webhook_receiver import announce, route_all, subscribe
from tests.support.values.batches import table
from tests.support.values.incidents import NOON_UNIX_NS, announced, notified

NLP = JobOwnership("gpt", "nlp", "ann")
ROUTED = tuple(ReceiverRoute(project, projects=(project,)) for project in ("nlp", "vision"))


def reported(service):
    route_all(service.engine, service.clock.now_ns)
    query = select(models.Outbox.receiver).order_by(models.Outbox.created_unix_ns, models.Outbox.id)
    return service.column(query)


@pytest.mark.parametrize("when", ["before it begins", "with its first telemetry", "later"])
def test_an_incident_goes_to_the_receivers_of_its_project_whenever_the_project_was_set(service, stream, when):
    subscribe(service.engine, *ROUTED)
    if when == "before it begins":
        service.append("gpt", NLP)
        service.second(stream)
    service.train(*range(10))
    if when == "with its first telemetry":
        service.append("gpt", NLP)
    service.second(stream)
    if when == "later":
        service.append("gpt", NLP)
    service.second(stream)
    service.ill()
    service.second(stream)
    assert reported(service) == ["nlp"]
    (body,) = service.column(select(models.Outbox.body))
    data = json.loads(body)["data"]
    assert (data["project"], data["owner"]) == ("nlp", "ann")
    assert stream.partition.settings.waiting == {}


def test_a_job_that_is_moved_notifies_the_receivers_of_its_new_project(service, stream):
    subscribe(service.engine, *ROUTED)
    service.append("gpt", NLP)
    service.train(*range(10))
    service.second(stream)
    service.append("gpt", JobOwnership("gpt", "vision"))
    service.second(stream)
    service.ill()
    service.second(stream)
    assert reported(service) == ["vision"]


def test_a_rule_of_a_project_decides_about_its_jobs_alone(service, stream):
    rule = PolicyRuleRecord("stop-nlp", "", "", "", 0.0, "suggest", "stop", project="nlp")
    service.append(ALL_JOBS, PolicySet(False, (rule,), {}))
    service.append("gpt", NLP)
    for job in ("gpt", "other"):
        service.train(*range(10), job=job)
    service.second(stream)
    for job in ("gpt", "other"):
        service.ill(job)
    service.second(stream)
    query = select(models.Incident.suggestion).order_by(models.Incident.job)
    assert [one["policy"]["action"] for one in service.column(query)] == ["stop", ""]


def test_a_deleted_job_loses_its_project(service, stream):
    with write(service.engine) as connection:
        connection.execute(insert(models.JobOwnership).values(job="gpt", project="nlp", owner="ann"))
    service.append("gpt", NLP)
    service.train(*range(10))
    service.second(stream)
    service.append("gpt", JobDeleted("gpt"))
    service.second(stream)
    service.seq.clear()
    service.train(0)
    service.second(stream)
    assert stream.partition.jobs["gpt"].ownership == JobOwnership("gpt")
    assert service.column(select(models.JobOwnership.job)) == []


def test_a_job_without_snapshot_has_the_project_of_the_table(service, stream):
    with write(service.engine) as connection:
        connection.execute(insert(models.JobOwnership).values(job="gpt", project="nlp", owner="ann"))
    service.train(*range(10))
    service.second(stream)
    stream.close()
    with write(service.engine) as connection:
        for table_name in ("snapshot", "log_record"):
            connection.exec_driver_sql(f"DELETE FROM {table_name}")
    stream = service.started()
    service.train(11)
    service.second(stream)
    assert stream.partition.jobs["gpt"].ownership == NLP


def test_jobs_that_wait_have_a_limit_beyond_which_the_first_makes_room(service, monkeypatch):
    monkeypatch.setattr(settings_in_force, "WAITING_MAX", 2)
    stream = service.started()
    for job in ("a", "b", "c"):
        service.append(job, JobOwnership(job, "nlp"))
    service.second(stream)
    assert list(stream.partition.settings.waiting) == ["b", "c"]


PAUSE = Rule("r1", Mode.ACT, kind="nonfinite", action="pause")
GUARDED = (ALL_JOBS, policy_record(Policy((PAUSE,), PolicyLimits(precision_min=0.6))))


def requested(service):
    columns = (models.Command.job, models.Command.state, models.Command.result)
    return service.rows(select(*columns).order_by(models.Command.requested_unix_ns))


def test_an_action_waits_until_the_precision_of_the_kind_is_known_to_be_high_enough(service, stream):
    service.append(*GUARDED)
    service.able()
    service.train(0)
    service.second(stream)
    service.ill(step=2)
    service.second(stream)
    unknown = ("gpt", "refused", "the precision of nonfinite is not known: 0 of 5 incidents are judged")
    assert requested(service) == [unknown]
    service.append(ALL_JOBS, PrecisionSet({"nonfinite": (2, 3), "hang": (9, 0)}))
    service.second(stream)
    assert requested(service) == [unknown]
    service.append(ALL_JOBS, PrecisionSet({"nonfinite": (5, 3)}))
    service.second(stream)
    assert requested(service) == [unknown, ("gpt", "requested", "")]


def test_what_waits_is_in_the_audit_trail_and_on_the_incident(service, stream):
    service.append(*GUARDED)
    service.able()
    service.train(0)
    service.second(stream)
    service.append(ALL_JOBS, PrecisionSet({"nonfinite": (2, 3)}))
    service.ill(step=2)
    service.second(stream)
    reason = "the precision of nonfinite is below 60%: 2 of 5 incidents were useful"
    audit = select(models.Audit.action).where(models.Audit.actor == "policy").order_by(models.Audit.id)
    assert service.column(audit) == ["command.pause", "command.pause.refused"]
    assert service.column(select(models.Audit.fields).where(models.Audit.actor == "policy"))[1]["result"] == reason
    (suggestion,) = service.column(select(models.Incident.suggestion))
    assert suggestion["policy"] == {"mode": "suggest", "action": "pause", "reason": reason}
    incident = service.column(select(models.Incident.id))
    assert service.column(select(models.Command.incident_id)) == incident


HIGH = MetricRule("high", "memory", Condition.ABOVE, 10.0, jobs=("gp*",))


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
    return service.rows(query)


def test_a_rule_holds_from_its_record_on_and_for_the_jobs_of_its_patterns(service, stream):
    log(service, stream, 5.0, 11.0, 11.0)
    log(service, stream, 11.0, job="other")
    assert incidents(service) == []
    service.append(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, first=3)
    log(service, stream, 11.0, job="other", first=1)
    assert incidents(service, "job", "scope", "severity", "onset_step") == [("gpt", "rule:high", "warning", 3)]
    log(service, stream, 11.0, 11.0, job="gpx")  # a job that began later
    assert incidents(service) == [("gpt", "open"), ("gpx", "open")]


def test_a_rule_that_is_deleted_ends_its_incidents(service, stream):
    service.append(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, 11.0)
    service.append(ALL_JOBS, RulesSet(()))
    log(service, stream, 11.0, first=2)
    assert incidents(service) == [("gpt", "resolved")]


def test_what_a_person_resolves_is_accepted_until_it_was_over(service, stream):
    service.append(ALL_JOBS, RulesSet((HIGH,)))
    log(service, stream, 11.0, 11.0)
    ((incident,),) = incidents(service, "id")
    service.append("gpt", IncidentReview(incident, "resolved", "ann"))
    log(service, stream, *[11.0] * 5, first=2)
    assert incidents(service) == [("gpt", "resolved")]
    log(service, stream, 9.0, 11.0, first=7)
    assert incidents(service) == [("gpt", "resolved"), ("gpt", "open")]


def test_rules_beyond_the_limit_of_a_job_are_counted(service, stream):
    rules = [MetricRule(f"r{n}", "memory", Condition.ABOVE, 10.0) for n in range(RULES_PER_JOB_MAX + 3)]
    service.append(ALL_JOBS, RulesSet(tuple(rules)))
    log(service, stream, 5.0, 5.0)
    (dropped,) = service.column(select(models.Job.dropped))
    assert dropped["metric_rules"] == 3


def test_the_rules_in_force_survive_their_record_and_their_snapshot():
    record = RulesSet((HIGH, MetricRule("moved", "kl", Condition.CHANGE)))
    assert decode_control(encode_control(record)) == record
    settings = SettingsInForce()
    settings.apply(record)
    assert SettingsInForce.restored(unpack(pack(settings.state()))).rules == record.rules
    assert [rule.name for rule in settings.copy().rules_of("other")] == ["moved"]


def test_a_rule_for_many_ranks_asks_for_an_approval_in_the_transaction_of_its_command(service):
    rules = (Rule("r1", Mode.ACT, kind="nonfinite", action="pause"),)
    service.append(ALL_JOBS, policy_record(Policy(rules, PolicyLimits(approval_ranks=1))))
    subscribe(service.engine, ReceiverRoute("pager"), ReceiverRoute("other", jobs=("other",)))
    stream = service.started()
    service.able()
    stream.step()
    service.send(steps=table([2, 2], [0, 1], loss=[float("nan"), 2.0]))
    stream.step()
    again = service.started()
    again.step()
    assert reported(service) == ["pager", "pager"]
    [command] = service.column(select(models.Command.id).where(models.Command.approval_required))
    asked = select(models.Outbox.body).where(models.Outbox.command_id == command)
    [message] = map(json.loads, service.column(asked))
    assert (message["type"], message["data"]["id"]) == ("command.approval_needed", command)
    assert message["data"]["incident"] == service.column(select(models.Incident.id))[0]
    assert service.column(select(models.Command.world_size)) == [2]


def test_a_receiver_that_was_only_asked_for_an_approval_has_not_heard_of_the_incident(engine):
    subscribe(engine, ReceiverRoute("pager"), ReceiverRoute("other"))
    (opened,) = notified("opened", 1, ("pager",), now_unix_ns=NOON_UNIX_NS)
    (asked,) = notified("opened", 2, ("other",), now_unix_ns=NOON_UNIX_NS)
    with write(engine) as connection:
        connection.execute(insert(models.Outbox).values(**opened))
        connection.execute(insert(models.Outbox).values(**asked | {"command_id": "cmd_1", "transition": 0}))
    announce(engine, [announced("resolved", 3)])
    route_all(engine)
    with read(engine) as connection:
        ended = select(models.Outbox.receiver).where(models.Outbox.transition == 3)
        assert list(connection.scalars(ended)) == ["pager"]


def test_stacks_that_have_come_end_the_command_that_requested_them(service, stream, monkeypatch):
    service.send()
    stream.step()
    asked = {"job": "gpt", "attempt": "l.0", "action": "stacks", "params": {}, "reason": "", "requested_by": "stream"}
    with write(service.engine) as connection:
        commands.add(connection, CommandRequest(id="s", requested_unix_ns=service.clock.unix_ns(), **asked))

    def due(evidence, *_):
        evidence.received = [StacksReceived("s", 2, 2)]
        return []

    monkeypatch.setattr(HangEvidence, "due", due)
    service.clock.advance(1.5)
    stream.step()
    assert service.column(select(models.Command.state)) == ["applied"]


DEAF = {"settings": {"straggler.wall.ratio_min": 5}}


def tunings(version, *documents):
    return TuningSet(version, read_tunings(list(documents)))


def train(service, stream, steps, slow=1.0, job="gpt"):
    """Steps of both ranks, twenty in a batch; rank 1 computes `slow` times as long."""
    steps = list(steps)
    for part in (steps[start : start + 20] for start in range(0, len(steps), 20)):
        rows = [(step, rank) for step in part for rank in (0, 1)]
        busy = [(0.2 + 0.001 * (step * 7 % 5)) * (slow if rank else 1.0) for step, rank in rows]
        service.send(job, steps=table(*map(list, zip(*rows, strict=True)), busy_s=busy, step_time_s=[0.5] * len(rows)))
        service.clock.advance(0.5 * len(part))
        stream.step()


def found(service):
    """Kind, onset and tuning version of every incident."""
    incident = models.Incident
    with read(service.engine) as connection:
        query = select(incident.job, incident.kind, incident.onset_step, incident.evidence).order_by(
            incident.detected_unix_ns
        )
        return [(*row[:3], row.evidence.get("tuning_version")) for row in connection.execute(query)]


def test_a_tuning_holds_from_its_place_on_and_says_its_version(service, stream):
    train(service, stream, range(100))
    service.append(ALL_JOBS, tunings(1, {"jobs": "g*", **DEAF}))
    train(service, stream, range(100, 112), slow=1.5)
    train(service, stream, range(112, 170))
    assert found(service) == []
    service.append(ALL_JOBS, tunings(2, {"jobs": "g*", "profile": "sensitive"}))
    train(service, stream, range(170, 182), slow=1.5)
    assert found(service) == [("gpt", "straggler", 170, 2)]
    train(service, stream, range(182, 250))
    service.append(ALL_JOBS, tunings(3))
    train(service, stream, range(250, 262), slow=1.5)
    assert found(service)[1:] == [("gpt", "straggler", 250, None)]


def test_another_value_restarts_no_baseline(service, stream):
    train(service, stream, range(100))
    before = stream.partition.jobs["gpt"].state()["bank"]
    service.append(ALL_JOBS, tunings(1, {"profile": "quiet"}))
    service.clock.advance(0.01)
    stream.partition.control(service.controls.read(0, 9)[-1], Effects())
    assert pack(stream.partition.jobs["gpt"].state()["bank"]) == pack(before)


def test_jobs_that_do_not_match_go_on_as_they_are(service, stream):
    service.append(ALL_JOBS, tunings(1, {"jobs": "bert-*", **DEAF}))
    train(service, stream, range(100))
    train(service, stream, range(100, 112), slow=1.5)
    assert found(service) == [("gpt", "straggler", 100, None)]


def test_a_job_that_begins_later_has_the_tuning(service, stream):
    service.append(ALL_JOBS, tunings(4, {"jobs": "late", **DEAF}))
    train(service, stream, range(10))
    train(service, stream, range(100), job="late")
    train(service, stream, range(100, 112), slow=1.5, job="late")
    assert found(service) == []


def test_a_change_is_among_what_happened_before_an_incident(service, stream):
    train(service, stream, range(100))
    service.append(ALL_JOBS, tunings(1, {"jobs": "gpt", "profile": "sensitive"}))
    train(service, stream, range(100, 110))
    train(service, stream, range(110, 122), slow=1.5)
    (changes,) = service.column(select(models.Incident.changes_before))
    assert "tuning: version 1" in [change["what"] for change in changes]
    (configuration,) = service.column(select(models.Job.configuration))
    assert [(change["what"], change["step"]) for change in configuration] == [("tuning: version 1", 99)]


def test_detectors_are_made_anew_only_if_the_tuning_is_another_one():
    made = []
    pipeline = DetectionPipeline("gpt", lambda *config: made.append(config) or [])
    one = {"jobs": "g*", "profile": "quiet"}
    answers = [pipeline.tune(tunings(n, *these)) for n, these in enumerate([[], [one], [one, one], []])]
    assert answers == [False, True, False, True]
    assert len(made) == 3
