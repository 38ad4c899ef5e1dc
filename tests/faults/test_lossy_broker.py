"""A broker that acknowledges before it stores, and dies: what it lost is noticed by its numbers, counted and told.

noida writes its data about once a second, so that whatever it acknowledged just before a SIGKILL is gone.
"""

import itertools
import time

import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import KafkaSettings
from rankwatch.outcome import Accepted
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Incident, Job
from tests.support.kafka.broker import kafka_broker, new_prefix
from tests.support.service.process import until
from tests.support.service.webhook_receiver import webhook_receiver
from tests.support.store.database import new_database
from tests.support.trials.cluster import Cluster
from tests.support.trials.selection import long_trial
from tests.support.values.batches import batch, progress, ranks, table

pytestmark = [pytest.mark.integration, pytest.mark.slow, long_trial]
STORED_AFTER_S = 3.0
LOST = 20
"""Messages acknowledged just before the kill: more than the ten that make a host's telemetry unsafe to judge."""


class Host:
    """One host that numbers its messages and sends each until it is acknowledged."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._producer = Producer(kafka)
        self._topic = kafka.telemetry_topic
        self._numbers = itertools.count()

    def send(self, messages: int = 1) -> None:
        for _ in range(messages):
            seq = next(self._numbers)
            body = wire.encode(
                batch(
                    seq,
                    ranks=ranks(2) if seq == 0 else (),
                    steps=table([seq] * 2, [0, 1], loss=[2.0, 2.0], step_time_s=[0.1, 0.1]),
                    progress=(progress(0, seq), progress(1, seq)),
                )
            )
            until("an acknowledgement", lambda body=body: self._accepted(body), 60.0)

    def _accepted(self, body: bytes) -> bool:
        (outcome,) = self._producer.publish([Message(self._topic, "gpt", body)], 30.0)
        return isinstance(outcome, Accepted)

    def close(self) -> None:
        self._producer.close(2.0)


@pytest.mark.timeout(240)
def test_acknowledged_messages_that_the_broker_lost_are_counted_and_told(tmp_path):
    new_database(tmp_path).dispose()
    with kafka_broker("noida") as broker, webhook_receiver() as receiver:
        kafka = KafkaSettings(broker.bootstrap, new_prefix())
        cluster = Cluster(tmp_path, f"sqlite:///{tmp_path}/rankwatch.db", kafka=kafka)
        host = Host(kafka)
        try:
            cluster.start(receiver.url)
            host.send(5)
            until("the stream has the first ones", lambda: cluster.lag() == 0 and step(cluster) == 4)
            time.sleep(STORED_AFTER_S)  # nothing tells from outside when it has written
            host.send(LOST)
            broker.kill()
            broker.start()
            # One message a moment, as training goes on, until the gap is told.
            until("the gap is counted", lambda: host.send() or dropped(cluster).get("missing_batches"))
            until("the gap is told", lambda: host.send() or "telemetry_lost" in kinds(cluster))
            assert dropped(cluster)["missing_batches"] <= LOST
        finally:
            host.close()
            cluster.stop()


def dropped(cluster: Cluster) -> dict[str, int]:
    with read(cluster.engine) as connection:
        return connection.scalar(select(Job.dropped)) or {}


def step(cluster: Cluster) -> int | None:
    with read(cluster.engine) as connection:
        return connection.scalar(select(Job.step))


def kinds(cluster: Cluster) -> set[str]:
    with read(cluster.engine) as connection:
        return set(connection.scalars(select(Incident.kind)))
