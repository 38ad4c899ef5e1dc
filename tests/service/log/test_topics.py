"""The topics on real brokers, by function and by command."""

import pytest
from kafka import KafkaAdminClient
from kafka.admin import ConfigResource, ConfigResourceType

from rankwatch.kafka.client import KafkaAwayError, opened
from rankwatch.kafka.settings import MESSAGE_BYTES_MAX
from rankwatch_service.clock import SystemClock
from rankwatch_service.log import kafka_topics as topics
from rankwatch_service.log.kafka_topics import ensure_topics, ensure_topics_soon, topic_partitions
from rankwatch_service.settings import Settings
from tests.support.kafka.broker import Broker, kafka_broker, missing, new_prefix
from tests.support.service.process import Role, free_port, until

pytestmark = pytest.mark.integration


def settings_at(bootstrap, **more):
    return Settings(**{"kafka": bootstrap, "kafka_prefix": new_prefix(), "kafka_partitions": 5} | more)


def test_topics_are_made_once_and_their_partitions_hold_whatever_the_settings_say(broker):
    settings = settings_at(broker.bootstrap)
    prefix = settings.kafka_prefix
    assert set(topic_partitions(settings).values()) == {0}
    assert ensure_topics(settings) == 5
    assert ensure_topics(settings.model_copy(update={"kafka_partitions": 7})) == 5
    assert topic_partitions(settings) == {f"{prefix}.telemetry": 5, f"{prefix}.dead-letters": 1}


@pytest.mark.ci
def test_a_topic_has_the_broker_s_clock_room_for_the_largest_batch_and_the_retention_that_was_set(apache):
    settings = settings_at(apache.bootstrap, kafka_retention_hours=3)
    ensure_topics(settings)
    kafka = settings.kafka_settings()
    admin = opened(KafkaAdminClient, kafka)
    [reported] = admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, kafka.telemetry_topic)]).values()
    admin.close()
    found = {name: one["value"] for name, one in reported[kafka.telemetry_topic].items()}
    assert found["message.timestamp.type"] == "LogAppendTime"
    assert found["max.message.bytes"] == str(MESSAGE_BYTES_MAX)
    assert found["retention.ms"] == str(3 * 3_600_000)
    assert found["min.insync.replicas"] == "1"


def test_without_a_broker_it_is_an_error_that_says_why(monkeypatch):
    monkeypatch.setattr(topics, "opened", lambda kind, kafka: opened(kind, kafka, 0.5))
    with pytest.raises(KafkaAwayError, match="ECONNREFUSED"):
        ensure_topics(settings_at("127.0.0.1:1"))


def test_a_role_that_works_without_kafka_makes_the_topics_when_a_broker_comes(tmp_path, monkeypatch):
    if why := missing("noida"):
        pytest.skip(why)
    monkeypatch.setattr(topics, "opened", lambda kind, kafka: opened(kind, kafka, 0.2))
    broker = Broker("noida", tmp_path, port=free_port())
    settings = settings_at(broker.bootstrap)
    monkeypatch.setattr(topics, "RETRY_S", 0.1)
    ensure_topics_soon(settings, SystemClock())
    broker.start()
    try:
        until("topics are made", lambda: all(topic_partitions(settings).values()))
    finally:
        broker.kill()


@pytest.mark.ci
def test_the_upgrade_command_makes_the_topics_and_the_doctor_finds_them(tmp_path):
    with kafka_broker("noida") as broker:
        options = ("--data", str(tmp_path / "data"), "--kafka", broker.bootstrap)
        (tmp_path / "data").mkdir()

        def run(name, *words):
            role = Role(tmp_path / name, *words, *options)
            role.start()
            assert role.process is not None
            return role.process.wait(60), role.said()

        status, said = run("before", "doctor", "--json")
        assert status == 1
        assert "there is no topic rankwatch.telemetry" in said
        status, said = run("upgrade", "db", "upgrade")
        assert (status, "telemetry has 24 partitions" in said) == (0, True), said
        status, said = run("after", "doctor", "--json")
        assert "rankwatch.telemetry, 24 partitions" in said
        assert "there is no topic" not in said
