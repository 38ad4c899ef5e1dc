"""Finds out that a rank's process ended, and how, without being its parent.

A pidfd becomes readable when the process is dead. Its exit status comes from the first of these that has it:
/proc/PID/stat while the process is a zombie, the pidfd (`PIDFD_GET_INFO`, Linux 6.15, once the parent has waited for
it), and the note of the rank's own excepthook. If none has it, the status is reported as unknown, never guessed.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankwatch.agent.procfs import read_stat

REAP_WAIT_S: Final = 0.5
"""How long to ask for the exit status of a dead process: between its death and its parent's wait() neither source may
have it. Half of the second within which an exit must be reported."""

# struct pidfd_info of linux/pidfd.h: mask, cgroup id, eleven process and user ids, exit status.
_INFO: Final = struct.Struct("<QQ11Ii")
_INFO_EXIT: Final = 1 << 3
_PIDFD_GET_INFO: Final = (3 << 30) | (_INFO.size << 16) | (0xFF << 8) | 11


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended: `code` or `signal`; both None if unknown."""

    code: int | None
    signal: int | None
    how: str
    """pidfd, zombie or unknown."""

    @classmethod
    def from_wait_status(cls, status: int, how: str) -> ProcessExit:
        """Read the status that wait() returns."""
        if os.WIFSIGNALED(status):
            return cls(None, os.WTERMSIG(status), how)
        return cls(os.WEXITSTATUS(status), None, how)


UNKNOWN_EXIT: Final = ProcessExit(None, None, "unknown")


class RankProcess:
    """One process, held by a pidfd, so that its PID cannot be reused unnoticed."""

    def __init__(self, pid: int, start_ticks: int, proc: Path = Path("/proc")) -> None:
        """Open a pidfd of a running process.

        Raises:
            ProcessLookupError: no process with this PID and start time exists (any more).
            OSError: the kernel has no pidfds, or this user may not open this one.
        """
        self.pid = pid
        self.start_ticks = start_ticks
        self.is_traced = False
        """A tool that the agent has started stops it for moments."""
        self._proc = proc
        self.fd = os.pidfd_open(pid)
        stat = read_stat(pid, proc)
        if stat is None or stat.start_ticks != start_ticks:
            os.close(self.fd)
            raise ProcessLookupError(pid)

    def send(self, number: int) -> bool:
        """Send a signal; False when the process is gone."""
        try:
            signal.pidfd_send_signal(self.fd, number)
        except ProcessLookupError:
            return False
        return True

    def exiting(self) -> bool:
        """Whether the process is exiting or gone."""
        stat = read_stat(self.pid, self._proc)
        return stat is None or stat.start_ticks != self.start_ticks or stat.exiting

    def exit_status(self) -> ProcessExit | None:
        """How the process ended; None while that is not known yet, or while it lives."""
        stat = read_stat(self.pid, self._proc)
        if stat is not None and stat.start_ticks == self.start_ticks and stat.state in "ZX":
            return ProcessExit.from_wait_status(stat.wait_status, "zombie")
        info = bytearray(_INFO.size)
        struct.pack_into("<Q", info, 0, _INFO_EXIT)
        try:
            fcntl.ioctl(self.fd, _PIDFD_GET_INFO, info)
        except OSError:
            return None  # an older kernel: only the zombie's stat has the status
        mask, *_, status = _INFO.unpack(info)
        return ProcessExit.from_wait_status(status, "pidfd") if mask & _INFO_EXIT else None

    def close(self) -> None:
        """Close the pidfd."""
        os.close(self.fd)


class ExitWatch:
    """Waits for many processes at once and returns them in the order in which they ended."""

    def __init__(self) -> None:
        # The kernel appends to epoll's ready list as processes die, and poll() hands it out in that order: the
        # order of the first movers among ranks of one host.
        self._epoll = select.epoll()

    def add(self, process: RankProcess) -> None:
        """Watch one more process."""
        self._epoll.register(process.fd, select.EPOLLIN)

    def add_wakeup(self, fd: int) -> None:
        """Also end a wait when this descriptor becomes readable."""
        self._epoll.register(fd, select.EPOLLIN)

    def forget(self, process: RankProcess) -> None:
        """Stop watching this process; call it before the process is closed."""
        self._epoll.unregister(process.fd)

    def wait(self, seconds: float) -> Iterator[int]:
        """Descriptors that become readable within this time, earliest first."""
        for fd, _ in self._epoll.poll(max(0.0, seconds)):
            yield fd

    def close(self) -> None:
        """Stop watching."""
        self._epoll.close()
