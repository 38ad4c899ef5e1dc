"""Reads the records of a topic."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kafka import KafkaConsumer, TopicPartition

QUIET_S = 0.5
"""Nothing more comes when nothing has come for so long."""


@dataclass(frozen=True)
class Lying:
    partition: int
    key: str
    value: bytes
    headers: dict[str, str]
    by_broker_clock: bool


def read_topic(
    bootstrap: str, topic: str, enough: Callable[[list[Lying]], bool], partitions: int = 1, within_s: float = 60.0
) -> list[Lying]:
    """Everything in a topic from its beginning, once there is enough and nothing more comes."""
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="earliest", fetch_max_wait_ms=50)
    try:
        consumer.assign([TopicPartition(topic, partition) for partition in range(partitions)])
        found: list[Lying] = []
        began_s = received_s = time.monotonic()
        while not (enough(found) and time.monotonic() - received_s > QUIET_S):
            assert time.monotonic() - began_s < within_s, f"only {len(found)} within {within_s} s"
            for records in consumer.poll(timeout_ms=50).values():
                received_s = time.monotonic()
                for one in records:
                    headers = {name: value.decode() for name, value in one.headers}
                    key = one.key.decode()
                    found.append(Lying(one.partition, key, one.value, headers, one.timestamp_type == 1))
        return found
    finally:
        consumer.close(timeout_ms=1_000)
