"""Keeps child processes running: restarts one that dies, and ends all with their parent, even if that is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from rankwatch import children
from rankwatch_service.clock import Clock

RESTART_FIRST_S: Final = 0.1
RESTART_MAX_S: Final = 5.0
"""Longest pause before a restart; the first is doubled each time a process dies within `YOUNG_S`."""

YOUNG_S: Final = 10.0
STOP_S: Final = 10.0
"""How long processes may take to end before they are killed."""

LOOK_S: Final = 0.05
PR_SET_PDEATHSIG: Final = 1

_libc = ctypes.CDLL(None, use_errno=True)
_log = structlog.get_logger(__name__)


@dataclass
class _Child:
    name: str
    command: Sequence[str]
    process: children.Child | None = None
    started_s: float = 0.0
    pause_s: float = RESTART_FIRST_S
    restart_at_s: float = 0.0


class Supervisor:
    """Runs commands until `stop`. Single-threaded, since children die with the thread that started them."""

    def __init__(self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str], clock: Clock) -> None:
        self._children = [_Child(name, command) for name, command in commands.items()]
        self._environment = dict(environment)
        self._clock = clock
        self._stopping = False
        self.restarts = 0
        """Number of restarts of children that died."""

    def stop(self) -> None:
        """Let `run` end; safe in a signal handler."""
        self._stopping = True

    def start(self) -> None:
        """Start every child."""
        for child in self._children:
            self._start(child)

    def run(self) -> None:
        """Restart children that die until `stop`, then end all."""
        while not self._stopping:
            self.look()
            self._clock.sleep(LOOK_S)
        self.end()

    def look(self) -> None:
        """Restart children that have died, each after its pause."""
        now_s = self._clock.monotonic_s()
        for child in self._children:
            if child.process is not None:
                status = child.process.poll()
                if status is None:
                    continue
                lived_s = now_s - child.started_s
                child.pause_s = min(child.pause_s * 2, RESTART_MAX_S) if lived_s < YOUNG_S else RESTART_FIRST_S
                child.restart_at_s = now_s + child.pause_s
                child.process = None
                _log.warning("role_died", child=child.name, status=status, restart_in_s=child.pause_s)
            if now_s >= child.restart_at_s:
                self.restarts += 1
                self._start(child)

    def end(self) -> None:
        """Send every child SIGTERM, and kill those that do not end."""
        running = [child.process for child in self._children if child.process is not None]
        for process in running:
            process.terminate()
        deadline_s = self._clock.monotonic_s() + STOP_S
        for process in running:
            try:
                process.wait(max(deadline_s - self._clock.monotonic_s(), 0.01))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, child: _Child) -> None:
        child.started_s = self._clock.monotonic_s()
        child.process = children.start(
            child.command,
            self._environment,
            stdin=subprocess.DEVNULL,
            # Ctrl-C reaches only the parent, which then ends the children in order.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # this process has one thread
        )


def die_with_parent(parent_pid: int) -> Callable[[], None]:
    """A function for `preexec_fn`: the kernel then kills the child when its parent ends, however it ends."""

    def prepare() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:  # the parent ended before the call of prctl
            os._exit(1)

    return prepare
