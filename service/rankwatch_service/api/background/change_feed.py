"""Tells the requests of this process that the database has changed. One poll serves all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final, TypeVar

from starlette.concurrency import run_in_threadpool

from rankwatch_service.store.change_watch import Changes

POLL_S: Final = 0.05
"""Time between two polls of the database. A poll takes 3 us on SQLite, less on PostgreSQL."""

Value = TypeVar("Value")


class ChangeFeed:
    """Lives in the event loop. `generation` grows with every change that is detected."""

    def __init__(self, changes: Changes, on_change: Callable[[], None]) -> None:
        """Poll nothing yet.

        Args:
            changes: polled every `POLL_S`.
            on_change: called in the event loop after each change; must not block.
        """
        self._changes = changes
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.stopping = False

    def start(self) -> None:
        """Start polling; call it inside the running loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Wake all waiters for the last time; they return when they see `stopping`."""
        self.stopping = True
        self._announce()

    async def close(self) -> None:
        """Stop polling and release the connection."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._changes.close()

    async def wait(self, generation: int, timeout_s: float) -> None:
        """Return when the database has changed since `generation`, when the feed stops, or after `timeout_s`."""
        if self.generation != generation or self.stopping:
            return
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def read_until(
        self, read: Callable[[], Value], accept: Callable[[Value], bool], timeout_s: float
    ) -> tuple[Value, bool]:
        """Read, and read again after each change, until the value is accepted, the feed stops or the time is up.

        Args:
            read: reads the database; runs in a thread. Its errors are raised here.
            accept: whether the caller has waited for this value.
            timeout_s: how long to wait for changes. The last read may end later.

        Returns:
            The last value, and whether it was accepted.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while True:
            # Taken before the read: a change during the read causes another one.
            generation = self.generation
            value = await run_in_threadpool(read)
            if accept(value):
                return value, True
            left_s = deadline_s - loop.time()
            if left_s <= 0 or self.stopping:
                return value, False
            await self.wait(generation, left_s)

    async def _run(self) -> None:
        while not self.stopping:
            if self._changes.changed():
                self._announce()
            await asyncio.sleep(POLL_S)

    def _announce(self) -> None:
        self.generation += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()
