"""Creates, describes and removes the topics of Kafka that the service uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import structlog
from kafka import KafkaAdminClient
from kafka.errors import KafkaError, TopicAlreadyExistsError

from rankwatch.kafka.client import KafkaAwayError, explained, opened
from rankwatch.kafka.settings import MESSAGE_BYTES_MAX, KafkaSettings
from rankwatch_service.clock import Clock
from rankwatch_service.settings import Settings

RETRY_S: Final = 5.0
"""Between tries in the background."""

_log = structlog.get_logger(__name__)


def ensure_topics(settings: Settings) -> int:
    """Create the topics that are missing; existing ones are not changed.

    Returns:
        Number of partitions of the telemetry topic, which may differ from the settings: it cannot change in place.

    Raises:
        KafkaAwayError: no broker can be reached, or it refuses.
    """
    kafka = _kafka(settings)
    counts = dict.fromkeys(_topics(kafka), 1) | {kafka.telemetry_topic: settings.kafka_partitions}
    with _admin(kafka) as admin:
        for topic, count in counts.items():
            if not _partitions(admin, topic):
                _make(admin, topic, count, settings)
        partitions = _partitions(admin, kafka.telemetry_topic)
    if partitions != settings.kafka_partitions:
        topic = kafka.telemetry_topic
        _log.warning("kafka_partitions_differ", topic=topic, topic_has=partitions, settings=settings.kafka_partitions)
    return partitions


def topic_partitions(settings: Settings) -> dict[str, int]:
    """Number of partitions of each of our topics; 0 if it does not exist.

    Raises:
        KafkaAwayError: no broker can be reached, or it refuses.
    """
    kafka = _kafka(settings)
    with _admin(kafka) as admin:
        return {topic: _partitions(admin, topic) for topic in _topics(kafka)}


def ensure_topics_soon(settings: Settings, clock: Clock) -> None:
    """Create the topics in a background thread as soon as a broker answers; for roles that work without Kafka."""

    def keep_trying() -> None:
        while True:
            try:
                ensure_topics(settings)
                return
            except KafkaAwayError as error:
                _log.warning("kafka_away", reason=str(error))
                clock.sleep(RETRY_S)

    threading.Thread(target=keep_trying, name="topics", daemon=True).start()


@contextmanager
def _admin(kafka: KafkaSettings) -> Iterator[KafkaAdminClient]:
    admin: KafkaAdminClient = opened(KafkaAdminClient, kafka)
    try:
        yield admin
    except KafkaError as error:
        raise KafkaAwayError(f"Kafka at {kafka.bootstrap}: {explained(error)}") from error
    finally:
        admin.close()


def _kafka(settings: Settings) -> KafkaSettings:
    kafka = settings.kafka_settings()
    assert kafka is not None
    return kafka


def _topics(kafka: KafkaSettings) -> tuple[str, ...]:
    return kafka.telemetry_topic, kafka.dead_letters_topic


def _partitions(admin: KafkaAdminClient, topic: str) -> int:
    """How many partitions a topic has; 0 if it does not exist. The admin client does not create a topic by asking."""
    found: list[dict[str, Any]] = admin.describe_topics([topic])
    return len(found[0]["partitions"]) if found and not found[0]["error_code"] else 0


def _make(admin: KafkaAdminClient, topic: str, partitions: int, settings: Settings) -> None:
    configuration = {
        # The broker stamps records, because ticks take these times and agents' clocks must decide nothing.
        "message.timestamp.type": "LogAppendTime",
        "retention.ms": str(settings.kafka_retention_hours * 3_600_000),
        "max.message.bytes": str(MESSAGE_BYTES_MAX),
        # One replica may be down; what is acknowledged is then on all others.
        "min.insync.replicas": str(max(1, settings.kafka_replication - 1)),
    }
    wanted = {"num_partitions": partitions, "replication_factor": settings.kafka_replication, "configs": configuration}
    try:
        admin.create_topics({topic: wanted}, wait_for_metadata=True)
        _log.info("topic_created", topic=topic, partitions=partitions)
    except TopicAlreadyExistsError:
        return  # another role created it first
