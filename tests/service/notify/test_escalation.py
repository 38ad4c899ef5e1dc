"""Receivers that are notified only of what nobody has acknowledged in time."""

import json
from dataclasses import replace

import pytest
from sqlalchemy import insert, select, update

from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.outbox import EndedTry, OutboxTable
from rankwatch_service.notify.router import Router
from rankwatch_service.notify.sender import TryOutcome, after_try
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Incident, Outbox, Receiver, Silence
from tests.support.clock import FakeClock
from tests.support.service.webhook_receiver import announce
from tests.support.values.incidents import NOON_UNIX_NS, announced, incident_row, receiver_row

AFTER_S = 900
NUMBERS = {"opened": 1, "updated": 2, "resolved": 3}


class Escalation:
    """An incident of which the pager is notified at once, and the lead after 15 minutes."""

    def __init__(self, engine):
        self.engine = engine
        self.clock = FakeClock(NOON_UNIX_NS)
        self.lease = Lease(engine, "notify", self.clock)
        self.lease.hold()
        self.router = Router(engine, self.lease)
        self.outbox = OutboxTable(engine, self.lease)
        with write(engine) as connection:
            connection.execute(insert(Incident).values(**incident_row()))
            for name, after_s in (("pager", 0), ("lead", AFTER_S)):
                connection.execute(insert(Receiver).values(**receiver_row(name, after_s=after_s)))
        self.happens("opened")

    def happens(self, what):
        change = announced(what, NUMBERS[what], detected_unix_ns=NOON_UNIX_NS)
        announce(self.engine, [replace(change, at_unix_ns=self.clock.now_ns)])
        self.lease.hold()
        self.router.route()
        if what == "resolved":
            self.becomes("resolved")

    def becomes(self, state):
        with write(self.engine) as connection:
            connection.execute(update(Incident).values(state=state))

    def sent(self, outcome=TryOutcome(200, "", 0.1)):  # noqa: B008 - frozen
        """Send all that is due; returns receivers and types."""
        self.lease.hold()
        found = []
        for _ in NUMBERS:  # a message is due when those before it have ended
            due = self.outbox.due(now_ns := self.clock.now_ns, {})
            ended = [EndedTry(one, outcome, after_try(outcome, 1, now_ns, 0), now_ns) for one in due]
            if ended:
                self.outbox.record(ended)
            found += [(one.receiver, json.loads(one.body)["type"]) for one in due]
        return sorted(found)

    def states(self):
        with read(self.engine) as connection:
            query = select(Outbox.state).where(Outbox.receiver == "lead").order_by(Outbox.transition)
            return list(connection.scalars(query))


@pytest.fixture
def case(engine):
    return Escalation(engine)


def test_the_lead_is_notified_once_of_what_stays_open_and_of_its_end(case):
    assert case.sent() == [("pager", "incident.opened")]
    case.clock.advance(AFTER_S - 1)
    assert case.sent() == []
    case.clock.advance(1)
    assert case.sent() == [("lead", "incident.opened")]
    case.happens("resolved")
    assert case.sent() == [("lead", "incident.resolved"), ("pager", "incident.resolved")]


@pytest.mark.parametrize("state", ["acknowledged", "resolved"])
def test_the_lead_hears_nothing_of_what_is_acknowledged_or_over_in_time_nor_of_its_end(case, state):
    case.clock.advance(60)
    case.becomes(state)
    case.happens("resolved")
    case.clock.advance(AFTER_S)
    assert {receiver for receiver, _ in case.sent()} == {"pager"}
    assert case.states() == ["unneeded", "unneeded"]


def test_an_acknowledgement_that_comes_later_keeps_nothing_back(case):
    case.clock.advance(AFTER_S)
    case.sent()
    case.becomes("acknowledged")
    case.happens("updated")
    assert ("lead", "incident.updated") in case.sent()
    case.happens("resolved")
    assert ("lead", "incident.resolved") in case.sent()


def test_who_was_not_needed_first_gets_a_later_change_as_the_opening(case):
    case.becomes("acknowledged")
    case.clock.advance(AFTER_S)
    case.sent()
    case.becomes("open")
    case.happens("updated")
    assert case.sent() == [("lead", "incident.opened"), ("pager", "incident.updated")]
    case.happens("resolved")
    assert ("lead", "incident.resolved") in case.sent()


def test_changes_while_it_waits_follow_the_opening(case):
    case.clock.advance(60)
    case.happens("updated")
    assert {receiver for receiver, _ in case.sent()} == {"pager"}
    case.clock.advance(AFTER_S)
    assert case.sent() == [("lead", "incident.opened"), ("lead", "incident.updated")]


def test_a_silence_that_was_made_meanwhile_mutes_it(case):
    silence = {"id": "s", "job": "", "kind": "", "scope": "", "matchers": [], "starts_unix_ns": NOON_UNIX_NS}
    silence |= {"ends_unix_ns": NOON_UNIX_NS + 3_600 * 10**9, "created_by": "ann", "comment": "known"}
    with write(case.engine) as connection:
        connection.execute(insert(Silence).values(**silence))
    case.clock.advance(AFTER_S)
    assert {receiver for receiver, _ in case.sent()} == {"pager"}
    assert case.states() == ["silenced"]


def test_what_did_not_arrive_is_tried_again_though_it_is_acknowledged_by_then(case):
    case.clock.advance(AFTER_S)
    case.sent(TryOutcome(500, "answered 500", 0.1))
    case.becomes("acknowledged")
    case.clock.advance(60)
    assert ("lead", "incident.opened") in case.sent()
