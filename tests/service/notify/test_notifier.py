"""The loop over a real database, with a sender and a clock that tests move."""

import asyncio
import contextlib
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import insert, select, update

from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.lease import Lease
from rankwatch_service.notify.notifier import Notifier
from rankwatch_service.notify.outbox import RECEIVER_IN_FLIGHT_MAX, OutboxTable
from rankwatch_service.notify.router import ROUTED_MAX, Router
from rankwatch_service.notify.sender import (
    GIVE_UP_AFTER_S,
    RETRY_AFTER_MAX_S,
    RETRY_DELAYS_S,
    TryOutcome,
    after_try,
    retry_after_s,
)
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.errors import StoreBusyError
from rankwatch_service.store.models import Delivery, Outbox, Receiver
from rankwatch_service.store.models import Lease as LeaseRow
from tests.support.clock import FakeClock
from tests.support.service.webhook_receiver import announce
from tests.support.values.incidents import NOON_UNIX_NS, announced, notified, receiver_row

DEADLINE_S = 60.0
OK = TryOutcome(204, "", 0.01)


class ScriptedSender:
    """Answers by receiver's URL; keeps what was sent in order. An answer may be an event to wait for."""

    def __init__(self, **answers):
        self.answers = answers
        self.sent = []
        self.now_to = {}
        self.most_to = {}

    async def send(self, url, secret, message_id, body):
        name = url.rsplit("/", 1)[1]
        self.sent.append((name, message_id))
        self.now_to[name] = self.now_to.get(name, 0) + 1
        self.most_to[name] = max(self.most_to.get(name, 0), self.now_to[name])
        try:
            answer = self.answers.get(name, OK)
            if callable(answer):
                answer = answer(message_id)
            if isinstance(answer, asyncio.Event):
                await answer.wait()
                answer = OK
            return answer
        finally:
            self.now_to[name] -= 1


class OutboxWorld:
    """A database with receivers and messages, and notifiers that can be started on it."""

    def __init__(self, engine):
        self.engine = engine
        self.clock = FakeClock(NOON_UNIX_NS)
        self.lease = Lease(engine, "notify", SystemClock())

    def receiver(self, name):
        with write(self.engine) as connection:
            connection.execute(insert(Receiver).values(**receiver_row(name, url=f"http://127.0.0.1:9/{name}")))

    def queue(self, incident="inc_1", what="opened", number=1, to=("pager",)):
        rows = notified(what, number, to, now_unix_ns=self.clock.now_ns, id=incident)
        with write(self.engine) as connection:
            connection.execute(insert(Outbox), rows)
        return [row["id"] for row in rows]

    def states(self):
        with read(self.engine) as connection:
            return dict(connection.execute(select(Outbox.id, Outbox.state).order_by(Outbox.transition)).all())

    def deliveries(self):
        with read(self.engine) as connection:
            return connection.execute(select(Delivery).order_by(Delivery.id)).all()

    def waiting(self):
        return [one for one, state in self.states().items() if state == "waiting"]

    def work(self, sender, until, outbox=None):
        """Run a notifier until a condition holds."""
        asyncio.run(self._work(sender, until, outbox or OutboxTable(self.engine, self.lease)))

    async def _work(self, sender, until, outbox):
        with contextlib.closing(ChangeWatch(self.engine)) as changes, ThreadPoolExecutor(1) as database:
            parts = (Router(self.engine, self.lease), outbox, self.lease, sender, changes, self.clock)
            notifier = Notifier(*parts, random.Random(1), database)
            running = asyncio.create_task(notifier.run())
            try:
                async with asyncio.timeout(DEADLINE_S):
                    while not until() and not running.done():  # noqa: ASYNC110 - what is awaited is a row in a database
                        await asyncio.sleep(0.005)
            finally:
                notifier.stop()
                await running


@pytest.fixture
def world(engine):
    world = OutboxWorld(engine)
    world.receiver("pager")
    return world


def test_what_is_committed_is_delivered_once_and_recorded(world):
    ids = world.queue()
    sender = ScriptedSender()
    world.work(sender, lambda: not world.waiting())
    assert sender.sent == [("pager", ids[0])]
    assert world.states() == {ids[0]: "delivered"}
    (delivery,) = world.deliveries()
    assert (delivery.outbox_id, delivery.status, delivery.error) == (ids[0], 204, "")


def test_a_message_committed_while_the_notifier_runs_is_noticed(world):
    sender = ScriptedSender()
    ids = []

    def until():
        if not ids:
            ids.extend(world.queue())
        return world.states() == {ids[0]: "delivered"}

    world.work(sender, until)


def test_resolved_waits_until_opened_has_arrived(world):
    answers = iter([TryOutcome(500, "answered 500", 0.1), OK, OK, OK])
    world.queue(what="opened", number=1)
    world.queue(what="updated", number=2)
    world.queue(what="resolved", number=3)
    sender = ScriptedSender(pager=lambda _: next(answers))

    def until():
        if len(world.deliveries()) == 1:
            world.clock.advance(RETRY_DELAYS_S[0] * 1.2)
        return not world.waiting()

    world.work(sender, until)
    order = [message_id for _, message_id in sender.sent]
    opened, updated, resolved = world.states()
    assert order == [opened, opened, updated, resolved]


def test_other_incidents_do_not_wait_behind_one_that_fails(world):
    bad, good = world.queue("inc_bad") + world.queue("inc_good")
    sender = ScriptedSender(pager=lambda one: TryOutcome(500, "answered 500", 0.1) if one == bad else OK)
    world.work(sender, lambda: world.states()[good] == "delivered" and world.deliveries())
    assert world.states() == {bad: "waiting", good: "delivered"}


@pytest.mark.parametrize("fails", ["incident", "command"])
def test_a_message_about_a_command_and_those_of_its_incident_do_not_wait_for_each_other(world, fails):
    (incident,), (command,) = world.queue(number=1), world.queue(number=2)
    with write(world.engine) as connection:
        of_command = {"command_id": "cmd_1", "transition": 0}
        connection.execute(update(Outbox).where(Outbox.id == command).values(**of_command))
    bad, good = (incident, command) if fails == "incident" else (command, incident)
    sender = ScriptedSender(pager=lambda one: TryOutcome(500, "answered 500", 0.1) if one == bad else OK)
    world.work(sender, lambda: world.states()[good] == "delivered" and ("pager", bad) in sender.sent)
    assert world.states() == {bad: "waiting", good: "delivered"}


def test_a_receiver_that_hangs_delays_no_other_and_is_bounded(world):
    world.receiver("slow")
    for n in range(20):
        world.queue(f"inc_{n}", to=("pager", "slow"))
    hang = asyncio.Event()
    sender = ScriptedSender(slow=hang)

    def until():
        # All of the fast receiver's are through while not one of the slow receiver's has ended.
        if len([one for one in world.states().values() if one == "delivered"]) == 20:
            assert sender.most_to["slow"] == RECEIVER_IN_FLIGHT_MAX
            hang.set()
        return not world.waiting()

    world.work(sender, until)
    assert sender.most_to["slow"] == RECEIVER_IN_FLIGHT_MAX
    assert len(sender.sent) == 40


def test_retries_follow_the_schedule_under_one_id_and_survive_a_new_notifier(world):
    (one,) = world.queue()
    sender = ScriptedSender(pager=TryOutcome(503, "answered 503", 0.1))
    at_s = []
    for tries, delay_s in enumerate(RETRY_DELAYS_S[:6], start=1):
        world.work(sender, lambda tries=tries: len(world.deliveries()) == tries)
        at_s.append(world.deliveries()[-1].at_unix_ns)
        world.clock.advance(delay_s * 1.2)
    assert sender.sent == [("pager", one)] * 6
    sender.answers["pager"] = OK
    world.work(sender, lambda: not world.waiting())
    assert [delivery.status for delivery in world.deliveries()] == [503] * 6 + [204]


def test_nothing_is_tried_before_its_time(world):
    failing = world.queue()[0]
    sender = ScriptedSender(pager=lambda one: TryOutcome(503, "answered 503", 0.1) if one == failing else OK)
    world.work(sender, lambda: len(world.deliveries()) == 1)
    world.clock.advance(RETRY_DELAYS_S[0] * 0.99)
    later = world.queue("inc_2")[0]
    world.work(sender, lambda: world.states()[later] == "delivered")
    assert [one for _, one in sender.sent] == [failing, later]


def test_retry_after_delays_all_messages_to_that_receiver(world):
    world.receiver("other")
    first = world.queue("inc_1")[0]
    sender = ScriptedSender(pager=TryOutcome(429, "answered 429", 0.1, retry_after_s=600.0))
    held = []

    def until():
        if world.deliveries() and not held:
            with read(world.engine) as connection:
                held.extend(connection.scalars(select(Outbox.next_try_unix_ns).where(Outbox.id == first)))
        return held

    world.work(sender, until)
    assert held == [world.clock.now_ns + 600 * 10**9]


def test_gone_disables_the_receiver_with_a_reason_and_its_messages_wait(world):
    gone = world.queue("inc_1")[0]
    sender = ScriptedSender(pager=TryOutcome(410, "answered 410", 0.1))
    world.work(sender, lambda: world.states()[gone] == "failed")
    with read(world.engine) as connection:
        enabled, reason = connection.execute(select(Receiver.enabled, Receiver.disabled_reason)).one()
    assert (enabled, reason) == (False, "the receiver answered 410: it is gone")

    world.receiver("other")
    sent, kept = world.queue("inc_2", to=("other", "pager"))
    world.work(sender, lambda: world.states()[sent] == "delivered")
    assert world.states()[kept] == "waiting"

    with write(world.engine) as connection:
        connection.execute(update(Receiver).values(enabled=True))
    sender.answers["pager"] = OK
    world.work(sender, lambda: world.states()[kept] == "delivered")


def test_a_message_that_is_undelivered_for_days_is_given_up(world):
    (old,) = world.queue()
    world.clock.advance(GIVE_UP_AFTER_S + 1)
    sender = ScriptedSender(pager=TryOutcome(500, "answered 500", 0.1))
    world.work(sender, lambda: not world.waiting())
    assert world.states() == {old: "failed"}


def test_messages_to_a_receiver_that_was_removed_are_given_up(world):
    (orphan,) = world.queue(to=("removed",))
    world.work(ScriptedSender(), lambda: world.states() == {orphan: "failed"})


def test_an_error_in_the_sender_is_recorded_and_retried_with_the_usual_delay(world):
    (one,) = world.queue()

    class Broken:
        calls = 0

        async def send(self, *_arguments):
            self.calls += 1
            raise ZeroDivisionError("ours")

    broken = Broken()
    world.work(broken, lambda: len(world.deliveries()) == 1)
    assert broken.calls == 1
    assert world.deliveries()[0].error == "internal: ZeroDivisionError"
    assert world.states() == {one: "waiting"}


class FailsOnce(OutboxTable):
    """The database refuses the k-th call, before or after it took effect; `killed` calls never come back."""

    def __init__(self, world, call, after, killed):
        super().__init__(world.engine, world.lease)
        self.left, self.after, self.killed = call, after, killed
        self.dead = False

    def _step(self, do):
        self.left -= 1
        if self.dead or self.left == 0:
            if self.after and not self.dead:
                do()
            self.dead = self.killed
            raise RuntimeError("killed") if self.killed else StoreBusyError("locked")
        return do()

    def due(self, *arguments):
        return self._step(lambda: super(FailsOnce, self).due(*arguments))

    def record(self, *arguments):
        return self._step(lambda: super(FailsOnce, self).record(*arguments))

    def give_up(self, *arguments):
        return self._step(lambda: super(FailsOnce, self).give_up(*arguments))


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(1, 7))
def test_a_database_that_refuses_one_call_loses_and_repeats_nothing_for_good(world, call, after):
    ids = [world.queue("inc_1", what, n)[0] for n, what in enumerate(("opened", "updated", "resolved"), start=1)]
    sender = ScriptedSender()
    world.work(sender, lambda: not world.waiting(), FailsOnce(world, call, after, killed=False))
    assert [one for _, one in sender.sent] == ids


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", range(1, 7))
def test_a_notifier_that_dies_at_any_database_call_doubles_only_the_message_in_flight(world, call, after):
    ids = [world.queue("inc_1", what, n)[0] for n, what in enumerate(("opened", "updated", "resolved"), start=1)]
    sender = ScriptedSender()
    outbox = FailsOnce(world, call, after, killed=True)
    # Whether its death shows depends on the call: of a task that died only the notifier's silence is seen.
    with contextlib.suppress(RuntimeError):
        world.work(sender, lambda: outbox.dead or not world.waiting(), outbox)
    assert outbox.dead
    world.work(sender, lambda: not world.waiting())
    sent = [one for _, one in sender.sent]
    assert list(dict.fromkeys(sent)) == ids
    assert len(sent) <= len(ids) + 1


def taken_over(world):
    """Another notifier takes the lease, as it may once that has run out."""
    with write(world.engine) as connection:
        connection.execute(update(LeaseRow).values(expires_unix_ns=0))
    other = Lease(world.engine, "notify", SystemClock(), holder="another")
    assert other.hold()
    return other


def test_a_notifier_without_the_lease_sends_nothing_until_it_is_free(world):
    (one,) = world.queue()
    other = Lease(world.engine, "notify", SystemClock(), holder="another")
    assert other.hold()
    sender = ScriptedSender()
    ended = time.monotonic() + 0.3
    world.work(sender, lambda: time.monotonic() > ended)
    assert sender.sent == []
    other.release()
    world.work(sender, lambda: not world.waiting())
    assert sender.sent == [("pager", one)]


def test_what_a_notifier_sent_while_it_lost_the_lease_is_left_to_the_next(world):
    (one,) = world.queue()
    gate = asyncio.Event()
    sender = ScriptedSender(pager=gate)
    others = []

    def until():
        if sender.sent and not others:
            others.append(taken_over(world))
            gate.set()
        return bool(others) and not world.lease.valid

    world.work(sender, until)
    assert world.deliveries() == []
    assert world.states() == {one: "waiting"}
    others[0].release()
    again = ScriptedSender()
    world.work(again, lambda: not world.waiting())
    assert again.sent == [("pager", one)]
    assert len(world.deliveries()) == 1


# ---- What happens after a try ----------------------------------------------------------------------------------------


def delay_s(outcome, tries=1, jitter=0.0):
    decision = after_try(outcome, tries, NOON_UNIX_NS, jitter)
    assert decision.state == "waiting"
    return (decision.next_try_unix_ns - NOON_UNIX_NS) / 1e9


@pytest.mark.parametrize("status", [200, 202, 204, 299])
def test_any_2xx_delivers(status):
    assert after_try(TryOutcome(status, "", 0.1), 1, NOON_UNIX_NS, 0.0).state == "delivered"


@pytest.mark.parametrize("status", [None, 100, 301, 302, 400, 401, 404, 429, 500, 503])
def test_everything_else_is_tried_again(status):
    assert delay_s(TryOutcome(status, "no", 0.1)) == RETRY_DELAYS_S[0]


def test_410_gives_the_message_up_and_disables_the_receiver():
    decision = after_try(TryOutcome(410, "answered 410", 0.1), 1, NOON_UNIX_NS, 0.0)
    assert (decision.state, decision.receiver_gone) == ("failed", True)


def test_delays_grow_as_scheduled_and_the_last_one_repeats():
    delays = [delay_s(TryOutcome(500, "no", 0.1), tries) for tries in range(1, len(RETRY_DELAYS_S) + 3)]
    assert delays == [*RETRY_DELAYS_S, RETRY_DELAYS_S[-1], RETRY_DELAYS_S[-1]]


def test_jitter_only_delays_and_by_a_tenth_at_most():
    assert delay_s(TryOutcome(500, "no", 0.1), 4, jitter=1.0) == pytest.approx(RETRY_DELAYS_S[3] * 1.1)


def test_a_longer_retry_after_is_honoured_and_a_shorter_one_does_not_hurry_us():
    assert delay_s(TryOutcome(429, "no", 0.1, retry_after_s=77.0)) == 77.0
    assert delay_s(TryOutcome(429, "no", 0.1, retry_after_s=1.0)) == RETRY_DELAYS_S[0]


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("30", 30.0),
        ("Thu, 09 Oct 2025 08:54:20 GMT", 60.0),
        ("Thu, 09 Oct 2025 08:00:00 GMT", 0.0),
        ("999999", RETRY_AFTER_MAX_S),
        ("soon", None),
        ("-5", None),
        ("1e999", None),
        ("", None),
    ],
)
def test_retry_after_is_read_in_seconds_or_as_a_date(header, seconds):
    assert retry_after_s(header, NOON_UNIX_NS / 1e9) == seconds


def test_what_was_announced_while_no_notifier_ran_is_routed_and_delivered_once(world):
    count = 2 * ROUTED_MAX + 1
    world.clock.advance(1)
    announce(world.engine, [announced(id=f"inc_{n:02}", job=f"j{n}") for n in range(count)])
    sender = ScriptedSender()
    world.work(sender, lambda: len(sender.sent) == count and not world.waiting())
    assert [message for _, message in sorted(sender.sent)] == sorted(world.states())
    assert len(set(sender.sent)) == count
