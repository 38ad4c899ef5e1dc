"""Takes the native frames of a hanging rank with py-spy, where that is installed on the host.

py-spy stops the process for some milliseconds, so only a rank whose stack was asked for is, and at each place of a host
only one. Nothing waits for it: a rank that is killed meanwhile has none. It needs the right to trace the process;
without it there are Python frames alone, and the log says so once.
"""

from __future__ import annotations

import logging
import queue
import shutil
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rankwatch import wire
from rankwatch.agent.clock import AgentClock
from rankwatch.agent.exits import RankProcess

PROGRAM: Final = "py-spy"
DUMP_WITHIN_S: Final = 10.0
"""It reads the symbols of all libraries of the process: torch's take seconds."""
NATIVE_STACKS_MAX: Final = 4
"""Places of a host whose native frames are taken for one request."""
NATIVE_BYTES_MAX: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class StackedRank:
    """Whose frames are wanted."""

    request: str
    attempt: str
    rank: int
    step: int | None
    process: RankProcess


class NativeStacks:
    """Asks py-spy for one rank after the other in a thread of its own; no call waits for it."""

    def __init__(self, clock: AgentClock, program: str = PROGRAM) -> None:
        self._clock = clock
        self._program = shutil.which(program)
        self._asked: queue.SimpleQueue[StackedRank] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[StackedRank, str]] = queue.SimpleQueue()
        self._newest, self._count = "", 0
        """The newest request, and how many ranks were asked for it."""
        self._thread: threading.Thread | None = None
        self._refused = False

    def begin(self, rank: StackedRank) -> None:
        """Ask for a rank's frames; nothing without py-spy, or beyond `NATIVE_STACKS_MAX` of a request."""
        if rank.request != self._newest:
            self._newest, self._count = rank.request, 0
        if self._program is None or self._count >= NATIVE_STACKS_MAX:
            return
        self._count += 1
        self._asked.put(rank)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="native-stacks", daemon=True)
            self._thread.start()

    def take(self) -> list[tuple[str, wire.Event]]:
        """Attempts with `native_stack` events."""
        ready = []
        while not self._answers.empty():
            rank, stack = self._answers.get()
            fields = {"order": rank.request, "stack": stack}
            event = wire.Event("native_stack", self._clock.unix_ns(), rank.rank, rank.step, fields)
            ready.append((rank.attempt, event))
        return ready

    def _run(self) -> None:
        assert self._program is not None
        while True:
            rank = self._asked.get()
            if rank.process.exiting():
                continue  # another process may have its PID
            rank.process.is_traced = True
            try:
                stack = dumped([self._program, "dump", "--native", "--pid", str(rank.process.pid)])
            except (OSError, subprocess.SubprocessError) as error:
                if not self._refused:
                    self._refused = True
                    told = error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
                    _log.warning("no native frames of rank %d: %s", rank.rank, str(told).strip()[-300:])
            else:
                self._answers.put((rank, stack))
            finally:
                rank.process.is_traced = False


def dumped(command: Sequence[str]) -> str:
    """What the command writes.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be started, fails, or does not end within `DUMP_WITHIN_S`.
    """
    done = subprocess.run(
        command, capture_output=True, check=True, timeout=DUMP_WITHIN_S, stdin=subprocess.DEVNULL, text=True,
        errors="replace",
    )  # fmt: skip
    return done.stdout[:NATIVE_BYTES_MAX]


_log = logging.getLogger(__name__)
