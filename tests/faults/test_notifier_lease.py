"""Two notifiers on one database: the one with the lease stands still, the other goes on, nothing is sent twice."""

import os
import signal
import time

import pytest
from sqlalchemy import insert, select

from rankwatch_service.access.secret_key import SecretKey
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Lease, Outbox, Receiver
from rankwatch_service.store.rows import outbox_row
from tests.support.service.process import Role, until
from tests.support.service.webhook_receiver import webhook_receiver
from tests.support.values.incidents import SECRET, notified, receiver_row

pytestmark = [pytest.mark.integration, pytest.mark.ci]

KEY = "0123456789abcdef" * 4


def tell(engine, incident):
    rows = [outbox_row(one) for one in notified("opened", 1, now_unix_ns=time.time_ns(), id=incident)]
    with write(engine) as connection:
        connection.execute(insert(Outbox), rows)
    return rows[0]["id"]


def holder(engine):
    """The pid of the notifier that has the lease; None while there is none."""
    with read(engine) as connection:
        name = connection.scalar(select(Lease.holder).where(Lease.name == "notify", Lease.expires_unix_ns > 0))
    return None if name is None else int(name.split()[-2])


@pytest.fixture
def pair(tmp_path, database_url):
    environment = {"RANKWATCH_SECRET_KEY": KEY, "RANKWATCH_NOTIFY_ALLOW": "127.0.0.1"}
    pair = [Role(tmp_path / name, "notify", "--database-url", database_url, environment=environment) for name in "ab"]
    for role in pair:
        role.start()
    yield pair
    for role in pair:
        assert role.stop() == 0


def test_another_notifier_goes_on_when_the_first_stands_still_and_it_comes_back_as_the_second(engine, pair):
    with webhook_receiver() as receiver:
        with write(engine) as connection:
            encrypt = SecretKey(KEY.encode()).encrypt
            row = receiver_row(url=encrypt(receiver.url), secret=encrypt(SECRET))
            connection.execute(insert(Receiver).values(**row))
        told = [tell(engine, "inc_before")]
        receiver.wait_for(lambda calls: len(calls) == 1)
        # A message on its way when its sender stands still is sent again, under the same id: here there is none.
        until("its result", lambda: not waiting(engine))
        first = until("a leader", lambda: holder(engine))
        try:
            os.kill(first, signal.SIGSTOP)
            told += [tell(engine, f"inc_while_{n}") for n in range(20)]
            receiver.wait_for(lambda calls: len(calls) >= len(told))
            second = until("another leader", lambda: holder(engine) != first and holder(engine))
        finally:
            os.kill(first, signal.SIGCONT)
        told += [tell(engine, f"inc_after_{n}") for n in range(20)]
        receiver.wait_for(lambda calls: len(calls) >= len(told))
        until("every result", lambda: not waiting(engine))
        assert holder(engine) == second
        assert sorted(receiver.ids) == sorted(told)
        assert {role.process.pid for role in pair} == {first, second}


def waiting(engine):
    with read(engine) as connection:
        return connection.scalars(select(Outbox.id).where(Outbox.state == "waiting")).all()
