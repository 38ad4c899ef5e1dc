"""The producer against real brokers: what it says has arrived has arrived, whatever happens to them."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kafka import KafkaAdminClient

from rankwatch.kafka import producer as producer_module
from rankwatch.kafka.client import CLOSED_HINT, explained, listen, opened
from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import MESSAGE_BYTES_MAX, KafkaSettings, partition_of
from rankwatch.outcome import Accepted, Later, Outcome, Refused
from rankwatch_service.log.kafka_topics import ensure_topics, topic_partitions
from rankwatch_service.settings import Settings
from tests.support.kafka.broker import Broker, Lying, kafka_broker, new_prefix, read_topic, secure_kafka
from tests.support.service.process import free_port, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]

PARTITIONS = 3
STALL_S = 2.0


def with_topics(bootstrap: str) -> KafkaSettings:
    """Settings for topics of one's own, which exist."""
    settings = Settings(kafka=bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
    assert ensure_topics(settings) == PARTITIONS
    return settings.kafka_settings()


Begin = Callable[..., tuple[KafkaSettings, Producer]]


@pytest.fixture
def begin() -> Iterator[Begin]:
    """Producers for topics of their own that have sent so many messages; they are closed at the end."""
    made: list[Producer] = []

    def begin(kafka: KafkaSettings | Broker, sent: int = 0, **more: float) -> tuple[KafkaSettings, Producer]:
        settings = kafka if isinstance(kafka, KafkaSettings) else with_topics(kafka.bootstrap)
        made.append(Producer(settings, **more))
        deliver(made[-1], numbered(settings, range(sent)))
        return settings, made[-1]

    yield begin
    for producer in made:
        producer.close(0.0)


def numbered(kafka: KafkaSettings, numbers: range) -> list[Message]:
    return [Message(kafka.telemetry_topic, "job", b"%d" % number) for number in numbers]


def deliver(producer: Producer, messages: list[Message]) -> None:
    """Publish as an agent does: what comes back is sent again, before anything newer."""
    deadline_s, outcomes = time.monotonic() + 60.0, []
    while messages:
        assert time.monotonic() < deadline_s, f"{len(messages)} left: {outcomes[-1:]}"
        outcomes = producer.publish(messages, 20.0)
        messages = [one for one, outcome in zip(messages, outcomes, strict=True) if isinstance(outcome, Later)]
        if messages:
            time.sleep(0.05)


def lying(kafka: KafkaSettings, count: int) -> list[Lying]:
    return read_topic(
        kafka.bootstrap, kafka.telemetry_topic, lambda found: len({one.value for one in found}) >= count, PARTITIONS
    )


def firsts(found: list[Lying]) -> list[bytes]:
    """Values in the order in which each came first."""
    return list(dict.fromkeys(one.value for one in found))


def test_messages_arrive_in_order_once_each_in_the_partition_of_their_key(broker, begin):
    kafka, producer = begin(broker)
    headers = (("reason", b"none"),)
    sent = [Message(kafka.telemetry_topic, f"job{n % 7}", b"%d" % n, headers) for n in range(700)]
    assert producer.publish(sent, 30.0) == [Accepted()] * 700
    found = lying(kafka, 700)
    assert len(found) == 700
    for job in (f"job{n}" for n in range(7)):
        ours = [one for one in found if one.key == job]
        assert [one.value for one in ours] == [one.value for one in sent if one.key == job]
        assert {one.partition for one in ours} == {partition_of(job, PARTITIONS)}
    assert all(one.headers == {"reason": "none"} for one in found)
    assert all(one.by_broker_clock for one in found) == (broker.kind != "tansu")
    done = producer.counts()
    assert (done.published, done.published_bytes) == (700, sum(len(one.value) for one in sent))
    assert producer.waiting_bytes == 0


def test_a_job_lies_in_the_same_partition_in_every_version() -> None:
    assert [partition_of(name, 24) for name in ("gpt", "job 7", "jöb")] == [20, 23, 16]


def test_a_message_that_is_too_large_is_refused_for_good(broker, begin):
    kafka, producer = begin(broker)
    sent = [Message(kafka.telemetry_topic, "job", value) for value in (bytes(MESSAGE_BYTES_MAX + 1), b"small")]
    large, small = producer.publish(sent, 30.0)
    assert isinstance(large, Refused)
    assert (large.reason, small) == ("too_large", Accepted())
    assert producer.counts().refused == {"too_large": 1}
    assert firsts(lying(kafka, 1)) == [b"small"]


def test_what_the_broker_itself_finds_too_large_is_refused_without_harm_to_others(apache, begin):
    kafka, producer = begin(KafkaSettings(apache.bootstrap, new_prefix()))
    topic = {"num_partitions": PARTITIONS, "replication_factor": 1, "configs": {"max.message.bytes": "10000"}}
    admin = opened(KafkaAdminClient, kafka)
    admin.create_topics({kafka.telemetry_topic: topic}, wait_for_metadata=True)
    admin.close()
    large = Message(kafka.telemetry_topic, "job", os.urandom(50_000))
    small = numbered(kafka, range(10))
    deliver(producer, [*small[:5], large, *small[5:]])
    assert producer.counts().refused == {"too_large": 1}
    assert firsts(lying(kafka, 10)) == [one.value for one in small]


def test_a_topic_that_is_missing_is_waited_for_and_never_made_by_us(broker, begin, monkeypatch):
    monkeypatch.setattr(producer_module, "CONNECT_S", 1.0)
    settings = Settings(kafka=broker.bootstrap, kafka_prefix=new_prefix(), kafka_partitions=PARTITIONS)
    kafka, producer = begin(settings.kafka_settings())
    [outcome] = producer.publish(numbered(kafka, range(1)), 30.0)
    assert isinstance(outcome, Later)
    assert kafka.telemetry_topic in outcome.reason
    assert set(topic_partitions(settings).values()) == {0}
    ensure_topics(settings)
    deliver(producer, numbered(kafka, range(1)))


@pytest.fixture(scope="module", params=[pytest.param("apache", marks=pytest.mark.ci), "noida"])
def own(request: pytest.FixtureRequest) -> Iterator[Broker]:
    """A broker that may be stopped; every test leaves it running."""
    with kafka_broker(request.param) as broker:
        yield broker


def test_a_restart_of_the_broker_loses_nothing_and_keeps_the_order(own: Broker, begin: Begin) -> None:
    kafka, producer = begin(own, 50, stall_s=STALL_S)
    # Apache Kafka is killed while messages come; noida forgets what it acknowledges while it ends.
    if own.kind == "noida":
        own.stop()

    def send() -> None:
        for at in range(50, 250, 10):
            deliver(producer, numbered(kafka, range(at, at + 10)))
            time.sleep(0.02)

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(send)
        own.kill()
        own.start()
        sending.result()
    deliver(producer, numbered(kafka, range(250, 260)))
    assert firsts(lying(kafka, 260)) == [b"%d" % n for n in range(260)]


def test_a_hung_broker_gets_its_messages_back_to_the_sender_and_costs_no_cpu(own, begin):
    kafka, producer = begin(own, 10, stall_s=STALL_S)
    own.pause()
    try:
        outcomes = producer.publish(numbered(kafka, range(10, 20)), 30.0)
        assert [type(one) for one in outcomes] == [Later] * 10
        began_s, cpu_s = time.monotonic(), time.process_time()
        time.sleep(3.0)
        # While the client holds messages it takes 0.9 of a core; that it holds none is what counts here.
        assert time.process_time() - cpu_s < 0.3 * (time.monotonic() - began_s)
        began_s = time.monotonic()
        assert isinstance(producer.publish(numbered(kafka, range(10, 11)), 30.0)[0], Later)
        assert time.monotonic() - began_s < STALL_S
        assert producer.waiting_bytes == 0
    finally:
        own.resume()
    deliver(producer, numbered(kafka, range(10, 20)))
    assert firsts(lying(kafka, 20)) == [b"%d" % n for n in range(20)]


def test_a_broker_that_comes_back_at_another_address_is_found(own: Broker, begin: Begin) -> None:
    there, elsewhere = own.port, free_port()
    both = f"127.0.0.1:{there},127.0.0.1:{elsewhere}"
    kafka, producer = begin(replace(with_topics(own.bootstrap), bootstrap=both), 10, stall_s=STALL_S)
    own.restart(elsewhere)
    deliver(producer, numbered(kafka, range(10, 20)))
    assert producer.counts().clients >= 2
    assert firsts(lying(replace(kafka, bootstrap=own.bootstrap), 20)) == [b"%d" % n for n in range(20)]


def test_clients_that_are_replaced_leave_nothing_behind(own: Broker, begin: Begin) -> None:
    kafka, producer = begin(own, 1, stall_s=0.5)
    threads = threading.active_count()
    for n in range(3):
        own.pause()
        outcomes = producer.publish(numbered(kafka, range(n, n + 1)), 30.0)
        own.resume()
        assert isinstance(outcomes[0], Later)
        deliver(producer, numbered(kafka, range(n, n + 1)))
    until("the old clients' threads are gone", lambda: threading.active_count() <= threads)


def test_while_a_broker_hangs_what_waits_is_bounded(own, begin, monkeypatch):
    monkeypatch.setattr(producer_module, "WAITING_BYTES_MAX", 200_000)
    kafka, producer = begin(own, 1, stall_s=STALL_S)
    own.pause()
    try:
        answers = [producer.submit(Message(kafka.telemetry_topic, "job", bytes(10_000))) for _ in range(100)]
        assert producer.waiting_bytes <= 200_000
        assert sum(one.done() for one in answers) >= 80
        outcomes = [one.result(30.0) for one in answers]
    finally:
        own.resume()
    assert {type(one) for one in outcomes} == {Later}
    counts = producer.counts().put_off
    assert counts["full"] >= 80
    assert sum(counts.values()) == 100


def test_closing_publishes_what_waits_and_gives_back_the_rest_in_time(own: Broker, begin: Begin) -> None:
    kafka, good = begin(own, 1)
    _, hung = begin(kafka, 1)
    waiting = [good.submit(one) for one in numbered(kafka, range(1, 101))]
    good.close(10.0)
    assert [one.result(0) for one in waiting] == [Accepted()] * 100
    own.pause()
    try:
        late = [hung.submit(one) for one in numbered(kafka, range(101, 111))]
        began_s = time.monotonic()
        hung.close(0.5)
        assert time.monotonic() - began_s < 5.0
        assert {type(one.result(0)) for one in late} == {Later}
        assert hung.publish(numbered(kafka, range(1)), 1.0) == [Later("closed")]
    finally:
        own.resume()


def test_where_nobody_listens_making_a_producer_and_closing_it_waits_for_nothing(begin, monkeypatch):
    monkeypatch.setattr(producer_module, "CONNECT_S", 2.0)
    began_s = time.monotonic()
    kafka, producer = begin(KafkaSettings("127.0.0.1:1"))
    assert time.monotonic() - began_s < 1.5
    [outcome] = producer.publish(numbered(kafka, range(1)), 30.0)
    assert isinstance(outcome, Later)
    assert "ECONNREFUSED" in outcome.reason
    assert producer.away == outcome.reason
    assert producer.counts().put_off == {"away": 1}


@pytest.mark.ci
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # the client leaves failed handshakes open
def test_a_password_and_a_certificate_let_us_in_and_what_is_wrong_with_them_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(producer_module, "CONNECT_S", 3.0)

    def first_outcome(settings: KafkaSettings) -> Outcome:
        producer = Producer(settings)
        [outcome] = producer.publish(numbered(settings, range(1)), 30.0)
        producer.close(0.0)
        gc.collect()
        return outcome

    def reasons(settings: KafkaSettings) -> Iterator[str]:
        # The broker's closing may overtake its answer: then it takes another client to hear it.
        for _ in range(6):
            outcome = first_outcome(settings)
            assert isinstance(outcome, Later)
            assert "guessed" not in outcome.reason
            yield outcome.reason
            if not outcome.reason.endswith(CLOSED_HINT):
                return

    with secure_kafka(tmp_path) as (broker, kafka):
        ensure_topics(Settings(kafka=broker.bootstrap, kafka_partitions=PARTITIONS))
        assert first_outcome(kafka) == Accepted()
        for wrong, reported in (
            (replace(kafka, sasl_password="guessed"), "Authentication failed"),
            (replace(kafka, ssl_cafile=""), "CERTIFICATE_VERIFY_FAILED"),
            (replace(kafka, sasl_mechanism="SCRAM-SHA-256"), "UnsupportedSaslMechanism"),
        ):
            *_, reason = reasons(wrong)
            assert reported in reason
        assert len(read_topic(broker.bootstrap, kafka.telemetry_topic, bool, PARTITIONS)) == 1


PASSWORD = "Connection lost: [Error 58] SaslAuthenticationFailedError: Authentication failed: Invalid password"
CERTIFICATE = "Connection failed: [SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed"
REFUSED = "Bootstrap connection to bootstrap-0 failed: KafkaConnectionError: 111 ECONNREFUSED (backoff 0.91 secs)"
CLOSED = "Bootstrap connection to bootstrap-0 failed: KafkaConnectionError: socket disconnected (backoff 0.70 secs)"
VAGUE = "Bootstrap bootstrap-0 not ready; waiting 0.91 secs"


@pytest.mark.parametrize(
    ("said", "reported"),
    [
        ([VAGUE], VAGUE),
        ([CLOSED, VAGUE], CLOSED),
        ([REFUSED, CLOSED, VAGUE], REFUSED),
        ([REFUSED, PASSWORD, VAGUE], PASSWORD),
        # A server that has other addresses too, at which nobody listens.
        ([PASSWORD, REFUSED, VAGUE, REFUSED], PASSWORD),
        ([CERTIFICATE, REFUSED], CERTIFICATE),
        ([CERTIFICATE, PASSWORD], PASSWORD),
    ],
)
def test_of_what_the_client_says_the_most_telling_is_kept_and_of_that_the_newest(
    said: list[str], reported: str
) -> None:
    listen()
    for line in said:
        logging.getLogger("kafka.net.manager").warning(line)
    assert explained(TimeoutError("Unable to bootstrap")) == f"Unable to bootstrap ({reported})"


def test_a_new_client_begins_with_nothing_said() -> None:
    listen()
    logging.getLogger("kafka.net.manager").warning(PASSWORD)
    listen()
    assert explained(TimeoutError("away")) == "away"
