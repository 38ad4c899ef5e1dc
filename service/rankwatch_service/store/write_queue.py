"""The threads of one process that want to write to one database: one at a time, telemetry first."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Lock


class WriteQueue:
    """Threads wait here before they ask the database, or its lock files, for the right to write. Thread-safe.

    So a process asks with one thread at a time, however many requests want to write, and telemetry does not wait
    behind all of them. Whoever writes `first` goes before the others, but never twice in a row while others wait.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._is_held = False
        self._first: deque[Event] = deque()
        self._others: deque[Event] = deque()

    @contextmanager
    def place(self, timeout_s: float, *, first: bool) -> Iterator[float]:
        """Hold the place for the block, which gets the seconds of `timeout_s` that are left.

        After `timeout_s` the block runs all the same: the database decides then.
        """
        deadline_s = time.monotonic() + timeout_s
        is_held = self._enter(timeout_s, first=first)
        try:
            yield max(deadline_s - time.monotonic(), 0.0)
        finally:
            if is_held:
                self._leave(was_first=first)

    def _enter(self, timeout_s: float, *, first: bool) -> bool:
        queue, called = self._first if first else self._others, Event()
        with self._lock:
            if not self._is_held:
                self._is_held = True
                return True
            queue.append(called)
        try:
            called.wait(timeout_s)
        finally:
            with self._lock:
                if not (is_held := called.is_set()):
                    queue.remove(called)
        return is_held

    def _leave(self, *, was_first: bool) -> None:
        with self._lock:
            queue = self._first if self._first and not (was_first and self._others) else self._others
            if queue:
                queue.popleft().set()
            else:
                self._is_held = False
