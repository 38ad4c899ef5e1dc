"""A topic of Kafka as a source: the consumer group decides which of its partitions this process reads.

One consumer fills a bounded buffer for each of its partitions; a read at another position than the buffer's makes it
seek. Positions come from the store; what is committed to Kafka is for Kafka's own tools. A consumer that no broker
answers is replaced, because it never returns to its bootstrap addresses, and polling it does not report the silence.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final

import structlog
from kafka import KafkaConsumer, TopicPartition
from kafka.consumer.subscription_state import AsyncConsumerRebalanceListener
from kafka.coordinator.assignors.cooperative_sticky import CooperativeStickyAssignor
from kafka.errors import KafkaError
from kafka.structs import OffsetAndMetadata

from rankwatch.kafka.client import KafkaAwayError, explained, opened
from rankwatch.kafka.producer import Message, Producer
from rankwatch.kafka.settings import KafkaSettings, partition_of
from rankwatch.outcome import Accepted
from rankwatch_service.clock import Clock
from rankwatch_service.job.effects import RefusedRecord
from rankwatch_service.log.base import READ_BYTES_MAX, LogError, Record
from rankwatch_service.log.kafka_topics import ensure_topics
from rankwatch_service.settings import Settings
from rankwatch_service.store.change_watch import ChangeWatch

_LOG_APPEND_TIME: Final = 1


class Buffer:
    """The records of one partition from `position` to `fetched`."""

    def __init__(self, partition: int, position: int, now_s: float) -> None:
        self.position = position
        self.fetched = position
        self.bytes = 0
        self.paused = False
        """Whether the consumer does not fetch the partition."""
        self.moved_s = now_s
        """When a record last arrived, or none was outstanding; seconds of the monotonic clock."""
        self._partition = partition
        self._records: deque[Record] = deque()

    def __len__(self) -> int:
        return len(self._records)

    def add(self, messages: Sequence[Any], now_unix_ns: int, now_s: float) -> None:
        """Add what was fetched.

        Raises:
            LogError: the client went back to the oldest record, because our position does not exist.
        """
        for message in messages:
            if message.offset < self.fetched:
                raise LogError(f"partition {self._partition} ends before position {self.fetched}: it is another log")
            key, value = (message.key or b"").decode(errors="replace"), message.value or b""
            at = appended_unix_ns(message, now_unix_ns)
            self._records.append(Record(self._partition, message.offset, key, value, at))
            self.bytes += len(value)
            self.fetched = message.offset + 1
        self.moved_s = now_s

    def give(self, limit: int) -> list[Record]:
        """Remove and return the first records: at least one, and at most `limit` and `READ_BYTES_MAX`."""
        records: list[Record] = []
        total = 0
        while self._records and len(records) < limit:
            size = len(self._records[0].value)
            if records and total + size > READ_BYTES_MAX:
                break
            total += size
            records.append(self._records.popleft())
        if records:
            self.bytes -= total
            self.position = records[-1].position + 1
        return records


def appended_unix_ns(message: Any, now_unix_ns: int) -> int:
    """When the broker appended a message; if the topic keeps the sender's time, when the message is read."""
    # A sender's clock decides nothing: ticks take these times.
    return message.timestamp * 1_000_000 if message.timestamp_type == _LOG_APPEND_TIME else now_unix_ns


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
    # The client ignores the public option of this name (decision 0008). A topic that a broker creates by itself has the
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
        # A position that does not exist then shows as a step back, which `Buffer.add` raises.
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


BUFFER_BYTES_MAX: Final = 8 * 1024 * 1024
"""A partition with this many bytes buffered is not fetched: one batch of the largest size, or 8 s of 10,000 ranks."""

WAIT_S: Final = 0.1
"""Longest wait, so that control records are applied in time. Records end it at once."""

ENDS_S: Final = 1.0
"""Between requests for the ends of the partitions. Each goes to every broker, and also shows that it answers."""

ENDS_WAIT_MS: Final = 2_000
HEARD_S: Final = 2.5
"""How long an answer about ends is trusted: two requests fit. After that, time stands still in the partitions, so that
no host counts as silent because brokers are."""

SILENCE_S: Final = 15.0
"""The consumer is replaced when no broker has answered for this long; a restart of a broker takes 2 to 7 s."""

STUCK_S: Final = 30.0
"""The consumer is replaced when brokers answer and a partition has records, but none has arrived for this long."""

REOPEN_S: Final = 1.0
"""Between tries to open a consumer."""

COMMIT_S: Final = 5.0
"""Between commits to Kafka."""

FENCED_S: Final = 5.0
"""How long a partition that another process took over is left alone; a heartbeat within it names the owner."""

_log = structlog.get_logger(__name__)


class KafkaSource:
    """A `Source` over the topic of telemetry."""

    def __init__(
        self,
        settings: KafkaSettings,
        clock: Clock,
        *,
        group: str | None = None,
        session_ms: int = SESSION_MS,
        counts: Counter[str] | None = None,
    ) -> None:
        """Nothing is connected yet.

        Args:
            settings: how to reach the brokers.
            clock: for durations, and for the time of records that brokers do not stamp.
            group: the consumer group that assigns partitions; None: all of them are read.
            session_ms: see `SESSION_MS`; brokers have a minimum.
            counts: gets `rebuilds` of the consumer and `commit_failures`.
        """
        self.counts = Counter() if counts is None else counts
        self._settings = settings
        self._clock = clock
        self._group = group
        self._session_ms = session_ms
        self._consumer: KafkaConsumer | None = None
        self._opened_s = float("-inf")
        self._assignment = Assignment()
        self._partitions = 0
        self._buffers: dict[int, Buffer] = {}
        self._broken: dict[int, str] = {}
        """Why a partition is another log than before, until a read has raised it."""
        self._ends: dict[int, int] = {}
        self._processed: dict[int, int] = {}
        """Positions to commit to Kafka."""
        self._fenced_until_s: dict[int, float] = {}
        self._asked_s = self._received_s = self._committed_s = float("-inf")

    @property
    def partitions(self) -> int:
        """How many partitions the topic has.

        Raises:
            LogError: no broker answers, or there is no such topic.
        """
        if not self._partitions:
            self._open()
        return self._partitions

    def partition_of(self, key: str) -> int:
        """The partition that holds the records of `key`."""
        return partition_of(key, self.partitions)

    def read(self, partition: int, position: int, limit: int, wait_s: float = 0.0) -> list[Record]:
        """Up to `limit` records from `position` on, in order."""
        buffer = self._at(partition, position)
        deadline_s = self._clock.monotonic_s() + wait_s
        while not buffer and wait_s:
            left_s = deadline_s - self._clock.monotonic_s()
            if left_s <= 0 or self.drained(partition, position):
                break
            self.fetch(min(left_s, 0.1))  # in short waits: the end may move, or become known, meanwhile
            buffer = self._at(partition, position)
        return buffer.give(limit)

    def drained(self, partition: int, position: int) -> bool:
        """Whether brokers reported within `HEARD_S` that no record is at `position` or after it."""
        buffer = self._buffers.get(partition)
        if buffer:
            return False
        known = partition in self._ends and self._clock.monotonic_s() - self._received_s < HEARD_S
        return known and position >= self._ends[partition]

    def end(self, partition: int) -> int:
        """The position that the next record will have."""
        return self._offsets("end_offsets", partition)

    def begin(self, partition: int) -> int:
        """The position of the oldest record kept; `end` if there is none."""
        return self._offsets("beginning_offsets", partition)

    def last_known_end(self, partition: int) -> int:
        """The end of the partition when brokers last answered; 0 before that."""
        return self._ends.get(partition, 0)

    @property
    def assigned(self) -> frozenset[int]:
        """The partitions that the group assigns to this process, without those that another one has just taken over."""
        if self._consumer is None:
            return frozenset()
        now_s = self._clock.monotonic_s()
        ours = (place.partition for place in self._consumer.assignment())
        return frozenset(number for number in ours if now_s >= self._fenced_until_s.get(number, now_s))

    def fenced(self, partition: int) -> None:
        """Do not read the partition for `FENCED_S`, until the group has announced its owner."""
        self._fenced_until_s[partition] = self._clock.monotonic_s() + FENCED_S

    def wait(self, idle: bool, changes: ChangeWatch) -> bool:
        """Fetch; if `idle`, wait for a message for `WAIT_S` at most. Returns whether the store has changed."""
        self.fetch(WAIT_S if idle else 0.0)
        return changes.changed()

    def fetch(self, wait_s: float) -> None:
        """Buffer what arrived, waiting for `wait_s` at most; close a consumer that has stopped working.

        Raises:
            LogError: no broker answers.
        """
        self._open()
        assert self._consumer is not None
        try:
            found = self._consumer.poll(round(wait_s * 1000), FETCH_RECORDS_MAX)
        except KafkaError as error:
            self._close(f"fetching failed: {explained(error)}")
            return
        self._drop_changed()
        for place, messages in found.items():
            self._take(place.partition, messages)
        self._ask_for_ends()
        self._watch()

    def processed(self, partition: int, committed: int, needed: int) -> None:  # noqa: ARG002
        """Commit to Kafka how far the partition is processed, every `COMMIT_S`. Does not wait; a failure is counted.

        The topic's retention decides when records are removed.
        """
        self._processed[partition] = committed
        now_s = self._clock.monotonic_s()
        if self._consumer is None or self._group is None or now_s - self._committed_s < COMMIT_S:
            return
        self._committed_s = now_s
        ours, processed = self.assigned, self._processed
        self._processed = {}
        # A partition that was revoked meanwhile is left to its new owner's commits. -1: no leader epoch is known.
        offsets = {self._topic(p): OffsetAndMetadata(at, "", -1) for p, at in processed.items() if p in ours}
        try:
            self._consumer.commit_async(offsets, self._committed)
        except KafkaError:
            self.counts["commit_failures"] += 1

    def close(self) -> None:
        """Leave the group and close the consumer."""
        self._close("")

    # ---- buffers ---------------------------------------------------------------------------------------------------

    def _at(self, partition: int, position: int) -> Buffer:
        """The partition's buffer, which begins at `position`; a seek empties it if it did not."""
        self._open()
        assert self._consumer is not None
        self._drop_changed()
        if partition in self._broken:
            self._buffers.pop(partition, None)
            raise LogError(self._broken.pop(partition))
        buffer = self._buffers.get(partition)
        if buffer is None or buffer.position != position:
            try:
                self._consumer.seek(self._topic(partition), position)
                self._consumer.resume(self._topic(partition))
            except (KafkaError, AssertionError) as error:
                raise LogError(f"partition {partition} is not assigned to this process: {explained(error)}") from error
            buffer = self._buffers[partition] = Buffer(partition, position, self._clock.monotonic_s())
        elif buffer.paused and buffer.bytes < BUFFER_BYTES_MAX // 2:  # not at the limit, or each read would toggle it
            self._consumer.resume(self._topic(partition))
            buffer.paused = False
        return buffer

    def _drop_changed(self) -> None:
        while self._assignment.changed:
            partition = self._assignment.changed.popleft()
            self._buffers.pop(partition, None)
            self._ends.pop(partition, None)
            self._asked_s = float("-inf")  # until its end is known, a new partition is not drained

    def _take(self, partition: int, messages: Sequence[Any]) -> None:
        buffer = self._buffers.get(partition)
        if buffer is None:
            return  # fetched from a position that the client chose
        try:
            buffer.add(messages, self._clock.unix_ns(), self._clock.monotonic_s())
        except LogError as error:
            self._broken[partition] = str(error)
            return
        if buffer.bytes >= BUFFER_BYTES_MAX and not buffer.paused and self._consumer is not None:
            self._consumer.pause(self._topic(partition))
            buffer.paused = True

    # ---- the consumer ----------------------------------------------------------------------------------------------

    def _open(self) -> None:
        if self._consumer is not None:
            return
        now_s = self._clock.monotonic_s()
        if now_s - self._opened_s < REOPEN_S:
            raise LogError(f"Kafka at {self._settings.bootstrap} does not answer")
        self._opened_s = now_s
        self._assignment = Assignment()
        consumer, partitions = open_consumer(self._settings, self._group, self._session_ms, self._assignment)
        self._consumer, self._partitions = consumer, partitions
        self._received_s = now_s
        self._asked_s = float("-inf")

    def _close(self, why: str) -> None:
        """Close the consumer. `why`: the reason, if it has stopped working and will be replaced."""
        consumer, self._consumer = self._consumer, None
        self._buffers.clear()
        self._ends.clear()
        if consumer is None:
            return
        if why:
            self.counts["rebuilds"] += 1
            _log.warning("consumer_replaced", reason=why)
        with suppress(Exception):  # it may be in any state
            consumer.close(autocommit=False, timeout_ms=CLOSE_MS)

    def _ask_for_ends(self) -> None:
        now_s = self._clock.monotonic_s()
        if self._consumer is None or now_s - self._asked_s < ENDS_S:
            return
        self._asked_s = now_s
        assigned = list(self._consumer.assignment())
        if not assigned:
            self._received_s = now_s  # there is nothing to ask for
            return
        try:
            ends = self._consumer.end_offsets(assigned, timeout_ms=ENDS_WAIT_MS)
        except KafkaError:
            return
        self._ends = {place.partition: end for place, end in ends.items()}
        self._received_s = self._clock.monotonic_s()

    def _watch(self) -> None:
        now_s = self._clock.monotonic_s()
        if now_s - self._received_s > SILENCE_S:
            self._close(f"no broker has answered for {SILENCE_S:g} s")
            return
        for partition, buffer in self._buffers.items():
            if buffer or buffer.paused or buffer.fetched >= self._ends.get(partition, 0):
                buffer.moved_s = now_s
            elif now_s - buffer.moved_s > STUCK_S:
                self._close(f"no record of partition {partition} arrived from position {buffer.fetched} on")
                return

    def _offsets(self, which: str, partition: int) -> int:
        self._open()
        place = self._topic(partition)
        try:
            found: int = getattr(self._consumer, which)([place], timeout_ms=ENDS_WAIT_MS)[place]
        except KafkaError as error:
            raise LogError(f"Kafka at {self._settings.bootstrap}: {explained(error)}") from error
        if which == "end_offsets":
            self._ends[partition] = found
        return found

    def _committed(self, _offsets: object, answer: object) -> None:
        if isinstance(answer, BaseException):
            self.counts["commit_failures"] += 1

    def _topic(self, partition: int) -> TopicPartition:
        return TopicPartition(self._settings.telemetry_topic, partition)


PUBLISH_S: Final = 2.0
"""How long publishing may delay the batch that the records are in. The table `dead_letter` has them in any case."""


class DeadLetterTopic:
    """Publishes records that could not be used, as they were, so that they can be examined or sent again."""

    def __init__(self, producer: Producer, topic: str, counts: Counter[str]) -> None:
        """Send nothing yet. `counts` gets `letters_not_sent`: records that the topic did not accept in time."""
        self._producer = producer
        self._topic = topic
        self._counts = counts

    def publish(self, partition: int, refused: Sequence[RefusedRecord]) -> None:
        """Publish records with reason, detail, partition and position as headers. Never raises."""
        outcomes = self._producer.publish([self._message(partition, one) for one in refused], PUBLISH_S)
        self._counts["letters_not_sent"] += sum(not isinstance(outcome, Accepted) for outcome in outcomes)

    def _message(self, partition: int, refused: RefusedRecord) -> Message:
        headers = {
            "reason": refused.reason,
            "detail": refused.detail,
            "partition": str(partition),
            "position": str(refused.position),
        }
        encoded = tuple((name, value.encode()) for name, value in headers.items())
        return Message(self._topic, "", refused.value, encoded)


RETRY_S: Final = 1.0
"""Pause between tries to reach a broker; each try has waited for one already."""

CLOSE_S: Final = 2.0


@contextmanager
def open_kafka(
    settings: Settings, clock: Clock, counts: Counter[str], stop_asked: Callable[[], bool], session_ms: int = SESSION_MS
) -> Iterator[tuple[KafkaSource, DeadLetterTopic]]:
    """A source in the consumer group of the stream, and the topic of dead letters; both are closed at the end.

    Missing topics are created first, with retries until a broker answers or `stop_asked` is true.
    """
    kafka = settings.kafka_settings()
    assert kafka is not None
    while not stop_asked():
        try:
            ensure_topics(settings)
            break
        except KafkaAwayError as error:
            _log.warning("kafka_away", error=str(error))
            clock.sleep(RETRY_S)
    producer = Producer(kafka)
    source = KafkaSource(kafka, clock, group=f"{kafka.prefix}.stream", session_ms=session_ms, counts=counts)
    yield source, DeadLetterTopic(producer, kafka.dead_letters_topic, counts)
    source.close()
    producer.close(CLOSE_S)
