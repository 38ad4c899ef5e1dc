"""The supervisor: starts the worker, and starts it again when it dies of anything but its own decision.

A signal to stop often means the whole job (a scheduler signals all that runs in its allocation): then the ends of the
ranks are still to be told. The worker decides when that is done, and the supervisor waits for it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Final

RESTART_AFTER_S: Final = 0.2
RESTARTS_MAX: Final = 5
RESTARTS_WINDOW_S: Final = 60.0
"""A worker that dies at once is started five times in a minute, not a hundred times."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def supervise(worker: list[str], lock: int, tell: Callable[[str], None]) -> int:
    """Keep a worker running until it ends by itself.

    Args:
        worker: command line; the number of restarts so far is appended.
        lock: descriptor of the agent's lock, which the worker inherits.
        tell: says one line in the agent's log.

    Returns:
        The exit status for this process: 0, or 143 if it was told to stop.
    """
    os.set_inheritable(lock, True)
    stop = _Stop()
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    restarts: deque[float] = deque(maxlen=RESTARTS_MAX)
    count = 0
    while True:
        # Blocked until the worker has handlers: it would be ended by what comes before.
        stop.pid = os.posix_spawn(sys.executable, [*worker, str(count)], os.environ, setsigmask=STOP_SIGNALS)
        if stop.told():
            stop(signal.SIGTERM, None)  # told while there was nobody yet to hand it on to
        status = os.waitstatus_to_exitcode(os.waitpid(stop.pid, 0)[1])
        stop.pid = 0
        # Without its directory entry the lock is seen by nobody, and the recorders are gone with it.
        if status == 0 or os.fstat(lock).st_nlink == 0 or (stop.told() and len(restarts) == RESTARTS_MAX):
            break
        count += 1
        tell(f"the worker ended with status {status}; restart {count}")
        pause_s = RESTART_AFTER_S
        if len(restarts) == RESTARTS_MAX:
            pause_s = max(pause_s, restarts[0] + RESTARTS_WINDOW_S - time.monotonic())
        stop.sleep(pause_s)
        restarts.append(time.monotonic())
    return 143 if stop.told() else 0


class _Stop:
    """What was told: handed on to the worker, which then ends in order."""

    def __init__(self) -> None:
        self.pid = 0
        self._told = False

    def __call__(self, number: int, _frame: object) -> None:
        self._told = True
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def told(self) -> bool:
        """Whether the signal has come."""
        return self._told

    def sleep(self, seconds: float) -> None:
        """Sleep, but not longer than until told to stop: time.sleep() goes on after a handler has run."""
        until_s = time.monotonic() + seconds
        while not self._told and time.monotonic() < until_s:
            time.sleep(min(0.1, seconds))
