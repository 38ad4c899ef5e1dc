"""Accepted telemetry goes to the topic of Kafka. Only what uses Kafka imports this: its client is an extra."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.outcome import Later, Refused
from rankwatch_service.api.ingest import NotNowError
from rankwatch_service.log.base import Entry
from rankwatch_service.telemetry.envelope import BadBatchError, Reason

ANSWER_WITHIN_S: Final = 5.0
"""How long a request waits for the brokers. An agent gives up after 10 s, and should spool before that."""
LINGER_MS: Final = 5
"""Requests of many hosts arrive together, and one message set costs the brokers less than many."""
STOP_S: Final = 2.0


class KafkaIntake:
    """Publishes entries to the telemetry topic. An `Intake`."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.producer = Producer(settings, linger_ms=LINGER_MS)
        self._topic = settings.telemetry_topic

    def start(self) -> None:
        """Do nothing: the producer is already running."""

    async def put(self, item: Entry, size_bytes: int) -> None:  # noqa: ARG002 - the producer has its own limit
        """Return once the brokers have acknowledged the entry."""
        answer = asyncio.wrap_future(self.producer.submit(Message(self._topic, item.key, item.value)))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                outcome = await answer
        except TimeoutError as error:
            raise NotNowError(f"no acknowledgement by Kafka within {ANSWER_WITHIN_S:g} s") from error
        if isinstance(outcome, Later):
            raise NotNowError(f"Kafka: {outcome.reason}")
        if isinstance(outcome, Refused):
            raise BadBatchError(Reason.TOO_LARGE, f"Kafka: {outcome.detail}")

    async def stop(self) -> None:
        """Wait up to `STOP_S` for acknowledgements, then close the producer."""
        await asyncio.to_thread(self.producer.close, STOP_S)


class ProducerCollector(Collector):
    """Counters of the producer, for `/metrics`."""

    def __init__(self, producer: Producer) -> None:
        self._producer = producer

    def collect(self) -> Iterator[Metric]:
        """All families."""
        counts = self._producer.counts()
        yield CounterMetricFamily("rankwatch_kafka_published", "Messages acknowledged", value=counts.published)
        yield CounterMetricFamily(
            "rankwatch_kafka_published_bytes", "Bytes of acknowledged messages", value=counts.published_bytes
        )
        refused = CounterMetricFamily("rankwatch_kafka_refused", "Messages refused by the brokers", labels=["reason"])
        for reason, count in counts.refused.items():
            refused.add_metric([reason], count)
        yield refused
        put_off = CounterMetricFamily("rankwatch_kafka_put_off", "Messages to be sent again later", labels=["reason"])
        for reason, count in counts.put_off.items():
            put_off.add_metric([reason], count)
        yield put_off
        yield CounterMetricFamily("rankwatch_kafka_clients", "Clients that have connected", value=counts.clients)
        yield GaugeMetricFamily(
            "rankwatch_kafka_waiting_bytes", "Bytes not acknowledged yet", self._producer.waiting_bytes
        )
        yield GaugeMetricFamily(
            "rankwatch_kafka_away", "1 while no broker accepts a connection", int(bool(self._producer.away))
        )
