"""What stream was told of precision decides what the policy does, and a replay decides the same."""

import pytest
from msgspec.structs import replace
from sqlalchemy import select

from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import PrecisionSet
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.policy.precision import Precision
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store import models
from rankwatch_service.stream.saved import pack
from tests.support.service.stream import Service
from tests.support.values.batches import ranks, table

PAUSE = Rule("r1", Mode.ACT, kind="nonfinite", action="pause")


@pytest.fixture
def service(engine):
    service = Service(engine)
    service.tell(ALL_JOBS, policy_record(Policy((PAUSE,), PolicyLimits(precision_min=0.6))))
    return service


def step(service, stream):
    service.clock.advance(1.0)
    stream.step()


def begun(service, job="gpt"):
    service.send(job)
    service.send(job, ranks=tuple(replace(info, can=("pause",)) for info in ranks(2)))
    service.train(0, job=job)


def fall_ill(service, job="gpt"):
    service.send(job, steps=table([2, 2], [0, 1], loss=[float("nan"), 2.0]))


def commands(service):
    columns = (models.Command.job, models.Command.state, models.Command.result)
    query = select(*columns).order_by(models.Command.requested_unix_ns)
    with service.engine.connect() as connection:
        return [tuple(row) for row in connection.execute(query)]


def test_an_action_waits_until_the_precision_of_the_kind_is_known_to_be_high_enough(service):
    stream = service.started()
    begun(service)
    step(service, stream)
    fall_ill(service)
    step(service, stream)
    unknown = ("gpt", "refused", "the precision of nonfinite is not known: 0 of 5 incidents are judged")
    assert commands(service) == [unknown]
    service.tell(ALL_JOBS, PrecisionSet({"nonfinite": (2, 3), "hang": (9, 0)}))
    step(service, stream)
    assert commands(service) == [unknown]
    service.tell(ALL_JOBS, PrecisionSet({"nonfinite": (5, 3)}))
    step(service, stream)
    assert commands(service) == [unknown, ("gpt", "requested", "")]


def test_what_waits_is_in_the_audit_trail_and_on_the_incident(service):
    stream = service.started()
    begun(service)
    step(service, stream)
    service.tell(ALL_JOBS, PrecisionSet({"nonfinite": (2, 3)}))
    fall_ill(service)
    step(service, stream)
    reason = "the precision of nonfinite is below 60%: 2 of 5 incidents were useful"
    audit = select(models.Audit.action).where(models.Audit.actor == "policy").order_by(models.Audit.id)
    assert service.column(audit) == ["command.pause", "command.pause.refused"]
    assert service.column(select(models.Audit.fields).where(models.Audit.actor == "policy"))[1]["result"] == reason
    (suggestion,) = service.column(select(models.Incident.suggestion))
    assert suggestion["policy"] == {"mode": "suggest", "action": "pause", "reason": reason}
    incident = service.column(select(models.Incident.id))
    assert service.column(select(models.Command.incident_id)) == incident


def test_a_replay_ends_in_the_same_state_and_decides_the_same(service):
    stream = service.started()
    begun(service)
    step(service, stream)
    fall_ill(service)
    step(service, stream)
    service.tell(ALL_JOBS, PrecisionSet({"nonfinite": (3, 2)}))
    step(service, stream)
    before, done = pack(stream.partition.jobs["gpt"].state()), commands(service)
    for _ in range(2):
        stream.close()
        stream = service.started()
        assert pack(stream.partition.jobs["gpt"].state()) == before
        assert stream.partition.settings.precision == {"nonfinite": Precision(3, 2)}
    assert commands(service) == done
    begun(service, "later")
    step(service, stream)
    fall_ill(service, "later")
    step(service, stream)
    assert commands(service)[-1] == ("later", "requested", "")


def test_a_snapshot_has_the_precision(service):
    service.tell(ALL_JOBS, PrecisionSet({"nonfinite": (3, 2)}))
    stream = service.started()
    begun(service)
    step(service, stream)
    state = stream.partition.snapshot(ALL_JOBS)
    restored = SettingsInForce.restored(state["desk"])
    assert restored.precision == restored.copy().precision == {"nonfinite": Precision(3, 2)}
