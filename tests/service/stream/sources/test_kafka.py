"""Kafka as a source, against the brokers that can be had."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest

from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import KafkaSettings, partition_of
from rankwatch.outcome import Accepted
from rankwatch_service.clock import SystemClock
from rankwatch_service.log.base import Entry, LogError
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.stream import kafka_source
from rankwatch_service.stream.kafka_source import KafkaSource
from tests.service.stream.sources.contract import Append, SourceContract, entry, values
from tests.support.kafka.broker import kafka_broker, new_prefix, shared
from tests.support.service.process import free_port

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PARTITIONS = 3


def settings_of(broker) -> Settings:
    return Settings(kafka=broker.bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)


@contextmanager
def publishing(kafka: KafkaSettings) -> Iterator[Append]:
    """What puts entries into the topic; they lie there when it returns."""
    producer = Producer(kafka)

    def append(entries: Sequence[Entry]) -> None:
        messages = [Message(kafka.telemetry_topic, entry.key, entry.value) for entry in entries]
        assert producer.publish(messages, 30.0) == [Accepted()] * len(entries)

    yield append
    producer.close(2.0)


def publish(kafka: KafkaSettings, *values: bytes) -> None:
    """As somebody who came just now, and knows where the brokers are now."""
    with publishing(kafka) as append:
        append([entry(value) for value in values])


@pytest.fixture
def kafka(any_broker):
    """Topics of a test's own."""
    settings = settings_of(any_broker)
    ensure_topics(settings)
    return settings.kafka_settings()


@pytest.fixture
def log(kafka):
    log = KafkaSource(kafka, SystemClock())
    yield log
    log.close()


@pytest.fixture
def append(kafka):
    with publishing(kafka) as append:
        yield append


class TestKafkaSource(SourceContract):
    @pytest.fixture(params=["apache", "noida"])
    def any_broker(self, request):
        """Not tansu: it tells wrong end offsets."""
        return shared(request, request.param)


def test_the_broker_stamps_records_not_whoever_sent_them(log, append):
    before_ns = SystemClock().unix_ns()
    append([entry(b"x")])
    (record,) = log.read(log.partition_of("job"), 0, 1, wait_s=15.0)
    assert abs(record.appended_unix_ns - before_ns) < 60e9


@pytest.mark.ci
def test_a_log_that_was_opened_before_there_is_a_topic_says_what_to_do(any_broker):
    log = KafkaSource(settings_of(any_broker).kafka_settings(), SystemClock())
    with pytest.raises(LogError, match="rankwatch db upgrade"):
        log.fetch(0.1)


def test_a_partition_that_is_full_is_not_fetched_until_it_was_read(log, append, monkeypatch):
    monkeypatch.setattr(kafka_source, "BUFFER_BYTES_MAX", 20_000)
    monkeypatch.setattr(kafka_source, "FETCH_RECORDS_MAX", 5)
    append([entry(bytes(1_000)) for _ in range(100)])
    partition = log.partition_of("job")
    assert len(log.read(partition, 0, 1, wait_s=15.0)) == 1
    for _ in range(50):
        log.fetch(0.01)
    assert log._buffers[partition].bytes <= 25_000
    assert len(values(log)) == 100


def test_each_partition_is_read_from_where_its_reader_stands(log, append):
    keys = {log.partition_of(f"job-{number}"): f"job-{number}" for number in range(50)}
    assert set(keys) == set(range(PARTITIONS))
    for key in keys.values():
        append([entry(b"%d" % number, key) for number in range(20)])
    places = dict.fromkeys(keys, 5)
    seen = {partition: [] for partition in keys}
    while any(offsets < 20 for offsets in places.values()):
        for partition, key in keys.items():
            records = log.read(partition, places[partition], 3, wait_s=15.0)
            assert {record.key for record in records} <= {key}
            seen[partition] += [int(record.value) for record in records]
            places[partition] += len(records)
    assert all(numbers == list(range(5, 20)) for numbers in seen.values())


@pytest.fixture
def movable(monkeypatch):
    """A broker of the test's own that can go away, with a topic, and a log that loses patience quickly."""
    monkeypatch.setattr(kafka_source, "SILENCE_S", 2.0)
    monkeypatch.setattr(kafka_source, "CONNECT_S", 1.0)
    second = free_port()
    with kafka_broker("apache") as broker:
        both = f"{broker.bootstrap},127.0.0.1:{second}"
        settings = Settings(kafka=both, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
        ensure_topics(settings)
        kafka = settings.kafka_settings()
        log = KafkaSource(kafka, SystemClock(), group="group", session_ms=2_000)
        yield broker, kafka, log, second
        log.close()


def fetched(log, partition: int, position: int, count: int) -> list[bytes]:
    """So many records, through whatever happens to the broker."""
    found, deadline_s = [], time.monotonic() + 60.0
    while len(found) < count:
        assert time.monotonic() < deadline_s, found
        try:
            log.fetch(0.05)
            if partition in log.assigned:
                found += [record.value for record in log.read(partition, position + len(found), 10)]
        except LogError:
            time.sleep(0.05)
    return found


@pytest.mark.ci
def test_a_consumer_whose_brokers_all_moved_is_replaced_and_goes_on_where_it_stood(movable):
    broker, kafka, log, second = movable
    partition = partition_of("job", PARTITIONS)
    publish(kafka, b"0", b"1")
    assert fetched(log, partition, 0, 2) == [b"0", b"1"]
    broker.restart(port=second)
    publish(kafka, b"2", b"3")
    assert fetched(log, partition, 2, 2) == [b"2", b"3"]
    assert log.counts["rebuilds"] >= 1


@pytest.mark.ci
def test_while_no_broker_answers_nothing_is_taken_for_silence(movable):
    broker, kafka, log, _ = movable
    partition = partition_of("job", PARTITIONS)
    publish(kafka, b"0")
    assert fetched(log, partition, 0, 1) == [b"0"]
    while not log.drained(partition, 1):
        log.fetch(0.05)
    broker.pause()
    deadline_s = time.monotonic() + 30.0
    while log.drained(partition, 1):
        assert time.monotonic() < deadline_s
        with suppress(LogError):
            log.fetch(0.05)
    broker.resume()
    publish(kafka, b"1")
    assert fetched(log, partition, 1, 1) == [b"1"]


def read_until_it_fails(log, partition: int, position: int) -> None:
    deadline_s = time.monotonic() + 30.0
    while time.monotonic() < deadline_s:
        assert log.read(partition, position, 10) == []
        log.fetch(0.05)


def test_a_position_behind_the_end_is_a_log_that_was_made_anew(log, append):
    partition = log.partition_of("job")
    append([entry(b"0"), entry(b"1")])
    with pytest.raises(LogError, match="another log"):
        read_until_it_fails(log, partition, 100)
    assert log.end(partition) == 2
    assert values(log) == [b"0", b"1"]
