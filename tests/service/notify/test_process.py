"""The notifier as a real process: fast, and killed with SIGKILL at many points."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
from sqlalchemy import func, insert, select
from standardwebhooks import Webhook

from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.policy.notification import message_id
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Outbox, Receiver
from tests.support.service.webhook_receiver import Answer, announce, webhook_receiver
from tests.support.trials.selection import trials
from tests.support.values.incidents import SECRET, announced, receiver_row

pytestmark = [pytest.mark.integration, pytest.mark.parametrize("database_url", ["sqlite"], indirect=True)]

RUN = (
    "import sys; from rankwatch_service.notify.serve import run; from rankwatch_service.settings import Settings;"
    "run(Settings(database_url=sys.argv[1], secret_key=sys.argv[2], notify_allow_private=True))"
)
KEY = "a secret key for tests, long enough"
INCIDENTS_A_KILL = 6
KILLS = trials(6, 12)


@contextmanager
def notifier(engine):
    process = subprocess.Popen([sys.executable, "-c", RUN, str(engine.url), KEY], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def record_sent(engine, incident, what, number):
    # Each in a job of its own, so that there are never too many messages like it.
    change = announced(what, number, id=incident, job=incident)
    announce(engine, [replace(change, at_unix_ns=time.time_ns())])
    return message_id(incident, number, "pager")


def add_receiver(engine, url):
    encrypt = load_secret_key(Settings(secret_key=KEY), engine, SystemClock()).encrypt
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row(url=encrypt(url), secret=encrypt(SECRET))))


def test_a_commit_reaches_the_receiver_signed_and_the_process_ends_on_sigterm(engine):
    with webhook_receiver() as receiver:
        add_receiver(engine, receiver.url)
        with notifier(engine) as process:
            record_sent(engine, "inc_first", "opened", 1)
            receiver.wait_for(lambda calls: len(calls) == 1)
            for n in range(20):
                committed_s = time.monotonic()
                record_sent(engine, f"inc_{n}", "opened", 1)
                receiver.wait_for(lambda calls, n=n: len(calls) == n + 2)
                # A generous bound: what it really takes stands in docs/performance.md.
                assert receiver.calls[-1].at_s - committed_s < 5.0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    for call in receiver.calls:
        assert Webhook(SECRET).verify(call.body, call.headers) == json.loads(call.body)


@pytest.mark.ci
def test_sigkill_at_many_points_loses_nothing_keeps_order_and_doubles_only_with_the_same_id(engine):
    chance = random.Random(20260101)
    expected, refused = [], set()

    def answer(n, call):
        # Every seventh call fails, so that kills also fall between retries; no message fails twice.
        if n % 7 == 6 and call.message_id not in refused:
            refused.add(call.message_id)
            return Answer(503, delay_s=0.01)
        return Answer(204, delay_s=0.01)

    with webhook_receiver(answer) as receiver:
        add_receiver(engine, receiver.url)
        for kill in range(KILLS):
            for n in range(INCIDENTS_A_KILL):
                name = f"inc_{kill}_{n}"
                expected.append((record_sent(engine, name, "opened", 1), record_sent(engine, name, "resolved", 2)))
            before = len(receiver.calls)
            with notifier(engine):
                receiver.wait_for(lambda calls, before=before: len(calls) > before)
                time.sleep(chance.uniform(0, 0.05))  # where in its work the kill falls
        with notifier(engine):
            deadline_s = time.monotonic() + 60
            while waiting(engine):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
        calls = receiver.calls
    ids = receiver.ids
    assert set(ids) == {one for pair in expected for one in pair}
    # At most what was under way at each kill is sent again.
    assert len(ids) <= 2 * len(expected) + len(refused) + KILLS * 8
    for opened, resolved in expected:
        assert ids.index(opened) < ids.index(resolved)
        first_resolved = ids.index(resolved)
        assert opened not in ids[first_resolved:]
    bodies = {call.message_id: call.body for call in calls}
    assert all(bodies[call.message_id] == call.body for call in calls)


def waiting(engine):
    with read(engine) as connection:
        return connection.scalar(select(func.count()).select_from(Outbox).where(Outbox.state == "waiting"))
