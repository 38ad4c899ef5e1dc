"""Group commit: writes that wait at the same time share one transaction.

While one flush runs, the next batch gathers, so batches grow with the latency of the disk.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Generic, TypeVar

from rankwatch_service.api.ingest.intake import NotNowError

Item = TypeVar("Item")

PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bytes that wait for a flush: 8 bodies of the largest size. More is refused; agents then spool it."""

FLUSH_BYTES_MAX: Final = 16 * 1024 * 1024
FLUSH_ITEMS_MAX: Final = 256
"""In one transaction: 256 batches of 80 KB are the 20 ms that a writer may hold the lock."""


class Batcher(Generic[Item]):
    """Collects items and hands them to `flush` in batches, in the order in which they came."""

    def __init__(self, name: str, flush: Callable[[Sequence[Item]], None]) -> None:
        """Flush nothing until `start`.

        Args:
            name: of the thread.
            flush: stores items durably; runs in a thread of its own, one call at a time.
        """
        self._flush = flush
        self._thread = ThreadPoolExecutor(1, name)
        self._waiting: list[tuple[Item, int, asyncio.Future[None]]] = []
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._stopping = False
        self.pending_bytes = 0
        self.refused = 0
        """Items refused because too many bytes were waiting."""

    async def put(self, item: Item, size_bytes: int) -> None:
        """Return once the item is durable.

        Raises:
            NotNowError: too many bytes are waiting.
            Exception: `flush` raised it.
        """
        if self.pending_bytes + size_bytes > PENDING_BYTES_MAX:
            self.refused += 1
            raise NotNowError("too many writes are waiting")
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, size_bytes, future))
        self.pending_bytes += size_bytes
        self._wake.set()
        await future

    def start(self) -> None:
        """Start flushing; call it inside the running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Flush what is waiting, then end."""
        self._stopping = True
        self._wake.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while not self._stopping or self._waiting:
            await self._wake.wait()
            batch = self._take()
            if not self._waiting and not self._stopping:
                self._wake.clear()
            if not batch:
                continue
            items = [item for item, _, _ in batch]
            failed: BaseException | None = None
            try:
                await loop.run_in_executor(self._thread, self._flush, items)
            except Exception as error:  # noqa: BLE001 - raised to those who wait for these items
                failed = error
            for _, size_bytes, future in batch:
                self.pending_bytes -= size_bytes
                if future.done():  # the request was cancelled
                    continue
                if failed is None:
                    future.set_result(None)
                else:
                    future.set_exception(failed)

    def _take(self) -> list[tuple[Item, int, asyncio.Future[None]]]:
        total, count = 0, 0
        for _, size_bytes, _ in self._waiting[:FLUSH_ITEMS_MAX]:
            if count and total + size_bytes > FLUSH_BYTES_MAX:
                break
            total, count = total + size_bytes, count + 1
        batch, self._waiting = self._waiting[:count], self._waiting[count:]
        return batch
