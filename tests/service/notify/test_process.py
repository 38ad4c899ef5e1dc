"""The notifier as a real process: fast, and killed with SIGKILL at many points."""

import json
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
from sqlalchemy import func, insert, select
from standardwebhooks import Webhook

from rankwatch_service.policy.control_records import JobProject
from rankwatch_service.policy.routing import outgoing
from rankwatch_service.policy.settings_in_force import SettingsInForce
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Incident, Outbox, Receiver
from rankwatch_service.store.rows import outbox_row
from rankwatch_service.store.upsert import upsert
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.store.database import new_database
from tests.support.trials.selection import trials
from tests.support.values.incidents import SECRET, incident_row, notified, receiver_row, transition

RUN = (
    "import sys; from rankwatch_service.notify.serve import run; from rankwatch_service.settings import Settings;"
    "run(Settings(database_url=sys.argv[1], notify_allow_private=True, routes=(sys.argv[2:] or [None])[0]))"
)
INCIDENTS_A_KILL = 6
KILLS = trials(6, 12)


@contextmanager
def notifier(engine, *routes):
    process = subprocess.Popen([sys.executable, "-c", RUN, str(engine.url), *routes], stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def tell(engine, incident, what, number):
    rows = [outbox_row(one) for one in notified(what, number, now_unix_ns=time.time_ns(), id=incident)]
    with write(engine) as connection:
        connection.execute(insert(Outbox), rows)
    return rows[0]["id"]


@pytest.fixture
def engine(tmp_path):
    engine = new_database(tmp_path)
    yield engine
    engine.dispose()


def add_receiver(engine, url):
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row(url=url)))


@pytest.mark.integration
def test_a_commit_reaches_the_receiver_signed_and_the_process_ends_on_sigterm(engine):
    with webhook_receiver() as receiver:
        add_receiver(engine, receiver.url)
        with notifier(engine) as process:
            tell(engine, "inc_first", "opened", 1)
            receiver.wait_for(lambda calls: len(calls) == 1)
            for n in range(20):
                committed_s = time.monotonic()
                tell(engine, f"inc_{n}", "opened", 1)
                receiver.wait_for(lambda calls, n=n: len(calls) == n + 2)
                # A generous bound: what it really takes stands in docs/performance.md.
                assert receiver.calls[-1].at_s - committed_s < 5.0
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
    for call in receiver.calls:
        assert Webhook(SECRET).verify(call.body, call.headers) == json.loads(call.body)


@pytest.mark.integration
@pytest.mark.slow
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
                expected.append((tell(engine, name, "opened", 1), tell(engine, name, "resolved", 2)))
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


@pytest.mark.integration
def test_with_routes_one_message_tells_of_a_group_and_one_of_its_end_though_the_process_is_killed(engine, tmp_path):
    routes = tmp_path / "routes.toml"
    routes.write_text('[route]\nreceiver = "pager"\ngroup_by = ["job"]\ngroup_wait = "0s"\ngroup_interval = "1s"\n')
    settings = SettingsInForce()
    settings.is_grouped = True

    def commit(what, number, state):
        told = [transition(what, number, id=f"inc_{n}", state=state) for n in range(5)]
        whose = JobProject("gpt-small")
        entries = [entry for one in told for entry in outgoing(one, settings, {}, time.time_ns(), None, whose, 4)]
        with write(engine) as connection:
            # The notifier leaves out incidents that have been deleted.
            rows = [incident_row(id=one.incident.id) for one in told]
            connection.execute(upsert(connection, Incident), rows)
            connection.execute(insert(Outbox), [outbox_row(entry) for entry in entries])

    with webhook_receiver() as receiver:
        add_receiver(engine, receiver.url)
        with notifier(engine, str(routes)):
            commit("opened", 1, "open")
            receiver.wait_for(lambda calls: len(calls) == 1)
        with notifier(engine, str(routes)):
            commit("resolved", 2, "resolved")
            receiver.wait_for(lambda calls: calls[-1].body.startswith(b'{"type":"group.resolved"'))
    # The first is sent again if the kill came before its try was recorded.
    bodies = {call.message_id: Webhook(SECRET).verify(call.body, call.headers)["data"] for call in receiver.calls}
    told = [(data["reason"], data["incident_count"], data["open_count"]) for data in bodies.values()]
    assert told == [("first notification", 5, 5), ("all incidents resolved", 5, 0)]


def waiting(engine):
    with read(engine) as connection:
        return connection.scalar(select(func.count()).select_from(Outbox).where(Outbox.state == "waiting"))
