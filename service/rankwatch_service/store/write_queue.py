"""Turns at the write lock of a SQLite database, so that a steady writer does not starve the others.

A process that waits for SQLite sleeps up to 100 ms between tries, so beside a steady writer it hardly ever finds the
lock free (measured: one turn in five seconds). Here a writer first takes the place of the next one, then waits for the
turn, and queues again after it. Both are `flock`s on files beside the database, which the kernel releases when a
process dies.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

LOOK_S: Final = 0.001
"""Pause between looks at a lock; a turn lasts 5 to 20 ms."""


@contextmanager
def turn(database: str, timeout_s: float) -> Iterator[None]:
    """Hold the turn for the block.

    After `timeout_s`, or if the files cannot be created, the block runs without a turn: then SQLite's own lock decides.
    """
    deadline_s = time.monotonic() + timeout_s
    held = -1
    with suppress(OSError):
        place = _taken(f"{database}-next", deadline_s)
        if place >= 0:
            try:
                held = _taken(f"{database}-turn", deadline_s)
            finally:
                os.close(place)
    try:
        yield
    finally:
        if held >= 0:
            os.close(held)


def _taken(path: str, deadline_s: float) -> int:
    """Descriptor of the locked file; -1 after the deadline."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    while True:
        # Polled, since a flock that blocks has no time-out.
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                os.close(file)
                return -1
            time.sleep(LOOK_S)
        except BaseException:
            os.close(file)
            raise
