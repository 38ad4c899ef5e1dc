"""Publishes to Kafka from a thread of its own, in bounded memory, through whatever happens to the brokers.

The client library has three habits that this file is about. It keeps un-acknowledged messages without a bound: we
count their bytes and refuse more. It is stuck for good when a message outlives its delivery time-out: here none does.
And it never goes back to the addresses that it began with, and spins while a broker hangs: so when nothing was
acknowledged for `STALL_S`, its messages are given back to whoever sent them, and a new client begins anew. Whoever
gets a message back keeps it and sends it again; what had arrived all the same arrives twice, under the same number.

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

from rankwatch.kafka.client import KafkaAwayError, opened
from rankwatch.kafka.reasons import explained
from rankwatch.kafka.settings import MESSAGE_BYTES_MAX, KafkaSettings, partition_of
from rankwatch.outcome import Accepted, Later, Outcome, Refused

WAITING_BYTES_MAX: Final = 32 * 1024 * 1024
"""Not acknowledged yet: 4 messages of the largest size. The client needs up to 1.4 times that for them."""
OVERHEAD_BYTES: Final = 1_024
"""What a message costs in memory besides its value."""
BATCH_BYTES: Final = 256 * 1024
"""A partition has one request under way, which holds this much unless one message is larger."""
STALL_S: Final = 12.0
"""One request that times out (10 s), and some. Brokers that change their leader, or one that is started again, need
2 to 7 s; a client whose broker hangs costs 0.9 of a core from the time-out on."""
CONNECT_S: Final = 5.0
"""How long brokers may take to let a new client in, or to tell it about a topic."""
RECONNECT_FIRST_S: Final = 0.25
RECONNECT_MAX_S: Final = 2.0
LOOK_S: Final = 0.25
"""Between looks at whether acknowledgements still come, while some are waited for."""
STUCK_RATIO: Final = 5
"""One message that waits this many times `STALL_S`, a minute, is stuck although others are acknowledged: its partition
has no leader. It must not hold the bound on bytes against the others."""
END_S: Final = 2.0
"""How long a client that is given up may take to let go of its sockets."""
NO_EXPIRY_MS: Final = 2**31 - 1

_log = logging.getLogger(__name__)
_TOO_LARGE: Final = (MessageSizeTooLargeError, RecordListTooLargeError)


@dataclass(frozen=True, slots=True)
class Message:
    """Something to publish. Messages of one key lie in one partition, in the order in which they were handed over."""

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
    """What a producer has done so far."""

    published: int = 0
    published_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """Messages that brokers will never take, by reason."""
    put_off: Counter[str] = field(default_factory=Counter)
    """Messages given back to be sent again later: `full`, `away` or `closed`."""
    clients: int = 0
    """Clients that got in; one more than they were replaced."""


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
            linger_ms: how long a message may wait for others to share its request. While a request is under way
                messages gather anyhow, so 0 is right unless there are very many partitions.
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
        """Handed to the client, oldest first, with the time; not acknowledged yet."""
        self._heard_s = 0.0
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
        """Why nothing can be published now; empty while a client is let in, or the first one tries."""
        return self._away

    @property
    def waiting_bytes(self) -> int:
        """Not acknowledged yet."""
        return self._waiting_bytes

    def counts(self) -> Counts:
        """A copy of what was counted so far."""
        with self._condition:
            done = self._counts
            return Counts(done.published, done.published_bytes, done.refused.copy(), done.put_off.copy(), done.clients)

    def submit(self, message: Message) -> Future[Outcome]:
        """Hand over one message.

        Returns:
            What becomes of it, within about `STALL_S`; at once `Later` where no broker answers or too much waits.
        """
        waiting = _Waiting(message, Future())
        waiting.answer.set_running_or_notify_cancel()  # nobody can take a message back
        with self._condition:
            reason = self._unable(message.size)
            if reason:
                self._counts.put_off[reason] += 1
            else:
                self._waiting_bytes += message.size
                self._queue.append(waiting)
                self._condition.notify_all()
        if reason:
            told = {"full": f"{self._waiting_bytes} bytes wait for Kafka", "away": self._away}.get(reason, reason)
            waiting.answer.set_result(Later(told))
        return waiting.answer

    def publish(self, messages: Sequence[Message], within_s: float) -> list[Outcome]:
        """Hand over messages and wait for what becomes of them.

        Returns:
            One outcome for each; `Later` also for what was not acknowledged in time, which may arrive all the same.
        """
        answers = [self.submit(message) for message in messages]
        wait(answers, within_s)
        late = Later(f"no acknowledgement within {within_s:g} s")
        return [answer.result() if answer.done() else late for answer in answers]

    def close(self, within_s: float) -> None:
        """Publish what waits for at most this long, give back the rest, and end."""
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
                # Jitter, so that the agents of a large job do not all come back in the same moment.
                jitter = random.uniform(0.7, 1.0)  # noqa: S311 - no secret
                self._condition.wait_for(lambda: self._deadline_s is not None, pause_s * jitter)

    def _live_and_die(self) -> str:
        """Use one client until it is of no use any more; returns why, empty when we are closed."""
        client: KafkaProducer | None = None
        try:
            client = self._connect()
            self._away = ""
            self._counts.clients += 1
            return self._serve(client)
        except KafkaAwayError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever it is: told, and tried again with another client
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
        # The option of this name is ignored by the client. A topic that is missing is an error, not an invitation: it
        # would come with the broker's default number of partitions and its own idea of time.
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
            silent = now_s - max(oldest_s, self._heard_s) > self._stall_s
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
        # From here on in the client's thread.
        with self._condition:
            self._heard_s = self._monotonic_s()
            if self._forget(waiting):
                self._counts.published += 1
                self._counts.published_bytes += len(waiting.message.value)
                waiting.answer.set_result(Accepted())

    def _failed(self, waiting: _Waiting, error: BaseException) -> None:
        with self._condition:
            if waiting not in self._sent:
                return
            # Only the first one is too large: a client that has met such an error gives it to all that it holds.
            if isinstance(error, _TOO_LARGE) and not self._broken:
                self._refuse(waiting, error)
            # No message expires, so this is a client that cannot go on, or is not allowed to.
            self._broken = self._broken or explained(error)
            self._condition.notify_all()

    def _refuse(self, waiting: _Waiting, error: BaseException) -> None:
        with self._condition:
            if self._forget(waiting):
                self._counts.refused["too_large"] += 1
                waiting.answer.set_result(Refused("too_large", str(error)))

    def _forget(self, waiting: _Waiting) -> bool:
        """False where it was given back already."""
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
    """End a client without waiting for what it still holds. Its own `close` waits for that, for ever if need be."""
    client._sender.force_close()
    client._sender.join(END_S)
    with contextlib.suppress(Exception):
        client.close(0)
