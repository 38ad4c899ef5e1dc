"""Sends a synthetic job's batches to Kafka: one producer for all connections."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.outcome import Later, Refused
from rankwatch_service.simulate.live import LiveConnection, NotYetError, RefusedError

WITHIN_S: Final = 5.0
"""How long batches wait for their acknowledgements before they are retried."""
END_S: Final = 5.0


@contextmanager
def kafka_connections(settings: KafkaSettings) -> Iterator[Callable[[], LiveConnection]]:
    """Yield a factory of connections that publish to the telemetry topic, as agents with `RANKWATCH_KAFKA` do."""
    producer = Producer(settings)
    try:
        yield lambda: _KafkaConnection(producer, settings.telemetry_topic)
    finally:
        producer.close(END_S)


class _KafkaConnection:
    def __init__(self, producer: Producer, topic: str) -> None:
        self._producer = producer
        self._topic = topic

    def send(self, job: str, bodies: Sequence[bytes]) -> None:
        for outcome in self._producer.publish([Message(self._topic, job, body) for body in bodies], WITHIN_S):
            if isinstance(outcome, Refused):
                raise RefusedError(f"Kafka: {outcome.reason} {outcome.detail}")
            if isinstance(outcome, Later):
                raise NotYetError(f"Kafka: {outcome.reason}", outcome.after_s or 0.0)

    def close(self) -> None:
        """Do nothing: the producer is shared, and is closed after the job."""
