"""Opens what a stream process needs of Kafka: topics, source, dead letters. Needs the extra `kafka`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import structlog

from rankwatch.kafka.client import KafkaAwayError
from rankwatch.kafka.producer import Producer
from rankwatch_service.clock import Clock
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.stream.sources.kafka import KafkaSource
from rankwatch_service.stream.sources.kafka_consumer import SESSION_MS
from rankwatch_service.stream.sources.kafka_dead_letters import DeadLetterTopic

RETRY_S: Final = 1.0
"""Pause between tries to reach a broker; each try has waited for one already."""

CLOSE_S: Final = 2.0

_log = structlog.get_logger(__name__)


@contextmanager
def open_kafka(
    settings: Settings,
    clock: Clock,
    counts: Counter[str],
    stop_asked: Callable[[], bool],
    session_ms: int = SESSION_MS,
) -> Iterator[tuple[KafkaSource, DeadLetterTopic]]:
    """A source in the consumer group of the stream, and the topic of dead letters; both are closed at the end.

    Missing topics are created first, with retries until a broker answers or `stop_asked` is true.
    """
    kafka = settings.kafka_settings()
    assert kafka is not None
    while not stop_asked():
        try:
            ensure_topics(settings)
            break
        except KafkaAwayError as error:
            _log.warning("kafka_away", error=str(error))
            clock.sleep(RETRY_S)
    producer = Producer(kafka)
    source = KafkaSource(kafka, clock, group=f"{kafka.prefix}.stream", session_ms=session_ms, counts=counts)
    yield source, DeadLetterTopic(producer, kafka.dead_letters_topic, counts)
    source.close()
    producer.close(CLOSE_S)
