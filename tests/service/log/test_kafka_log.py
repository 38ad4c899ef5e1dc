"""The Kafka form of the log, against the brokers that can be had."""

import pytest

from rankwatch.kafka_producer import Producer
from rankwatch_service.clock import SystemClock
from rankwatch_service.log import kafka_log
from rankwatch_service.log.base import LogError
from rankwatch_service.log.kafka import ensure_topics
from rankwatch_service.log.kafka_log import KafkaLog
from rankwatch_service.settings import Settings
from tests.service.log.contract import LogContract, entry, values
from tests.support.kafka_broker import new_prefix, shared

pytestmark = pytest.mark.integration

PARTITIONS = 3


def settings_of(broker) -> Settings:
    return Settings(kafka=broker.bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)


@pytest.fixture
def kafka(any_broker):
    """Topics of a test's own."""
    settings = settings_of(any_broker)
    ensure_topics(settings)
    return settings.kafka_settings()


@pytest.fixture
def producer(kafka):
    producer = Producer(kafka)
    yield producer
    producer.close(2.0)


@pytest.fixture
def log(kafka, producer):
    log = KafkaLog(kafka, SystemClock(), producer)
    yield log
    log.close()


class TestKafkaLog(LogContract):
    @pytest.fixture(params=["apache", "noida"])
    def log(self, request):
        """Not tansu: it tells wrong end offsets."""
        settings = settings_of(shared(request, request.param))
        ensure_topics(settings)
        kafka = settings.kafka_settings()
        producer = Producer(kafka)
        log = KafkaLog(kafka, SystemClock(), producer)
        yield log
        log.close()
        producer.close(2.0)


def test_the_broker_stamps_records_not_whoever_sent_them(log):
    before_ns = SystemClock().unix_ns()
    log.append([entry(b"x")])
    (record,) = log.read(log.partition_of("job"), 0, 1, wait_s=15.0)
    assert abs(record.appended_unix_ns - before_ns) < 60e9


def test_a_log_that_was_opened_before_there_is_a_topic_says_what_to_do(any_broker):
    log = KafkaLog(settings_of(any_broker).kafka_settings(), SystemClock())
    with pytest.raises(LogError, match="rankwatch db upgrade"):
        log.fetch(0.1)


def test_a_partition_that_is_full_is_not_fetched_until_it_was_read(log, monkeypatch):
    monkeypatch.setattr(kafka_log, "BUFFER_BYTES_MAX", 20_000)
    monkeypatch.setattr(kafka_log, "FETCH_RECORDS_MAX", 5)
    log.append([entry(bytes(1_000)) for _ in range(100)])
    partition = log.partition_of("job")
    assert len(log.read(partition, 0, 1, wait_s=15.0)) == 1
    for _ in range(50):
        log.fetch(0.01)
    assert log._buffers[partition].bytes <= 25_000
    assert len(values(log)) == 100


def test_each_partition_is_read_from_where_its_reader_stands(log):
    keys = {log.partition_of(f"job-{number}"): f"job-{number}" for number in range(50)}
    assert set(keys) == set(range(PARTITIONS))
    for key in keys.values():
        log.append([entry(b"%d" % number, key) for number in range(20)])
    places = dict.fromkeys(keys, 5)
    seen = {partition: [] for partition in keys}
    while any(place < 20 for place in places.values()):
        for partition, key in keys.items():
            records = log.read(partition, places[partition], 3, wait_s=15.0)
            assert {record.key for record in records} <= {key}
            seen[partition] += [int(record.value) for record in records]
            places[partition] += len(records)
    assert all(numbers == list(range(5, 20)) for numbers in seen.values())
