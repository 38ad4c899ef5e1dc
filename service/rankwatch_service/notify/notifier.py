"""The notifier's loop: notices what was committed, keeps tries under way, records how they ended.

All state that matters is in the outbox. Killed at any moment it loses nothing: a message whose try was not recorded
is tried again under the same id. Of several notifiers the one with the lease delivers, the others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final, Protocol

import structlog
from sqlalchemy.exc import SQLAlchemyError

from rankwatch_service.clock import Clock
from rankwatch_service.notify.outbox import Message, OutboxTable, Try
from rankwatch_service.notify.schedule import Outcome, after_try
from rankwatch_service.store.errors import StoreError
from rankwatch_service.store.lease import RENEW_S, Lease, LeaseLostError

WATCH_S: Final = 0.02
"""How often the database is asked whether anything was committed; one asking costs microseconds."""

RETRY_LOOK_S: Final = 0.5
"""How often the outbox is read without a commit, for messages whose next try has come."""

GIVE_UP_LOOK_S: Final = 60.0

STOP_S: Final = 2.0
"""How long tries under way may go on after the order to stop; what is cut off is tried again at the next start."""

_DATABASE_ERRORS: Final = (SQLAlchemyError, StoreError)

_log = structlog.get_logger(__name__)


class Changes(Protocol):
    """Tells whether another connection has committed since it was last asked."""

    def changed(self) -> bool:
        """Cheap enough to be asked fifty times a second."""
        ...


class Sends(Protocol):
    """What the notifier needs of a sender."""

    async def send(self, url: str, secret: str, message_id: str, body: bytes) -> Outcome:
        """Try once to deliver a message; never raises for what a receiver does."""
        ...


class Notifier:
    """Delivers the outbox while it has the lease; `blocking` runs all database work, on one thread."""

    def __init__(
        self,
        outbox: OutboxTable,
        lease: Lease,
        sender: Sends,
        changes: Changes,
        clock: Clock,
        jitter: random.Random,
        blocking: Executor,
    ) -> None:
        self._outbox = outbox
        self._lease = lease
        self._sender = sender
        self._changes = changes
        self._clock = clock
        self._jitter = jitter
        self._blocking = blocking
        self._in_flight: defaultdict[str, dict[str, asyncio.Task[None]]] = defaultdict(dict)
        self._ended: list[Try] = []
        self._wake = asyncio.Event()
        self._renew_s = float("-inf")
        self._leads = False
        self._stopping = False

    async def run(self) -> None:
        """Deliver until `stop` is called, then let tries under way end for up to `STOP_S` seconds."""
        loop = asyncio.get_running_loop()
        look_s = give_up_s = loop.time()
        while not self._stopping:
            self._wake.clear()
            await self._see_to_lease(loop.time())
            changed = await self._in_thread(self._changes.changed)
            recorded = await self._record()
            if self._lease.valid and loop.time() >= give_up_s:
                await self._give_up()
                give_up_s = loop.time() + GIVE_UP_LOOK_S
            if self._lease.valid and (changed or recorded or loop.time() >= look_s):
                await self._start_due()
                look_s = loop.time() + RETRY_LOOK_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), WATCH_S)
        await self._finish()

    def stop(self) -> None:
        """Make `run` return; call it on the loop's thread."""
        self._stopping = True
        self._wake.set()

    async def _see_to_lease(self, now_s: float) -> None:
        """Renew the lease, or ask for it again, every `RENEW_S`."""
        if now_s >= self._renew_s:
            self._renew_s = now_s + RENEW_S
            try:
                await self._in_thread(self._lease.hold)
            except _DATABASE_ERRORS as error:
                _log.warning("lease_not_renewed", error=str(error))
        if self._leads != self._lease.valid:
            self._leads = self._lease.valid
            _log.info("lease_taken" if self._leads else "lease_not_ours")

    async def _start_due(self) -> None:
        in_flight = {receiver: tuple(tasks) for receiver, tasks in self._in_flight.items() if tasks}
        try:
            due = await self._in_thread(self._outbox.due, self._clock.unix_ns(), in_flight)
        except _DATABASE_ERRORS as error:
            _log.warning("outbox_unreadable", error=str(error))
            return
        if not self._lease.valid:  # we may have stood still since we last looked
            return
        for message in due:
            task = asyncio.create_task(self._deliver(message))
            self._in_flight[message.receiver][message.id] = task

    async def _deliver(self, message: Message) -> None:
        try:
            outcome = await self._sender.send(message.url, message.secret, message.id, message.body)
        except Exception as error:  # noqa: BLE001
            # A fault of ours; as an outcome it is retried later, not at once and for ever.
            _log.exception("delivery_broke", message_id=message.id)
            outcome = Outcome(None, f"internal: {type(error).__name__}", 0.0)
        now_unix_ns = self._clock.unix_ns()
        following = after_try(outcome, message.tries + 1, now_unix_ns, self._jitter.random())
        _log.info(
            "delivery",
            receiver=message.receiver,
            message_id=message.id,
            status=outcome.status,
            error=outcome.error,
            state=following.state,
        )
        self._ended.append(Try(message, outcome, following, now_unix_ns))
        self._wake.set()

    async def _record(self) -> bool:
        """Record the tries that have ended, all in one transaction: under load they share its wait for the disk.

        Until that is done a message counts as under way, or it would be sent again at once. If the database refuses,
        the next turn of the loop tries again. Without the lease they are the next holder's, who tries the same again.
        """
        ended = tuple(self._ended)
        if not ended:
            return False
        try:
            await self._in_thread(self._outbox.record, ended)
        except LeaseLostError:
            _log.warning("deliveries_not_ours_to_record", count=len(ended))
        except _DATABASE_ERRORS as error:
            _log.warning("deliveries_not_recorded", count=len(ended), error=str(error))
            return False
        del self._ended[: len(ended)]
        for one in ended:
            del self._in_flight[one.message.receiver][one.message.id]
        return True

    async def _give_up(self) -> None:
        try:
            in_flight = [message_id for tasks in self._in_flight.values() for message_id in tasks]
            given_up = await self._in_thread(self._outbox.give_up, self._clock.unix_ns(), in_flight)
        except LeaseLostError:
            return
        except _DATABASE_ERRORS as error:
            _log.warning("outbox_unwritable", error=str(error))
            return
        if given_up:
            _log.error("notifications_given_up", count=given_up)

    async def _finish(self) -> None:
        sending = [task for tasks in self._in_flight.values() for task in tasks.values() if not task.done()]
        if sending:
            _, unfinished = await asyncio.wait(sending, timeout=STOP_S)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        await self._record()
        try:
            await self._in_thread(self._lease.release)
        except _DATABASE_ERRORS as error:
            _log.warning("lease_not_released", error=str(error))

    async def _in_thread(self, call: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._blocking, call, *arguments)
