"""Telemetry over HTTP into a real broker."""

import time

import pytest

from rankwatch import wire
from rankwatch.kafka import producer as producer_module
from rankwatch.kafka.settings import KafkaSettings, partition_of
from rankwatch_service.api import kafka_intake
from rankwatch_service.api.kafka_intake import KafkaIntake, ProducerCollector
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.kafka.broker import kafka_broker, new_prefix, read_topic
from tests.support.service.api import running_api
from tests.support.service.process import until

pytestmark = pytest.mark.integration

PARTITIONS = 4
NOBODY = "127.0.0.1:1"


def batch(seq: int = 0, job: str = "j") -> bytes:
    return wire.encode(wire.Batch(1, job, "l.0", "h", "b", seq, 0))


def topics_at(bootstrap: str) -> KafkaSettings:
    settings = Settings(kafka=bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
    ensure_topics(settings)
    kafka = settings.kafka_settings()
    assert kafka is not None
    return kafka


def test_a_batch_accepted_with_202_is_in_the_topic_unchanged(any_broker, tmp_path):
    kafka = topics_at(any_broker.bootstrap)
    intake = KafkaIntake(kafka)
    bodies = [batch(seq, f"job{seq % 5}") for seq in range(40)]
    with running_api(tmp_path, intake=intake) as api:
        api.app.state.context.counters.registry.register(ProducerCollector(intake.producer))
        assert [api.send(body).status_code for body in bodies] == [202] * 40
        said = api.send(
            b'{"schema":1,"job":"plain","attempt":"l.0","host":"h","boot":"b","seq":0,"sent_unix_ns":0}',
            headers={"content-type": "application/json"},
        )
        assert said.status_code == 202
        metrics = api.get("/metrics").text
        assert "rankwatch_kafka_published_total 41.0" in metrics
        assert "rankwatch_kafka_away 0.0" in metrics
        assert api.log.read(0, 0, 10) == []
    found = read_topic(kafka.bootstrap, kafka.telemetry_topic, lambda all_: len(all_) >= 41, PARTITIONS)
    assert sorted(one.value for one in found if one.key != "plain") == sorted(bodies)
    assert {one.partition for one in found if one.key == "job3"} == {partition_of("job3", PARTITIONS)}
    (plain,) = (one for one in found if one.key == "plain")
    assert wire.decode_batch(plain.value).job == "plain"


def test_without_a_broker_telemetry_is_503_in_bounded_time_and_everything_else_works(tmp_path, monkeypatch):
    monkeypatch.setattr(producer_module, "CONNECT_S", 1.0)
    with running_api(tmp_path, intake=KafkaIntake(KafkaSettings(NOBODY))) as api:
        for _ in range(3):
            began_s = time.monotonic()
            answer = api.send(batch())
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert "ECONNREFUSED" in answer.json()["detail"]
            assert time.monotonic() - began_s < kafka_intake.ANSWER_WITHIN_S + 5.0
        assert api.get("/api/v1/jobs").status_code == 200
        assert api.get("/readyz").status_code == 200
        assert 'rankwatch_ingest_batches_total{result="busy"} 3.0' in api.get("/metrics").text


def test_a_broker_that_hangs_makes_no_request_hang_and_takes_the_same_batch_afterwards(tmp_path, monkeypatch):
    monkeypatch.setattr(kafka_intake, "ANSWER_WITHIN_S", 1.0)
    with kafka_broker("noida") as broker:
        kafka = topics_at(broker.bootstrap)
        with running_api(tmp_path, intake=KafkaIntake(kafka)) as api:
            assert api.send(batch(0)).status_code == 202
            broker.pause()
            try:
                began_s = time.monotonic()
                answer = api.send(batch(1))
                assert answer.status_code == 503
                assert "no acknowledgement by Kafka" in answer.json()["detail"]
                assert time.monotonic() - began_s < kafka_intake.ANSWER_WITHIN_S + 9.0
                assert api.get("/api/v1/jobs").status_code == 200
            finally:
                broker.resume()
            until("the batch is taken", lambda: api.send(batch(1)).status_code == 202)
        found = read_topic(broker.bootstrap, kafka.telemetry_topic, lambda all_: len(all_) >= 2, PARTITIONS)
        assert {one.value for one in found} == {batch(0), batch(1)}


def test_a_batch_that_brokers_refuse_is_413_and_a_dead_letter(any_broker, tmp_path, monkeypatch):
    monkeypatch.setattr(producer_module, "MESSAGE_BYTES_MAX", 1_000)
    kafka = topics_at(any_broker.bootstrap)
    large = wire.encode(
        wire.Batch(1, "j", "l.0", "h", "b", 0, 0, events=tuple(wire.Event("note", number) for number in range(200)))
    )
    with running_api(tmp_path, intake=KafkaIntake(kafka)) as api:
        answer = api.send(large)
        assert answer.status_code == 413
        assert 'rankwatch_ingest_batches_total{result="too_large"} 1.0' in api.get("/metrics").text
        assert api.send(batch()).status_code == 202
