"""What the policy wants approved is committed with the question to people, and asked once."""

import json

import pytest
from msgspec.structs import replace
from sqlalchemy import insert, select

from rankwatch_service.job.job import JobStream
from rankwatch_service.names import ALL_JOBS
from rankwatch_service.policy.control_records import ReceiverRoute, ReceiversSet
from rankwatch_service.policy.policy import Mode, Policy, PolicyLimits, Rule, policy_record
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store import models
from rankwatch_service.store.engine import write
from rankwatch_service.store.rows import outbox_row
from rankwatch_service.stream.saved import restore_from_tables
from tests.support.service.stream import Service, no_links
from tests.support.values.batches import ranks, table
from tests.support.values.incidents import NOON_UNIX_NS, incident_row, notified


@pytest.fixture
def service(engine):
    return Service(engine)


def test_a_rule_for_many_ranks_asks_for_an_approval_in_the_transaction_of_its_command(service):
    rules = (Rule("r1", Mode.ACT, kind="nonfinite", action="pause"),)
    service.tell(ALL_JOBS, policy_record(Policy(rules, PolicyLimits(approval_ranks=1))))
    service.tell(ALL_JOBS, ReceiversSet((ReceiverRoute("pager"), ReceiverRoute("other", jobs=("other",)))))
    stream = service.started()
    service.send()
    service.send(ranks=tuple(replace(info, can=("pause",)) for info in ranks(2)))
    stream.step()
    service.send(steps=table([2, 2], [0, 1], loss=[float("nan"), 2.0]))
    stream.step()
    again = service.started()
    again.step()
    [command] = service.column(select(models.Command.id).where(models.Command.approval_required))
    asked = select(models.Outbox.body).where(models.Outbox.command_id == command)
    [message] = map(json.loads, service.column(asked))
    assert (message["type"], message["data"]["id"]) == ("command.approval_needed", command)
    assert message["data"]["incident"] == service.column(select(models.Incident.id))[0]
    assert service.column(select(models.Command.world_size)) == [2]
    assert service.column(select(models.Outbox.receiver)) == ["pager", "pager"]


def test_a_receiver_that_was_only_asked_for_an_approval_has_not_heard_of_the_incident(engine):
    (opened,) = notified("opened", 1, ("pager",), now_unix_ns=NOON_UNIX_NS)
    (asked,) = notified("opened", 2, ("other",), now_unix_ns=NOON_UNIX_NS)
    with write(engine) as connection:
        connection.execute(insert(models.Incident).values(**incident_row()))
        connection.execute(insert(models.Outbox).values(**outbox_row(opened)))
        connection.execute(insert(models.Outbox).values(**outbox_row(asked) | {"command_id": "cmd_1", "transition": 0}))
    job = JobStream("gpt-small", list, no_links, SettingsInForce())
    restore_from_tables(engine, job)
    assert [incident.told_to for incident in job.correlator.open] == [["pager"]]
