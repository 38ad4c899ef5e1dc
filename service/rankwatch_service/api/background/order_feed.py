"""The orders of each job that has order streams: read once after a change of the database, and sent to all its streams.

Streams need no thread, and wake up when the orders of their job have changed. One thread reads, and between two passes
the feed rests as long as the last one took: however many jobs are followed, requests have the rest. Where the orders of
a job cannot be read, its streams end, and agents that come back have them read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Final

import structlog
from starlette.concurrency import run_in_threadpool

from rankwatch_service.api.background.change_feed import ChangeFeed
from rankwatch_service.api.background.order_cache import OrderCache
from rankwatch_service.store.errors import StoreError

RESEND_S: Final = 10.0
"""How often everything is sent again: an agent that missed a change is out of date for no longer."""


_log = structlog.get_logger(__name__)


class OrdersUnreadError(Exception):
    """The orders of a job cannot be read, for an unexpected reason, which is logged."""


class OrderFeed:
    """Lives in the event loop."""

    def __init__(self, orders: OrderCache, changes: ChangeFeed, on_failure: Callable[[], None]) -> None:
        """Read nothing yet.

        Args:
            orders: reads the orders of a job.
            changes: signals when to read again.
            on_failure: called when the orders of a job cannot be read.
        """
        self._orders = orders
        self._changes = changes
        self._on_failure = on_failure
        self._jobs: dict[str, _SentOrders] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow changes; call it inside the running loop."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; the feed of changes has stopped before."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def of(self, job: str) -> AsyncGenerator[bytes]:
        """`wire.Orders` of a job as JSON: at once, after each change of them, and every `RESEND_S`, until the service
        stops.

        Raises:
            StoreError: the database failed.
            OrdersUnreadError: something else did.
        """
        sent = self._jobs.setdefault(job, _SentOrders())
        sent.streams += 1
        try:
            async with sent.first:
                if sent.body is None:
                    await self._read({job: sent}, self._changes.generation)
            while not self._changes.stopping:
                changed = sent.changed
                if sent.failed is not None:
                    raise sent.failed
                assert sent.body is not None
                yield sent.body
                try:
                    await asyncio.wait_for(changed.wait(), RESEND_S)
                except TimeoutError:
                    continue
        finally:
            sent.streams -= 1
            if not sent.streams:
                del self._jobs[job]

    async def _read(self, jobs: Mapping[str, _SentOrders], generation: int) -> None:
        loop = asyncio.get_running_loop()

        def read() -> None:
            failed: StoreError | None = None
            for job, sent in jobs.items():
                if self._changes.stopping:
                    return
                # A database that does not answer is asked once in a pass.
                orders = failed or self._orders_of(job, generation)
                if isinstance(orders, StoreError):
                    failed = orders
                loop.call_soon_threadsafe(self._report, sent, orders)

        await run_in_threadpool(read)

    def _report(self, sent: _SentOrders, orders: bytes | StoreError | OrdersUnreadError) -> None:
        if isinstance(orders, bytes):
            sent.send(orders)
        else:
            self._on_failure()
            sent.fail(orders)

    def _orders_of(self, job: str, generation: int) -> bytes | StoreError | OrdersUnreadError:
        try:
            return self._orders.orders(job, generation)
        except StoreError as error:
            return error
        except Exception:  # noqa: BLE001 - it ends the streams of this job alone
            _log.exception("orders_unread", job=job)
            return OrdersUnreadError(job)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._changes.stopping:
            generation, began_s = self._changes.generation, loop.time()
            await self._read(dict(self._jobs), generation)
            await asyncio.sleep(loop.time() - began_s)
            await self._changes.wait(generation, RESEND_S)
        for sent in self._jobs.values():
            sent.changed.set()


class _SentOrders:
    """What the streams of one job were sent last."""

    def __init__(self) -> None:
        self.streams = 0
        self.first = asyncio.Lock()
        """Held by the stream that reads before any pass."""
        self.body: bytes | None = None
        self.failed: StoreError | OrdersUnreadError | None = None
        """The last read has; streams end."""
        self.changed = asyncio.Event()

    def send(self, body: bytes) -> None:
        self.failed = None
        if body != self.body:
            self.body = body
            self._wake()

    def fail(self, error: StoreError | OrdersUnreadError) -> None:
        self.failed = error
        self._wake()

    def _wake(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()
