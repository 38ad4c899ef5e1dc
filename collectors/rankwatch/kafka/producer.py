"""Publishes to Kafka from its own thread, in bounded memory, and recovers from every failure of the brokers.

This module works around three properties of the client library. It keeps unacknowledged messages without a limit: we
count their bytes and refuse more. It stops working when a message outlives its delivery time-out: here none expires.
And it never returns to its bootstrap addresses, and spins while a broker hangs: if nothing is acknowledged for
`STALL_S`, its messages are returned to their senders, and a new client replaces it. A sender keeps a returned message
and sends it again; if the first copy arrived after all, the second has the same number.

Never part of the training process.
"""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any, Final

from kafka import KafkaProducer
from kafka.errors import MessageSizeTooLargeError, RecordListTooLargeError

from rankwatch.kafka.client import KafkaAwayError, explained, opened
from rankwatch.kafka.settings import MESSAGE_BYTES_MAX, KafkaSettings, partition_of
from rankwatch.outcome import Accepted, Later, Outcome, Refused

WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Limit of unacknowledged bytes: 4 messages of the largest size. The client needs up to 1.4 times as much memory."""
OVERHEAD_BYTES: Final = 1_024
"""What a message costs in memory besides its value."""
BATCH_BYTES: Final = 256 * 1024
"""Size of a partition's one request in flight, unless a single message is larger."""
STALL_S: Final = 12.0
"""Slightly more than the time-out of one request (10 s). A change of leader or a broker's restart takes 2 to 7 s; a
client whose broker hangs uses 0.9 of a core after the time-out."""
CONNECT_S: Final = 5.0
"""How long a new client may take to connect, or to get the metadata of a topic."""
RECONNECT_FIRST_S: Final = 0.25
RECONNECT_MAX_S: Final = 2.0
LOOK_S: Final = 0.25
"""Interval between checks for acknowledgements, while some are outstanding."""
STUCK_RATIO: Final = 5
"""A message that waits this many times `STALL_S`, one minute, while others are acknowledged is stuck: its partition has
no leader. It must not use up the limit of bytes that the others share."""
END_S: Final = 2.0
"""How long a discarded client may take to close its sockets."""
NO_EXPIRY_MS: Final = 2**31 - 1

_log = logging.getLogger(__name__)
_TOO_LARGE: Final = (MessageSizeTooLargeError, RecordListTooLargeError)


@dataclass(frozen=True, slots=True)
class Message:
    """Something to publish. Messages of one key go to one partition, in the order in which they were submitted."""

    topic: str
    key: str
    value: bytes
    headers: tuple[tuple[str, bytes], ...] = ()

    @property
    def size(self) -> int:
        """Bytes in memory."""
        return len(self.value) + OVERHEAD_BYTES


@dataclass(slots=True)
class Counts:
    """Totals of a producer since it was created."""

    published: int = 0
    published_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Messages that brokers will never take, by reason."""
    put_off: Counter[str] = field(default_factory=Counter)
    """Messages returned to be sent again later: `full`, `away` or `closed`."""
    clients: int = 0
    """Clients that connected; each after the first replaced another."""


@dataclass(slots=True, eq=False)
class _Waiting:
    message: Message
    answer: Future[Outcome]


class Producer:
    """Publishes messages. Everything public may be called from any thread, and nothing but `publish` waits."""

    def __init__(
        self,
        settings: KafkaSettings,
        *,
        linger_ms: int = 0,
        stall_s: float = STALL_S,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin to connect.

        Args:
            settings: how to reach the brokers.
            linger_ms: how long a message may wait for others to share its request. While a request is in flight
                messages gather anyway, so 0 is right unless there are very many partitions.
            stall_s: see `STALL_S`.
            monotonic_s: the clock for durations.
        """
        self._settings = settings
        self._linger_ms = linger_ms
        self._stall_s = stall_s
        self._monotonic_s = monotonic_s
        self._condition = threading.Condition()
        self._queue: deque[_Waiting] = deque()
        self._sent: dict[_Waiting, float] = {}
        """Messages that the client has and brokers have not acknowledged, oldest first, with the time of sending."""
        self._received_s = 0.0
        """When the last acknowledgement came."""
        self._waiting_bytes = 0
        self._counts = Counts()
        self._away = ""
        self._broken = ""
        self._deadline_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kafka-producer", daemon=True)
        self._thread.start()

    @property
    def away(self) -> str:
        """Why nothing can be published now; empty while a client is connected, or the first one tries to."""
        return self._away

    @property
    def waiting_bytes(self) -> int:
        """Bytes that are not acknowledged yet."""
        return self._waiting_bytes

    def counts(self) -> Counts:
        """A copy of the totals."""
        with self._condition:
            done = self._counts
            return Counts(done.published, done.published_bytes, done.refused.copy(), done.put_off.copy(), done.clients)

    def submit(self, message: Message) -> Future[Outcome]:
        """Hand over one message.

        Returns:
            The outcome, which is set within about `STALL_S`; `Later` at once if no broker answers or too much waits.
        """
        waiting = _Waiting(message, Future())
        waiting.answer.set_running_or_notify_cancel()  # a running future cannot be cancelled
        with self._condition:
            reason = self._unable(message.size)
            if reason:
                self._counts.put_off[reason] += 1
            else:
                self._waiting_bytes += message.size
                self._queue.append(waiting)
                self._condition.notify_all()
        if reason:
            reported = {"full": f"{self._waiting_bytes} bytes wait for Kafka", "away": self._away}.get(reason, reason)
            waiting.answer.set_result(Later(reported))
        return waiting.answer

    def publish(self, messages: Sequence[Message], within_s: float) -> list[Outcome]:
        """Hand over messages and wait for their outcomes.

        Returns:
            One outcome for each; `Later` also for a message that was not acknowledged in time and may still arrive.
        """
        answers = [self.submit(message) for message in messages]
        wait(answers, within_s)
        late = Later(f"no acknowledgement within {within_s:g} s")
        return [answer.result() if answer.done() else late for answer in answers]

    def close(self, within_s: float) -> None:
        """Publish for at most `within_s` seconds, return the rest to its senders, and end."""
        with self._condition:
            self._deadline_s = self._monotonic_s() + within_s
            self._condition.notify_all()
        self._thread.join(within_s + CONNECT_S + END_S + 1.0)

    def _unable(self, size: int) -> str:
        if self._deadline_s is not None:
            return "closed"
        if self._away:
            return "away"
        return "full" if self._waiting_bytes + size > WAITING_BYTES_MAX else ""

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = RECONNECT_FIRST_S
        while self._deadline_s is None or self._waiting_bytes:
            before = self._counts.published
            reason = self._live_and_die()
            self._give_back(reason or "closed")
            if self._deadline_s is not None:
                break
            worked = self._counts.published > before
            pause_s = RECONNECT_FIRST_S if worked else min(pause_s * 2, RECONNECT_MAX_S)
            with self._condition:
                # Jitter, so that the agents of a large job do not all reconnect at the same moment.
                jitter = random.uniform(0.7, 1.0)  # noqa: S311 - no secret
                self._condition.wait_for(lambda: self._deadline_s is not None, pause_s * jitter)

    def _live_and_die(self) -> str:
        """Use one client until it fails; returns why, empty after `close`."""
        client: KafkaProducer | None = None
        try:
            client = self._connect()
            self._away = ""
            self._counts.clients += 1
            return self._serve(client)
        except KafkaAwayError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - any failure is reported, and a new client tries again
            return explained(error)
        finally:
            if client is not None:
                _end(client)

    def _connect(self) -> KafkaProducer:
        client: KafkaProducer = opened(
            KafkaProducer,
            self._settings,
            CONNECT_S,
            acks="all",
            compression_type=None if self._settings.compression == "none" else self._settings.compression,
            linger_ms=self._linger_ms,
            batch_size=BATCH_BYTES,
            max_request_size=MESSAGE_BYTES_MAX,
            delivery_timeout_ms=NO_EXPIRY_MS,
            max_block_ms=int(CONNECT_S * 1000),
            metrics_enabled=False,
        )
        # The constructor ignores an option of this name. A missing topic must be an error: a topic that the broker
        # creates by itself has the default number of partitions and the default timestamps.
        client._metadata.config["allow_auto_create_topics"] = False
        return client

    def _serve(self, client: KafkaProducer) -> str:
        self._broken = ""
        while True:
            with self._condition:
                look_s = LOOK_S if self._sent or self._deadline_s is not None else None
                self._condition.wait_for(lambda: self._queue or self._broken or self._done(), look_s)
                fresh = list(self._queue)
                self._queue.clear()
                self._sent.update(dict.fromkeys(fresh, self._monotonic_s()))
            for waiting in fresh:
                self._send(client, waiting)
            if self._broken or self._done():
                return self._broken
            if self._stalled():
                return "acknowledgements stay away"

    def _done(self) -> bool:
        if self._deadline_s is None:
            return False
        return not (self._queue or self._sent) or self._monotonic_s() >= self._deadline_s

    def _stalled(self) -> bool:
        with self._condition:
            now_s = self._monotonic_s()
            oldest_s = next(iter(self._sent.values()), now_s)
            silent = now_s - max(oldest_s, self._received_s) > self._stall_s
            return silent or now_s - oldest_s > self._stall_s * STUCK_RATIO

    def _send(self, client: KafkaProducer, waiting: _Waiting) -> None:
        message = waiting.message
        try:
            future = client.send(
                message.topic,
                message.value,
                key=message.key.encode(),
                headers=list(message.headers),
                partition=partition_of(message.key, len(client.partitions_for(message.topic))),
            )
        except _TOO_LARGE as error:
            self._refuse(waiting, error)
        else:
            future.add_callback(self._acknowledged, waiting)
            future.add_errback(self._failed, waiting)

    def _acknowledged(self, waiting: _Waiting, _metadata: Any) -> None:
        # Callbacks run in the client's thread.
        with self._condition:
            self._received_s = self._monotonic_s()
            if self._forget(waiting):
                self._counts.published += 1
                self._counts.published_bytes += len(waiting.message.value)
                waiting.answer.set_result(Accepted())

    def _failed(self, waiting: _Waiting, error: BaseException) -> None:
        with self._condition:
            if waiting not in self._sent:
                return
            # Only the first message is too large: the client then fails all its messages with the same error.
            if isinstance(error, _TOO_LARGE) and not self._broken:
                self._refuse(waiting, error)
            # No message expires, so the client itself is broken, or lacks a permission.
            self._broken = self._broken or explained(error)
            self._condition.notify_all()

    def _refuse(self, waiting: _Waiting, error: BaseException) -> None:
        with self._condition:
            if self._forget(waiting):
                self._counts.refused["too_large"] += 1
                waiting.answer.set_result(Refused("too_large", str(error)))

    def _forget(self, waiting: _Waiting) -> bool:
        """Stop tracking a message; False if it was returned to its sender already."""
        if self._sent.pop(waiting, None) is None:
            return False
        self._waiting_bytes -= waiting.message.size
        return True

    def _give_back(self, reason: str) -> None:
        closing = self._deadline_s is not None
        with self._condition:
            if not self._away and not closing:
                _log.warning("nothing can be published: %s", reason)
            self._away = reason
            unsent = [*self._sent, *self._queue]
            self._sent.clear()
            self._queue.clear()
            self._waiting_bytes = 0
            self._counts.put_off["closed" if closing else "away"] += len(unsent)
        for waiting in unsent:
            waiting.answer.set_result(Later(reason))


def _end(client: KafkaProducer) -> None:
    """End a client without waiting for its messages. Its own `close` alone would wait for them without a limit."""
    client._sender.force_close()
    client._sender.join(END_S)
    with contextlib.suppress(Exception):
        client.close(0)
