"""Receivers' URLs and signing secrets are encrypted in the database."""

import asyncio

import pytest
from sqlalchemy import insert, select

from rankwatch_service.access.secret_key import SecretKey, SecretKeyError, load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.notify.receivers import forget_secret_key
from rankwatch_service.notify.sender import SenderTable, TryOutcome
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Agent, IdempotentReply, Receiver
from tests.support.values.incidents import SECRET, receiver_row

KEY = SecretKey(b"k" * 32)
URL = "https://hooks.example/T00/" + "path" * 20


def stored(engine):
    with read(engine) as connection:
        return {row.name: row for row in connection.execute(select(Receiver.__table__))}


def add_plain(engine, name="pager"):
    reply = {"token_id": "t", "key": "k", "request_sha256": "", "status": 201, "at_unix_ns": 1}
    with write(engine) as connection:
        connection.execute(insert(Receiver).values(**receiver_row(name, url=URL)))
        connection.execute(insert(IdempotentReply).values(body=SECRET.encode(), **reply))


class Sender:
    def __init__(self):
        self.sent = []

    async def send(self, *message):
        self.sent.append(message)
        return TryOutcome(204, "", 0.0)


def test_the_notifier_decrypts_what_it_sends():
    behind = Sender()
    sender = SenderTable(KEY, {"https": behind})
    asyncio.run(sender.send(KEY.encrypt(URL), KEY.encrypt(SECRET), "msg_1", b"{}"))
    assert behind.sent == [(URL, SECRET, "msg_1", b"{}")]


def test_what_another_key_encrypted_is_a_failure_that_says_so_and_reaches_nobody():
    behind, other = Sender(), SecretKey(b"l" * 32)
    sender = SenderTable(KEY, {"https": behind})
    outcome = asyncio.run(sender.send(other.encrypt(URL), KEY.encrypt(SECRET), "msg_1", b"{}"))
    assert (outcome.delivered, behind.sent) == (False, [])
    assert outcome.error == "cannot be sent: it cannot be decrypted with the secret key of this service"


@pytest.mark.parametrize(
    ("url", "chosen"),
    [(URL, "https"), (f"slack+{URL}", "https"), ("email+mailto:ann@example.com", "mailto"), ("kafka:", "kafka")],
)
def test_the_url_of_a_receiver_chooses_its_sender(url, chosen):
    senders = {scheme: Sender() for scheme in ("http", "https", "mailto", "kafka")}
    asyncio.run(SenderTable(KEY, senders).send(KEY.encrypt(url), KEY.encrypt(""), "msg_1", b"{}"))
    assert {scheme: [url for url, *_ in sender.sent] for scheme, sender in senders.items() if sender.sent} == {
        chosen: [url]
    }


def test_the_topic_without_kafka_is_a_failure_that_says_so():
    outcome = asyncio.run(SenderTable(KEY, {}).send(KEY.encrypt("kafka:"), KEY.encrypt(""), "msg_1", b"{}"))
    assert (outcome.delivered, outcome.is_final) == (False, False)
    assert outcome.error == "cannot be sent: this service does not deliver to kafka:"


def test_after_a_lost_key_the_service_starts_with_a_new_one_and_without_receivers(engine, tmp_path):
    clock = SystemClock()
    add_plain(engine)
    agent = {"id": "a", "job": "j", "host": "h", "token_id": "t", "enrolled_unix_ns": 1}
    with write(engine) as connection:
        connection.execute(insert(Agent).values(**agent))
    lost, found = Settings(data_dir=tmp_path / "lost"), Settings(data_dir=tmp_path / "new")
    load_secret_key(lost, engine, clock)
    with pytest.raises(SecretKeyError, match="forget-key"):
        load_secret_key(found, engine, clock)
    with write(engine) as connection:
        assert forget_secret_key(connection) == ["pager"]
    assert stored(engine) == {}
    with read(engine) as connection:
        assert connection.scalar(select(Agent.id)) is None, "it has to enrol again, for a secret of the new key"
    load_secret_key(found, engine, clock)
