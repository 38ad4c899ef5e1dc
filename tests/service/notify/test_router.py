"""The router over a real database: it decides once, in order and as of the time of the change, whatever fails."""

import json
import random
from dataclasses import replace

import pytest
from sqlalchemy import insert, select

from rankwatch_service.api.background.counters import notification_metrics
from rankwatch_service.notify import router
from rankwatch_service.notify.lease import Lease, LeaseLostError
from rankwatch_service.notify.pipeline import ReceiverRoute
from rankwatch_service.notify.router import ROUTED_MAX, Router
from rankwatch_service.policy.notification import message_body
from rankwatch_service.store import models
from rankwatch_service.store.engine import read, write
from tests.support.clock import FakeClock
from tests.support.service.webhook_receiver import HeldLease, announce, route_all, subscribe
from tests.support.store.database import new_database
from tests.support.store.faulty_calls import CrashError, Faults, When
from tests.support.values.incidents import NOON_UNIX_NS, announced

S = 10**9


def outbox(engine):
    query = select(models.Outbox.receiver, models.Outbox.incident_id, models.Outbox.body, models.Outbox.state)
    with read(engine) as connection:
        rows = connection.execute(query.order_by(models.Outbox.incident_id, models.Outbox.transition)).all()
    return [(row.receiver, row.incident_id, json.loads(row.body)["type"], row.state) for row in rows]


def undecided(engine):
    with read(engine) as connection:
        return len(connection.execute(select(models.Announcement.id)).all())


def test_the_changes_of_an_incident_are_decided_on_in_their_order_and_once(engine):
    subscribe(engine, ReceiverRoute("pager"))
    announce(engine, [announced("opened", 1), announced("resolved", 2)])
    route_all(engine)
    route_all(engine)
    assert outbox(engine) == [
        ("pager", "inc_1", "incident.opened", "waiting"),
        ("pager", "inc_1", "incident.resolved", "waiting"),
    ]
    assert undecided(engine) == 0


def test_a_silence_counts_as_of_the_time_of_the_change_however_late_the_decision(engine):
    subscribe(engine, ReceiverRoute("pager"))
    silence = {"job": "", "kind": "", "scope": "", "matchers": [], "created_by": "ann", "comment": ""}
    times = {"starts_unix_ns": NOON_UNIX_NS, "ends_unix_ns": NOON_UNIX_NS + 60 * S}
    with write(engine) as connection:
        connection.execute(insert(models.Silence).values(id="s", **silence, **times))
    for number, at_s in enumerate((-1, 0, 59, 60)):
        announce(engine, [replace(announced(id=f"inc_{number}", job=f"j{number}"), at_unix_ns=NOON_UNIX_NS + at_s * S)])
    route_all(engine, NOON_UNIX_NS + 3_600 * S)
    assert [state for *_, state in outbox(engine)] == ["waiting", "silenced", "silenced", "waiting"]


def test_a_message_that_cannot_be_composed_stops_no_other(engine, monkeypatch):
    def compose(message_type, at_unix_ns, data, held_before):
        return message_body(message_type, data["at"], data, held_before)

    monkeypatch.setattr(router, "message_body", compose)
    subscribe(engine, ReceiverRoute("pager"))
    whole = replace(announced(id="inc_2", job="j2"), data={"at": 0})
    announce(engine, [replace(whole, incident_id="inc_1", job="j", data={}), whole])
    route_all(engine)
    assert ([incident for _, incident, *_ in outbox(engine)], undecided(engine)) == (["inc_2"], 0)


def test_a_receiver_that_cannot_be_decided_on_keeps_nothing_back_from_the_others(engine):
    subscribe(engine, ReceiverRoute("broken", matchers=("kind ~ [",)), ReceiverRoute("pager"))
    announce(engine, [announced()])
    route_all(engine)
    assert ([receiver for receiver, *_ in outbox(engine)], undecided(engine)) == (["pager"], 0)


def test_many_announcements_are_decided_on_in_several_transactions(engine):
    subscribe(engine, ReceiverRoute("pager"))
    announce(engine, [announced(id=f"inc_{n}", job=f"j{n}") for n in range(ROUTED_MAX + 1)])
    deciding = Router(engine, HeldLease(engine))
    assert deciding.route()
    assert undecided(engine) == 1
    assert not deciding.route()
    assert len(outbox(engine)) == ROUTED_MAX + 1


def test_who_does_not_hold_the_lease_decides_nothing(engine):
    subscribe(engine, ReceiverRoute("pager"))
    announce(engine, [announced()])
    with pytest.raises(LeaseLostError):
        Router(engine, Lease(engine, "notify", FakeClock())).route()
    assert (outbox(engine), undecided(engine)) == ([], 1)


def test_what_nobody_has_decided_on_counts_as_undelivered(engine):
    subscribe(engine, ReceiverRoute("pager"))
    announce(engine, [replace(announced(), at_unix_ns=NOON_UNIX_NS)])
    for _ in ("before", "after"):
        with read(engine) as connection:
            found = {one.name: one.samples for one in notification_metrics(connection, NOON_UNIX_NS + 9 * S)}
        assert found["rankwatch_outbox_depth"][0].value == 1
        assert found["rankwatch_outbox_oldest_age_seconds"][0].value == 9
        route_all(engine)


def changes():
    """Four incidents of one kind, one after the other: there is no room for all of their messages."""
    for number in range(4):
        for turn, what in enumerate(("opened", "resolved"), 1):
            yield announced(what, turn, id=f"inc_{number}")


def test_each_call_to_the_database_may_fail_once_and_nothing_is_lost_or_repeated(tmp_path):
    def decided(name, fail_at, when):
        (tmp_path / name).mkdir()
        engine = new_database(tmp_path / name)
        subscribe(engine, ReceiverRoute("pager"), ReceiverRoute("lead", severities=("warning",)))
        announce(engine, changes())
        faults = Faults()
        faults.install(engine)
        if fail_at:
            faults.arm(fail_at, when)
            with pytest.raises(CrashError):
                route_all(engine)
        route_all(engine)
        with read(engine) as connection:
            limits = connection.scalars(select(models.MessageLimitRow.state)).all()
        found = outbox(engine), undecided(engine), limits, faults.calls
        engine.dispose()
        return found

    *wanted, calls = decided("whole", 0, When.BEFORE)
    assert {state for *_, state in wanted[0]} == {"waiting", "held"}
    for call in random.sample(range(1, calls // 2), 12):
        for when in When:
            assert list(decided(f"{call} {when.value}", call, when))[:3] == wanted, (call, when)
