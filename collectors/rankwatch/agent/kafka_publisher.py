"""Telemetry's way to Kafka: a job's batches go to the brokers themselves; orders and views stay with the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankwatch.kafka.producer import STALL_S, Message, Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.outcome import Outcome, Refused

ANSWER_WITHIN_S: Final = STALL_S + 10.0
"""The producer answers before that by itself: it gives back what brokers do not acknowledge."""


class KafkaPublisher:
    """Publishes batches of one job to the telemetry topic; see `sender.Publish`."""

    def __init__(self, settings: KafkaSettings, job: str) -> None:
        self._producer = Producer(settings)
        self._topic = settings.telemetry_topic
        self._job = job

    def __call__(self, bodies: Sequence[bytes]) -> Sequence[Outcome]:
        """Publish encoded batches, in order."""
        messages = [Message(self._topic, self._job, body) for body in bodies]
        outcomes = self._producer.publish(messages, ANSWER_WITHIN_S)
        return [Refused(f"refused_{one.reason}", one.detail) if isinstance(one, Refused) else one for one in outcomes]
