"""Whose a partition is, as a source over Kafka sees it. No broker is needed."""

import pytest
from kafka import TopicPartition

from rankwatch.kafka.settings import KafkaSettings
from rankwatch_service.stream.kafka_source import FENCED_S, KafkaSource
from tests.support.clock import FakeClock


class Assigned:
    """A consumer to which the group assigns these partitions."""

    def __init__(self, *partitions: int) -> None:
        self.partitions = partitions

    def assignment(self) -> set[TopicPartition]:
        return {TopicPartition("rankwatch.telemetry", partition) for partition in self.partitions}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def source(clock):
    source = KafkaSource(KafkaSettings("127.0.0.1:1"), clock)
    source._consumer = Assigned(0, 1)
    return source


def test_nothing_is_assigned_before_there_is_a_consumer(clock):
    assert KafkaSource(KafkaSettings("127.0.0.1:1"), clock).assigned == frozenset()


def test_a_partition_that_another_process_took_is_left_alone_until_a_heartbeat_has_told_whose_it_is(source, clock):
    source.fenced(1)
    assert source.assigned == {0}
    clock.advance(FENCED_S - 0.1)
    assert source.assigned == {0}
    clock.advance(0.1)
    assert source.assigned == {0, 1}


def test_a_partition_that_another_process_took_and_the_group_moved_does_not_come_back(source, clock):
    source.fenced(1)
    source._consumer = Assigned(0)
    clock.advance(FENCED_S)
    assert source.assigned == {0}
