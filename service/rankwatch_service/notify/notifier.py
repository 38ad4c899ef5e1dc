"""The notifier's loop: routes announcements into the outbox, sends what is due, and records the outcomes.

All state is in the database. A notifier that is killed loses nothing: a message whose try was not recorded is sent
again under the same id. The notifier that holds the lease delivers; others wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, Final

import structlog
from sqlalchemy.exc import SQLAlchemyError

from rankwatch_service.clock import Clock
from rankwatch_service.notify.lease import RENEW_S, Lease, LeaseLostError
from rankwatch_service.notify.outbox import DueMessage, EndedTry, OutboxTable
from rankwatch_service.notify.router import Router
from rankwatch_service.notify.sender import MessageSender, TryOutcome, after_try
from rankwatch_service.store.change_watch import Changes
from rankwatch_service.store.errors import StoreError

COMMIT_POLL_S: Final = 0.02
"""Between two polls for commits; a poll takes microseconds."""

DUE_POLL_S: Final = 0.5
"""How often the outbox is read even without a commit, for retries that have become due."""

RELEASE_POLL_S: Final = 1.0
"""How often what the limit of messages held back is looked at again."""

GIVE_UP_POLL_S: Final = 60.0
"""How often messages that are too old, or have no receiver, are given up."""

STOP_S: Final = 2.0
"""How long running tries may take after `stop`. Those cut off are tried again by the next notifier."""

_DATABASE_ERRORS: Final = (SQLAlchemyError, StoreError)

_log = structlog.get_logger(__name__)


class Notifier:
    """Routes announcements and delivers the messages of the outbox while it holds the lease."""

    def __init__(
        self,
        router: Router,
        outbox: OutboxTable,
        lease: Lease,
        sender: MessageSender,
        changes: Changes,
        clock: Clock,
        jitter: random.Random,
        blocking: Executor,
    ) -> None:
        """Do nothing until `run`.

        Args:
            router: decides who is notified.
            outbox: the messages.
            lease: which of several notifiers delivers.
            sender: sends one message.
            changes: polled every `COMMIT_POLL_S`.
            clock: stamps tries.
            jitter: spreads retries.
            blocking: one thread, for all work on the database: outbox and lease are not thread-safe.
        """
        self._router = router
        self._outbox = outbox
        self._lease = lease
        self._sender = sender
        self._changes = changes
        self._clock = clock
        self._jitter = jitter
        self._blocking = blocking
        self._in_flight: defaultdict[str, dict[str, asyncio.Task[None]]] = defaultdict(dict)
        self._ended: list[EndedTry] = []
        self._wake = asyncio.Event()
        self._renew_s = float("-inf")
        self._leads = False
        self._stopping = False

    async def run(self) -> None:
        """Deliver until `stop` is called, then wait up to `STOP_S` for running tries."""
        loop = asyncio.get_running_loop()
        look_s = give_up_s = release_s = loop.time()
        more = False
        while not self._stopping:
            self._wake.clear()
            await self._hold_lease(loop.time())
            changed = await self._in_thread(self._changes.changed)
            recorded = await self._record()
            if self._lease.valid and loop.time() >= give_up_s:
                await self._give_up()
                give_up_s = loop.time() + GIVE_UP_POLL_S
            if self._lease.valid and (changed or recorded or more or loop.time() >= look_s):
                more = await self._decide(self._router.route)
                if loop.time() >= release_s:
                    await self._decide(self._router.release, self._clock.unix_ns())
                    release_s = loop.time() + RELEASE_POLL_S
                await self._start_due()
                look_s = loop.time() + DUE_POLL_S
            if more and self._lease.valid:
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), COMMIT_POLL_S)
        await self._finish()

    def stop(self) -> None:
        """Make `run` return; call it in the event loop's thread."""
        self._stopping = True
        self._wake.set()

    async def _hold_lease(self, now_s: float) -> None:
        """Renew the lease, or try to acquire it, every `RENEW_S`."""
        if now_s >= self._renew_s:
            self._renew_s = now_s + RENEW_S
            try:
                await self._in_thread(self._lease.hold)
            except _DATABASE_ERRORS as error:
                _log.warning("lease_not_renewed", error=str(error))
        if self._leads != self._lease.valid:
            self._leads = self._lease.valid
            _log.info("lease_acquired" if self._leads else "lease_lost")

    async def _decide(self, decide: Callable[..., Any], *arguments: Any) -> bool:
        """Decide who is notified; returns whether there is more to decide at once."""
        try:
            return bool(await self._in_thread(decide, *arguments))
        except LeaseLostError:
            return False
        except _DATABASE_ERRORS as error:
            _log.warning("announcements_not_routed", error=str(error))
            return False

    async def _start_due(self) -> None:
        in_flight = {receiver: tuple(tasks) for receiver, tasks in self._in_flight.items() if tasks}
        try:
            due = await self._in_thread(self._outbox.due, self._clock.unix_ns(), in_flight)
        except LeaseLostError:
            return
        except _DATABASE_ERRORS as error:
            _log.warning("outbox_not_read", error=str(error))
            return
        if not self._lease.valid:  # it may have expired during the query, and another notifier deliver
            return
        for message in due:
            task = asyncio.create_task(self._deliver(message))
            self._in_flight[message.receiver][message.id] = task

    async def _deliver(self, message: DueMessage) -> None:
        try:
            outcome = await self._sender.send(message.url, message.secret, message.id, message.body)
        except Exception as error:  # noqa: BLE001
            # A defect of ours. Recorded as an outcome, so that the message is retried with the usual delays.
            _log.exception("delivery_failed_internally", message_id=message.id)
            outcome = TryOutcome(None, f"internal: {type(error).__name__}", 0.0)
        now_unix_ns = self._clock.unix_ns()
        decision = after_try(outcome, message.tries + 1, now_unix_ns, self._jitter.random())
        _log.info(
            "delivery",
            receiver=message.receiver,
            message_id=message.id,
            status=outcome.status,
            error=outcome.error,
            state=decision.state,
        )
        self._ended.append(EndedTry(message, outcome, decision, now_unix_ns))
        self._wake.set()

    async def _record(self) -> bool:
        """Record all tries that have ended in one transaction, so that under load they share one fsync.

        Until then their messages count as in flight, or they would be sent again at once. If the database fails, the
        next pass of the loop records them. If the lease is lost, its new holder sends these messages again.

        Returns:
            Whether any were recorded, or left to the new holder.
        """
        ended = tuple(self._ended)
        if not ended:
            return False
        try:
            await self._in_thread(self._outbox.record, ended)
        except LeaseLostError:
            _log.warning("deliveries_not_recorded_without_lease", count=len(ended))
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
            _log.warning("outbox_not_written", error=str(error))
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
