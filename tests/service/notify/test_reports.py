"""What the notifier reports of itself: counts of notifications, and a heartbeat as long as the chain lives."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import httpx2
import pytest
from sqlalchemy import delete, insert, select

from rankwatch_service.notify.heartbeat import SETTING, SILENT_S, Heartbeat
from rankwatch_service.notify.outbox import DueMessage, EndedTry, NotificationCounts, OutboxTable
from rankwatch_service.notify.sender import GIVE_UP_AFTER_S, TryOutcome, after_try
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Outbox, Receiver, Setting, StreamReport
from tests.support.clock import FakeClock
from tests.support.values.incidents import NOON_UNIX_NS, notified, receiver_row

HELD = SimpleNamespace(valid=True, confirm=lambda _: None)
URL = "https://checks.example/ping/1"


def counts(engine):
    with read(engine) as connection:
        return NotificationCounts(connection).by_receiver


def ended(receiver, status, error="", at_s=3):
    outcome = TryOutcome(status, error, 0.1)
    at_unix_ns = NOON_UNIX_NS + at_s * 10**9
    message = DueMessage("msg_1", receiver, "", "", b"", 0, NOON_UNIX_NS)
    return EndedTry(message, outcome, after_try(outcome, 1, at_unix_ns, 0.0), at_unix_ns)


def test_tries_deliveries_and_what_was_given_up_are_counted_by_receiver(engine):
    with write(engine) as connection:
        connection.execute(insert(Receiver), [receiver_row("pager"), receiver_row("chat")])
    outbox = OutboxTable(engine, HELD)
    outbox.record([ended("pager", 204), ended("pager", 503, "no"), ended("chat", None, "no answer")])
    outbox.record([ended("pager", 204, at_s=20), ended("chat", 410, "gone"), ended("removed", 204)])
    pager, chat = counts(engine)["pager"], counts(engine)["chat"]
    assert (pager.delivered, pager.refused, pager.unanswered, pager.failed) == (2, 1, 0, 0)
    assert (pager.latency_s, dict(pager.buckets())["5.0"], dict(pager.buckets())["+Inf"]) == (23.0, 1, 2)
    assert (chat.delivered, chat.refused, chat.unanswered, chat.failed) == (0, 1, 1, 1)
    assert "removed" not in counts(engine)


def test_what_is_given_up_for_its_age_is_counted(engine):
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row("pager")))
        [row] = notified("opened", 1, ("pager",), now_unix_ns=NOON_UNIX_NS)
        connection.execute(insert(Outbox).values(**row))
    outbox = OutboxTable(engine, HELD)
    for late_s, given_up in ((GIVE_UP_AFTER_S, 0), (GIVE_UP_AFTER_S + 1, 1), (GIVE_UP_AFTER_S + 2, 0)):
        assert outbox.give_up(NOON_UNIX_NS + late_s * 10**9, ()) == given_up
    assert counts(engine)["pager"].failed == 1


class Chain:
    """A database with one partition, and a heart whose beats the test counts."""

    def __init__(self, engine):
        self.engine = engine
        self.clock = FakeClock(NOON_UNIX_NS)
        self.asked = 0
        self.status = 200

    def answer(self, request):
        assert str(request.url) == URL
        self.asked += 1
        return httpx2.Response(self.status)

    def report(self, partition=0, late_s=0.0):
        at_unix_ns = self.clock.now_ns - int(late_s * 1e9)
        row = {"partition": partition, "owner": "h:1", "epoch": 1, "position": 0, "end": 0, "tick_unix_ns": 0}
        with write(self.engine) as connection:
            connection.execute(delete(StreamReport).where(StreamReport.partition == partition))
            connection.execute(insert(StreamReport).values(**row, lost_records=0, at_unix_ns=at_unix_ns))

    def beat(self):
        async def once():
            with ThreadPoolExecutor(1) as blocking:
                heart = Heartbeat(self.engine, HELD, self.clock, blocking, URL)
                async with httpx2.AsyncClient(transport=httpx2.MockTransport(self.answer)) as client:
                    return await heart.beat(client)

        return asyncio.run(once())

    def stored(self):
        with read(self.engine) as connection:
            return connection.scalar(select(Setting.value).where(Setting.name == SETTING))


@pytest.fixture
def chain(engine):
    return Chain(engine)


def test_the_url_is_asked_for_while_every_partition_has_a_stream_process(chain):
    assert "ever reported" in chain.beat()
    chain.report(0)
    chain.report(1, late_s=SILENT_S)
    assert chain.beat() == ""
    assert chain.stored() == {"success_unix_ns": NOON_UNIX_NS, "error": ""}
    chain.clock.advance(1)
    chain.report(0)
    assert "a partition has no stream process since 61 s" in chain.beat()
    assert chain.asked == 1
    assert chain.stored() == {"success_unix_ns": NOON_UNIX_NS, "error": "a partition has no stream process since 61 s"}
    chain.report(1)
    assert (chain.beat(), chain.asked) == ("", 2)


def test_a_receiver_that_does_not_answer_does_not_stop_it(chain):
    chain.report()
    [row] = notified("opened", 1, ("pager",), now_unix_ns=NOON_UNIX_NS)
    with write(chain.engine) as connection:
        connection.execute(insert(Outbox).values(**row | {"state": "waiting", "tries": 9}))
    chain.clock.advance(SILENT_S + 1)
    chain.report()
    assert chain.beat() == ""


def test_an_answer_that_is_no_success_is_recorded(chain):
    chain.report()
    chain.status = 500
    assert chain.beat() == "the URL answered 500"
    assert chain.stored() == {"success_unix_ns": None, "error": "the URL answered 500"}
