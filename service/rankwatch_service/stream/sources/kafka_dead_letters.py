"""Publishes records that could not be used to a topic of Kafka. Needs the extra `kafka`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

from rankwatch.kafka.producer import Message, Producer
from rankwatch.outcome import Accepted
from rankwatch_service.job.effects import RefusedRecord

PUBLISH_S: Final = 2.0
"""How long publishing may delay the batch that the records are in. The table `dead_letter` has them in any case."""


class DeadLetterTopic:
    """Publishes records that could not be used, as they were, so that they can be examined or sent again."""

    def __init__(self, producer: Producer, topic: str, counts: Counter[str]) -> None:
        """Send nothing yet. `counts` gets `letters_not_told`: records that the topic did not accept in time."""
        self._producer = producer
        self._topic = topic
        self._counts = counts

    def publish(self, partition: int, refused: Sequence[RefusedRecord]) -> None:
        """Publish records with reason, detail, partition and position as headers. Never raises."""
        outcomes = self._producer.publish([self._message(partition, one) for one in refused], PUBLISH_S)
        self._counts["letters_not_told"] += sum(not isinstance(outcome, Accepted) for outcome in outcomes)

    def _message(self, partition: int, refused: RefusedRecord) -> Message:
        headers = {
            "reason": refused.reason,
            "detail": refused.detail,
            "partition": str(partition),
            "position": str(refused.position),
        }
        encoded = tuple((name, value.encode()) for name, value in headers.items())
        return Message(self._topic, "", refused.value, encoded)
