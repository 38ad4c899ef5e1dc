"""The supervisor: starts the worker, and restarts it unless it ended by itself.

A signal to stop is often sent to the whole job (a scheduler signals all processes of its allocation): then the ranks'
exits must still be reported. The worker decides when that is done, and the supervisor waits for it.

The daemon: starts an agent for every job with a recorder in a directory.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from rankwatch import children
from rankwatch.agent.ranks import jobs_in
from rankwatch.spawn import ensure_agent

RESTART_AFTER_S: Final = 0.2
RESTARTS_MAX: Final = 5
RESTARTS_WINDOW_S: Final = 60.0
"""Limits a worker that dies at once to five restarts a minute."""
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


def supervise(worker: list[str], lock: int, log: Callable[[str], None]) -> int:
    """Keep a worker running until it ends by itself.

    Args:
        worker: command line; the number of restarts so far is appended.
        lock: descriptor of the agent's lock, which the worker inherits.
        log: writes one line to the agent's log.

    Returns:
        The exit status for this process: 0, or 143 (128 + SIGTERM) after a signal to stop.
    """
    stop = _Stop()
    for number in STOP_SIGNALS:
        signal.signal(number, stop)
    restarts: deque[float] = deque(maxlen=RESTARTS_MAX)
    count = 0
    while True:
        # In the worker the signals stay blocked until it has handlers; an earlier one would end it.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        process = children.start([*worker, str(count)], pass_fds=(lock,))
        stop.pid = process.pid
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
        if stop.requested():
            stop(signal.SIGTERM, None)  # the signal came while there was no worker to forward it to
        status = process.wait()
        stop.pid = 0
        # A lock file without a directory entry protects nothing, and its directory, with the recorders, is gone.
        if status == 0 or os.fstat(lock).st_nlink == 0 or (stop.requested() and len(restarts) == RESTARTS_MAX):
            break
        count += 1
        log(f"the worker ended with status {status}; restart {count}")
        pause_s = RESTART_AFTER_S
        if len(restarts) == RESTARTS_MAX:
            pause_s = max(pause_s, restarts[0] + RESTARTS_WINDOW_S - time.monotonic())
        stop.sleep(pause_s)
        restarts.append(time.monotonic())
    return 143 if stop.requested() else 0


class _Stop:
    """Handles signals to stop: forwards them to the worker, which then ends in order."""

    def __init__(self) -> None:
        self.pid = 0
        self._reported = False

    def __call__(self, number: int, _frame: object) -> None:
        self._reported = True
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def requested(self) -> bool:
        """Whether a signal to stop has arrived."""
        return self._reported

    def sleep(self, seconds: float) -> None:
        """Sleep until the time is over or a signal arrives; time.sleep() alone continues after a handler."""
        until_s = time.monotonic() + seconds
        while not self._reported and time.monotonic() < until_s:
            time.sleep(min(0.1, seconds))


LOOK_EVERY_S: Final = 0.5
START_AGAIN_AFTER_S: Final = 10.0
"""Keeps an agent that ends at once, for instance because its directory is read-only, from being started in a loop."""


def serve_all(directory: Path, environment: Mapping[str, str], url: str | None, token_file: Path | None) -> int:
    """Start agents until SIGTERM or Ctrl-C; the agents outlive the daemon, until their ranks end. Returns 0."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    stopping: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: stopping.append(number))
    known: dict[str, str] = {}
    started_s: dict[str, float] = {}
    while not stopping:
        known = {name: job for name, job in known.items() if (directory / name).exists()}
        known |= jobs_in(directory, set(known))
        now_s = time.monotonic()
        for job in set(known.values()):
            if now_s - started_s.get(job, -START_AGAIN_AFTER_S) >= START_AGAIN_AFTER_S:
                token = str(token_file) if token_file is not None else None
                if ensure_agent(str(directory), job, environment, url=url, token_file=token):
                    started_s[job] = now_s
        time.sleep(LOOK_EVERY_S)
    return 0
