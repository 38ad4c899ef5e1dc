"""Publishes a job's batches directly to Kafka; orders and views still go through the service."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rankwatch.agent.enrolment import AgentIdentity, Enrolment
from rankwatch.agent.service_connection import Unconfigured, Unreachable
from rankwatch.agent.uplink import not_sent
from rankwatch.kafka.producer import STALL_S, Message, Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.outcome import Outcome, Refused
from rankwatch.signed import Purpose

ANSWER_WITHIN_S: Final = STALL_S + 10.0
"""Longer than the producer takes to return what brokers do not acknowledge, so this limit is only a safeguard."""


class KafkaPublisher:
    """Publishes batches of one job to the telemetry topic; see `sender.Publish`."""

    def __init__(self, settings: KafkaSettings, job: str, enrolment: Enrolment) -> None:
        self._producer = Producer(settings)
        self._enrolment = enrolment
        self._topic = settings.telemetry_topic
        self._job = job

    def __call__(self, bodies: Sequence[bytes]) -> Sequence[Outcome]:
        """Publish encoded batches, in order."""
        identity: AgentIdentity | None = None
        try:
            identity = self._enrolment.identity(bodies[0])
        except Unconfigured:
            pass  # without a service there is nobody to enrol with, and no orders either
        except Unreachable as error:
            return [not_sent(error)]
        signed = [identity.sign(Purpose.BATCH, body) if identity else body for body in bodies]
        messages = [Message(self._topic, self._job, body) for body in signed]
        outcomes = self._producer.publish(messages, ANSWER_WITHIN_S)
        return [Refused(f"refused_{one.reason}", one.detail) if isinstance(one, Refused) else one for one in outcomes]
