"""Traffic between agent and service over HTTP: telemetry and views up, orders down.

Three threads have a connection each: the sender publishes batches, one thread posts views, one holds the command stream
open. Orders from the stream and from answers to views go into the inbox, which wakes the main loop.
"""

from __future__ import annotations

import logging
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final
from urllib.parse import urlencode

from rankwatch import wire
from rankwatch.agent.batch_builder import SenderIdentity
from rankwatch.agent.enrolment import ENROL_AGAIN, Enrolment, NotEnrolledError, OrderCheck
from rankwatch.agent.service_connection import (
    FOR_A_PERSON,
    FindEndpoint,
    ServiceConnection,
    Unconfigured,
    Unreachable,
    detail,
)
from rankwatch.outcome import Accepted, Later, Outcome, Refused
from rankwatch.signed import Purpose

NEVER_ACCEPTED: Final = frozenset((400, 413, 415, 422))
"""Statuses after which this message will never be accepted. All others may change: 401 with a new token, 404 with the
right service behind the URL, 409 by enrolling again, 429 and 5xx by waiting."""
INBOX_MAX: Final = 64
"""Orders waiting for the main loop, which reads several times a second; each is the whole state, so the oldest can be
dropped."""
RECONNECT_FIRST_S: Final = 0.2
RECONNECT_MAX_S: Final = 5.0
"""Longest wait before the command stream is opened again; answers to views carry the orders too."""
VIEW_RETRY_MAX_S: Final = 1.0
"""An agent that is silent for 2 s counts as lost, and its orders are released."""
VIEW_TIMEOUT_S: Final = 2.0
"""A view older than this is useless: by then the api considers the agent silent."""

_log = logging.getLogger(__name__)


class HttpPublisher:
    """Publishes batches by `POST /api/v1/telemetry`."""

    def __init__(self, connection: ServiceConnection, enrolment: Enrolment) -> None:
        self._connection = connection
        self._enrolment = enrolment

    def __call__(self, body: bytes) -> Outcome:
        """Send one encoded batch; see `sender.Publish`."""
        try:
            identity = self._enrolment.identity(body)
            sent = identity.sign(Purpose.BATCH, body)
            answer = self._connection.post("/api/v1/telemetry", sent)
        except Unreachable as error:
            return not_sent(error)
        if 200 <= answer.status < 300:
            return Accepted()
        if answer.status == ENROL_AGAIN:
            self._enrolment.forget(identity)
        if answer.status in NEVER_ACCEPTED:
            return Refused(f"refused_{answer.status}", answer.body[:500].decode("utf-8", "replace"))
        if answer.status in FOR_A_PERSON:
            return Later(f"{self._connection.url} says {answer.status}: {detail(answer)}", answer.retry_after_s, True)
        return Later(f"status {answer.status}", answer.retry_after_s)


def not_sent(error: Unreachable) -> Later:
    """The outcome of a message for which the service did not answer, or did not enrol this agent."""
    if isinstance(error, NotEnrolledError):
        return Later(str(error), error.after_s, error.for_a_person)
    return Later(str(error), for_a_person=isinstance(error, Unconfigured))


class Inbox:
    """Queue of orders for the main loop; `fd` is readable while some wait."""

    def __init__(self) -> None:
        self._orders: deque[wire.Orders] = deque(maxlen=INBOX_MAX)
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def put(self, orders: wire.Orders) -> None:
        """Add one state of the orders, from any thread."""
        self._orders.append(orders)
        os.eventfd_write(self.fd, 1)

    def take(self) -> Iterator[wire.Orders]:
        """All waiting orders, oldest first."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            return
        while self._orders:
            yield self._orders.popleft()


class ViewPoster(threading.Thread):
    """Posts the newest view of each attempt; an older one that still waits is dropped, since a view is state."""

    def __init__(self, find: FindEndpoint, inbox: Inbox, enrolment: Enrolment, check: OrderCheck) -> None:
        super().__init__(name="views", daemon=True)
        self._connection = ServiceConnection(find, VIEW_TIMEOUT_S)
        self._inbox = inbox
        self._enrolment = enrolment
        self._check = check
        self._condition = threading.Condition()
        self._views: dict[str, wire.View] = {}
        self._closed = False

    def offer(self, views: list[wire.View]) -> None:
        """Hand over one view for each attempt that has ranks here."""
        with self._condition:
            self._views = {view.attempt: view for view in views}
            self._condition.notify()

    def close(self) -> None:
        """Stop posting."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def run(self) -> None:
        """Post until closed. Not for callers."""
        pause = Pause(self._condition, lambda: self._closed, VIEW_RETRY_MAX_S)
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._views or self._closed)
                if self._closed:
                    break
                views, self._views = self._views, {}
            if all(self._post(view) for view in views.values()):
                pause.reset()
            else:
                pause.wait()
        self._connection.close()

    def _post(self, view: wire.View) -> bool:
        body = wire.encode(view)
        try:
            identity = self._enrolment.identity()
            sent = identity.sign(Purpose.VIEW, body)
            answer = self._connection.post("/api/v1/agents/view", sent)
            if answer.status == ENROL_AGAIN:
                self._enrolment.forget(identity)
            if not 200 <= answer.status < 300:
                return False
            self._inbox.put(self._check.answer(identity, answer.body, sent))
        except Unreachable as error:
            _log.debug("view not posted: %s", error)
            return False
        return True


class OrderStream(threading.Thread):
    """Holds the command stream of one job open and opens it again when it ends."""

    def __init__(
        self,
        find: FindEndpoint,
        inbox: Inbox,
        enrolment: Enrolment,
        check: OrderCheck,
        job: str,
        sender_identity: SenderIdentity,
    ) -> None:
        super().__init__(name="orders", daemon=True)
        self._connection = ServiceConnection(find)
        self._inbox = inbox
        self._enrolment = enrolment
        self._check = check
        self._asked = {"job": job, "host": sender_identity.host, "boot": sender_identity.boot}
        self._condition = threading.Condition()
        self._closed = False

    def close(self) -> None:
        """Do not open the stream again; an open one ends with the process."""
        with self._condition:
            self._closed = True
            self._condition.notify()

    def run(self) -> None:
        """Listen until closed. Not for callers."""
        pause = Pause(self._condition, lambda: self._closed, RECONNECT_MAX_S)
        while not self._closed:
            try:
                for orders in self._orders():
                    self._inbox.put(orders)
                    pause.reset()
            except Unreachable as error:
                _log.debug("command stream ended: %s", error)
            pause.wait()

    def _orders(self) -> Iterator[wire.Orders]:
        """Open the stream once, and yield what it brings.

        Raises:
            Unreachable: the service did not answer or fell silent, or an event is not from it.
        """
        identity = self._enrolment.identity()
        request = identity.sign(Purpose.LISTEN, os.urandom(wire.LISTEN_BYTES))
        asked = self._asked | {"signed": request.hex()}
        sequence = -1
        for event, data in self._connection.stream(f"/api/v1/agents/orders?{urlencode(asked)}"):
            if event == "orders":
                orders, sequence = self._check.event(identity, data, request, sequence)
                yield orders


class Pause:
    """Growing waits between tries, with jitter; closing the thread ends a wait early."""

    def __init__(self, condition: threading.Condition, closed: Callable[[], bool], max_s: float) -> None:
        self._max_s = max_s
        self._condition = condition
        self._closed = closed
        self._seconds = RECONNECT_FIRST_S

    def reset(self) -> None:
        """Start again with the shortest wait, after a success."""
        self._seconds = RECONNECT_FIRST_S

    def wait(self) -> None:
        """Wait, and wait longer the next time."""
        with self._condition:
            self._condition.wait_for(self._closed, self._seconds * random.uniform(0.7, 1.0))  # noqa: S311 - no secret
        self._seconds = min(self._max_s, self._seconds * 2)
