"""A broker as an agent sees the service: received messages and outages, with the interface of `AgentService`."""

from __future__ import annotations

from kafka import KafkaConsumer, TopicPartition

from rankwatch import wire
from rankwatch.kafka.settings import KafkaSettings, client_options
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from tests.support.agent.service import TOKEN, decoded
from tests.support.kafka.broker import Broker, new_prefix


class _Silence:
    """Set: connections are taken (by the kernel) and nothing is answered."""

    def __init__(self, broker: Broker) -> None:
        self.set = broker.pause
        self.clear = broker.resume


class KafkaSink:
    """The telemetry topic of a broker of the test's own."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._kafka = KafkaSettings(broker.bootstrap, new_prefix())
        ensure_topics(Settings(kafka=self._kafka.bootstrap, kafka_prefix=self._kafka.prefix, kafka_partitions=1))
        self._consumer = KafkaConsumer(**client_options(self._kafka), auto_offset_reset="earliest")
        self._consumer.assign([TopicPartition(self._kafka.telemetry_topic, 0)])
        self._batches: list[wire.Batch] = []
        self.silent = _Silence(broker)
        self.start, self.stop = broker.start, broker.kill

    @property
    def environment(self) -> dict[str, str]:
        # The service itself is not there: orders and views go nowhere.
        kafka = {"RANKWATCH_KAFKA": self._kafka.bootstrap, "RANKWATCH_KAFKA_PREFIX": self._kafka.prefix}
        return kafka | {"RANKWATCH_URL": "http://127.0.0.1:9", "RANKWATCH_TOKEN": TOKEN}

    @property
    def batches(self) -> list[wire.Batch]:
        """Every message so far, in order."""
        while found := self._consumer.poll(timeout_ms=200):
            self._batches += [decoded(message.value) for some in found.values() for message in some]
        return self._batches

    def close(self) -> None:
        self._consumer.close(autocommit=False, timeout_ms=2_000)
