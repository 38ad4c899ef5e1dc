"""Tells the streams of this process when the database has changed: one watch for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from rankwatch_service.store.change_watch import ChangeWatch

POLL_S: Final = 0.05
"""How often the database is asked; 20 questions of 3 us a second."""


class Pulse:
    """Lives in the event loop. `generation` grows with every change that was seen."""

    def __init__(self, watch: ChangeWatch, on_change: Callable[[], None]) -> None:
        """`on_change` is called at each change, in the loop; it must not block."""
        self._watch = watch
        self._on_change = on_change
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.generation = 0
        self.stopping = False

    def start(self) -> None:
        """Begin to watch; call inside the running loop."""
        self._task = asyncio.create_task(self._run())

    def stop(self) -> None:
        """Wake everybody for the last time; streams end when they see `stopping`."""
        self.stopping = True
        self._announce()

    async def close(self) -> None:
        """End the watch."""
        self.stop()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._watch.close()

    async def wait(self, since: int, timeout_s: float) -> None:
        """Return when `generation` is not `since` any more, when all ends, or after `timeout_s`."""
        if self.generation != since or self.stopping:
            return
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:
            return

    async def _run(self) -> None:
        while not self.stopping:
            if self._watch.changed():
                self._announce()
            await asyncio.sleep(POLL_S)

    def _announce(self) -> None:
        self.generation += 1
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._on_change()
