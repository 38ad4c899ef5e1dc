"""The partitions of the telemetry topic that the consumer group gives to this process. Needs the extra `kafka`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import structlog
from sqlalchemy import Engine

from rankwatch.kafka.client import KafkaAwayError
from rankwatch.kafka.producer import Message, Producer
from rankwatch.outcome import Accepted
from rankwatch_service.clock import Clock
from rankwatch_service.job.effects import Refused
from rankwatch_service.job.job import Links
from rankwatch_service.log.kafka_log import SESSION_MS, KafkaLog
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.store.change_watch import ChangeWatch
from rankwatch_service.stream.process import Stop
from rankwatch_service.stream.serve import member_over

WAIT_S: Final = 0.1
"""A wait ends after so long, so that what people decide is acted on in time. Records end it at once."""

TELL_S: Final = 2.0
"""How long telling of records that cannot be used may hold up their batch. The store keeps them in any case."""

RETRY_S: Final = 1.0
"""Between tries to find a broker at the start; each has waited for one already."""

CLOSE_S: Final = 2.0

_log = structlog.get_logger(__name__)


class DeadLetterTopic:
    """Publishes records that could not be used, as they were, for whoever wants to look at them or send them again."""

    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic
        self.failures = 0
        """Records that the topic did not take in time; the store has them."""

    def tell(self, partition: int, refused: Sequence[Refused]) -> None:
        """Publish with reason, detail and where they were read. Never raises."""
        outcomes = self._producer.publish([self._message(partition, one) for one in refused], TELL_S)
        self.failures += sum(not isinstance(outcome, Accepted) for outcome in outcomes)

    def _message(self, partition: int, refused: Refused) -> Message:
        headers = {
            "reason": refused.reason,
            "detail": refused.detail,
            "partition": str(partition),
            "position": str(refused.position),
        }
        encoded = tuple((name, value.encode()) for name, value in headers.items())
        return Message(self._topic, "", refused.value, encoded)


class GroupReader:
    """A `stream.member.Source` over the topic of telemetry."""

    sole = False

    def __init__(self, log: KafkaLog, letters: DeadLetterTopic) -> None:
        self._log = log
        self._letters = letters

    @property
    def assigned(self) -> frozenset[int]:
        """What the group gave us."""
        return self._log.assigned

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """Take up what came; where `idle`, wait a moment for it. Returns whether the store has changed."""
        self._log.fetch(WAIT_S if idle else 0.0)
        return changes.changed()

    def end(self, partition: int, position: int) -> int:
        """Where the partition ended when brokers last answered."""
        return self._log.known_ends.get(partition, position)

    def processed(self, positions: Mapping[int, int]) -> None:
        """Tell Kafka's tools."""
        self._log.commit(positions)

    @property
    def counts(self) -> Mapping[str, int]:
        """What the log counts, and dead letters that Kafka did not take."""
        return {**self._log.counts, "letters_not_told": self._letters.failures}

    def lost(self, partition: int) -> int:
        """Records that the topic's retention took before we could read them."""
        return self._log.lost[partition]

    def close(self) -> None:
        """Leave the group."""
        self._log.close()


def follow_kafka(
    engine: Engine, settings: Settings, clock: Clock, links: Links, stop: Stop, session_ms: int = SESSION_MS
) -> None:
    """Keep the streams of the partitions that the consumer group gives us going until asked to stop.

    Args:
        engine: the store.
        settings: name the brokers, and how topics are made that are missing.
        clock: the only one.
        links: where receivers can read on.
        stop: when to end.
        session_ms: after so long without a sign of life the group gives our partitions to others.
    """
    kafka = settings.kafka_settings()
    assert kafka is not None
    while not stop.asked:
        try:
            ensure_topics(settings)
            break
        except KafkaAwayError as error:
            _log.warning("kafka_away", error=str(error))
            clock.sleep(RETRY_S)
    producer = Producer(kafka)
    log = KafkaLog(kafka, clock, group=f"{kafka.prefix}.stream", session_ms=session_ms)
    letters = DeadLetterTopic(producer, kafka.dead_letters_topic)
    member_over(engine, log, GroupReader(log, letters), clock, links, letters.tell).run(stop)
    producer.close(CLOSE_S)
