"""Notifications in a topic of a real broker."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest
from sqlalchemy import insert, select

from rankwatch.kafka import producer as producer_module
from rankwatch.kafka.producer import Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.access.secret_key import SecretKey, load_secret_key
from rankwatch_service.clock import SystemClock
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.notify.incidents_topic import TopicSender
from rankwatch_service.notify.receivers import TOPIC_RECEIVER, TOPIC_URL, add_topic_receiver
from rankwatch_service.notify.sender import TryOutcome
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Audit, Outbox, Receiver
from tests.support.kafka.broker import new_prefix, read_topic
from tests.support.service.process import until
from tests.support.values.incidents import incident_message, notified, transition

KEY = SecretKey(b"k" * 32)
SECRET = "a secret key for tests, long enough"
SOURCE = "https://watch.example"
BODY = incident_message(transition(), {})


def send(kafka: KafkaSettings) -> TryOutcome:
    async def once() -> TryOutcome:
        producer = Producer(kafka)
        sender = TopicSender(producer, kafka.incidents_topic, SOURCE, SystemClock())
        outcome = await sender.send(TOPIC_URL, "whsec_x", "msg_1", BODY)
        await asyncio.to_thread(producer.close, 1.0)
        return outcome

    return asyncio.run(once())


def settings_at(bootstrap: str) -> Settings:
    settings = Settings(kafka=bootstrap, kafka_prefix=new_prefix(), kafka_partitions=1)
    ensure_topics(settings)
    return settings


@pytest.mark.integration
def test_a_message_is_a_cloud_event_with_the_notification_s_id(any_broker):
    kafka = settings_at(any_broker.bootstrap).kafka_settings()
    outcome = send(kafka)
    assert outcome.delivered, outcome.error
    (event,) = read_topic(kafka.bootstrap, kafka.incidents_topic, bool)
    reported = json.loads(BODY)
    assert event.value == BODY
    assert event.key == reported["data"]["job"]
    assert event.headers == {
        "ce_specversion": "1.0",
        "ce_id": "msg_1",
        "ce_source": SOURCE,
        "ce_type": "io.rankwatch.incident.opened",
        "ce_time": reported["timestamp"],
        "ce_subject": reported["data"]["id"],
        "content-type": "application/json",
    }


def test_without_a_broker_it_is_a_failure_that_says_why(monkeypatch):
    monkeypatch.setattr(producer_module, "CONNECT_S", 0.5)
    outcome = send(KafkaSettings("127.0.0.1:1"))
    assert (outcome.status, outcome.delivered) == (None, False)
    assert "ECONNREFUSED" in outcome.error


def test_the_topic_becomes_a_receiver_once(engine):
    clock = SystemClock()
    add_topic_receiver(engine, clock, KEY)
    add_topic_receiver(engine, clock, KEY)
    with read(engine) as connection:
        (row,) = connection.execute(select(Receiver.__table__)).mappings()
        (audited,) = connection.execute(select(Audit.__table__)).mappings()
    assert (row["name"], KEY.decrypt(row["url"]), row["enabled"]) == (TOPIC_RECEIVER, TOPIC_URL, True)
    assert audited["target"] == TOPIC_RECEIVER


@pytest.mark.ci
@pytest.mark.integration
def test_the_notifier_publishes_committed_messages_to_the_topic_in_order(any_broker, engine):
    settings = settings_at(any_broker.bootstrap)
    kafka = settings.kafka_settings()
    environment = {
        **os.environ,
        "RANKWATCH_DATABASE_URL": engine.url.render_as_string(hide_password=False),
        "RANKWATCH_KAFKA": settings.kafka,
        "RANKWATCH_KAFKA_PREFIX": settings.kafka_prefix,
        "RANKWATCH_SECRET_KEY": SECRET,
    }
    clock = SystemClock()
    key = load_secret_key(Settings(secret_key=SECRET), engine, clock)
    add_topic_receiver(engine, clock, key)
    rows = []
    for n in range(5):
        for number, what in enumerate(("opened", "updated", "resolved"), 1):
            sent = notified(what, number, (TOPIC_RECEIVER,), now_unix_ns=time.time_ns(), id=f"inc_{n}")
            rows += sent
    with write(engine) as connection:
        connection.execute(insert(Outbox), rows)
    command = [sys.executable, "-m", "rankwatch_service", "notify"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        found = read_topic(kafka.bootstrap, kafka.incidents_topic, lambda all_: len(all_) >= 15, within_s=60.0)
        for n in range(5):
            ours = [one for one in found if one.headers["ce_subject"] == f"inc_{n}"]
            assert [one.headers["ce_type"].rpartition(".")[2] for one in ours] == ["opened", "updated", "resolved"]
        assert {one.headers["ce_id"] for one in found} == {row["id"] for row in rows}
        until("all are marked delivered", lambda: states(engine) == {"delivered"})
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def states(engine):
    with read(engine) as connection:
        return set(connection.scalars(select(Outbox.state)))
