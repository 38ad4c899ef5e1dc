"""Opens a consumer of the topic of telemetry."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, Final

from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError

from rankwatch.kafka.client import KafkaAwayError, opened
from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.log.base import LogError

CONNECT_S: Final = 3.0
"""How long connecting may take."""

FETCH_BYTES_MAX: Final = 32 * 1024 * 1024
PARTITION_FETCH_BYTES_MAX: Final = 4 * 1024 * 1024
"""Bytes in one answer of a broker, and in it for one partition (one message at least): 50,000 of its rank-steps,
which are one batch while a backlog is processed."""

FETCH_RECORDS_MAX: Final = 2_000
FETCH_WAIT_MS: Final = 250
"""How long a broker waits for records before it answers; records end the wait at once."""

SESSION_MS: Final = 10_000
HEARTBEAT_MS: Final = 3_000
"""A consumer without a heartbeat for a session loses its partitions; three heartbeats fit."""

CLOSE_MS: Final = 2_000


class Assignment(AsyncConsumerRebalanceListener):  # type: ignore[misc]
    """Records which partitions came and went. It runs in the client's thread, so it does nothing else."""

    def __init__(self) -> None:
        self.changed: deque[int] = deque()

    async def on_partitions_assigned(self, assigned: Iterable[TopicPartition]) -> None:
        """Note them: the client fetches from a position of its own choice, which does not continue their buffers."""
        self.changed.extend(partition.partition for partition in assigned)

    async def on_partitions_revoked(self, revoked: Iterable[TopicPartition]) -> None:
        """Note them: their buffers are out of date when they come back. Also called for partitions that were lost."""
        self.changed.extend(partition.partition for partition in revoked)


def open_consumer(
    settings: KafkaSettings, group: str | None, session_ms: int, assignment: Assignment
) -> tuple[KafkaConsumer, int]:
    """A consumer of all partitions, or of those that a group assigns to it; and how many the topic has.

    Args:
        settings: how to reach the brokers.
        group: the consumer group; None: all partitions, of which none is fetched before a seek.
        session_ms: session time-out of the group.
        assignment: notes which partitions the group assigns and revokes.

    Raises:
        LogError: no broker answers, or there is no such topic.
    """
    topic = settings.telemetry_topic
    try:
        consumer: KafkaConsumer = opened(KafkaConsumer, settings, CONNECT_S, **_options(group, session_ms))
    except KafkaAwayError as error:
        raise LogError(str(error)) from error
    # The client ignores the public option of this name (adr/0008). A topic that a broker creates by itself has the
    # broker's number of partitions.
    consumer._client.cluster.config["allow_auto_create_topics"] = False
    found = _partitions(consumer, topic)
    if not found:
        consumer.close(autocommit=False, timeout_ms=CLOSE_MS)
        raise LogError(f"Kafka at {settings.bootstrap} has no topic {topic}: run `rankwatch db upgrade`")
    if group is None:
        consumer.assign([TopicPartition(topic, partition) for partition in sorted(found)])
        consumer.pause(*consumer.assignment())
    else:
        consumer.subscribe([topic], listener=assignment)
    return consumer, len(found)


def _partitions(consumer: KafkaConsumer, topic: str) -> set[int]:
    try:
        return consumer.partitions_for_topic(topic) or set()
    except KafkaError:
        return set()


def _options(group: str | None, session_ms: int) -> dict[str, Any]:
    options = {
        # A position that does not exist then shows as a step back, which `Buffer.take` raises.
        "auto_offset_reset": "earliest",
        # The store has the positions. Only `KafkaSource.processed` commits, for Kafka's tools.
        "enable_auto_commit": False,
        "fetch_max_wait_ms": FETCH_WAIT_MS,
        "fetch_max_bytes": FETCH_BYTES_MAX,
        "max_partition_fetch_bytes": PARTITION_FETCH_BYTES_MAX,
        "max_poll_records": FETCH_RECORDS_MAX,
        "metrics_enabled": False,
    }
    if group is not None:
        options |= {
            "group_id": group,
            "session_timeout_ms": session_ms,
            "heartbeat_interval_ms": min(HEARTBEAT_MS, session_ms // 3),
            "partition_assignment_strategy": (CooperativeStickyAssignor,),
        }
    return options
