"""Processes of this user as the kernel shows them: the fields of /proc, how a process ended, and the locks that this
one holds.

Reads /proc for one process of this user: state, CPU time, start time, exit status, caught signals.

Finds out that a rank's process ended, and how, without being its parent.

A pidfd becomes readable when the process is dead. Its exit status comes from the first of these that has it:
/proc/PID/stat while the process is a zombie, the pidfd (`PIDFD_GET_INFO`, Linux 6.15, once the parent has waited for
it), and the note of the rank's own excepthook. If none has it, the status is reported as unknown, never guessed.

One agent for each job and host: a lock that supervisor and worker hold together.

It is an open-file-description lock. It conflicts with the POSIX lock by which the SDK looks for an agent, but belongs
to the open file: it lasts as long as either of the two processes lives, and no third one can take it in between.

The agent's share of the processors: it yields to training.
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

TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")

_STATE = 0
_FLAGS = 6
_UTIME = 11
_STIME = 12
_STARTTIME = 19
_EXIT_CODE = 49
"""Index in /proc/PID/stat, counted from the field after the name (field 3 in proc(5))."""
_PF_EXITING = 0x4


@dataclass(frozen=True, slots=True)
class ProcessStat:
    """One reading of /proc/PID/stat."""

    state: str
    """R, S, D, T, t, Z, X, I."""
    cpu_ticks: int
    """User and system time, in clock ticks (`TICKS_PER_S`)."""
    exiting: bool
    """The process is exiting. It may have dropped its locks, and its memory may still take time to free."""
    start_ticks: int
    """Start time since boot, in clock ticks: with the PID it identifies a process uniquely."""
    wait_status: int
    """Meaningful in state Z only: the status that the parent would get from wait()."""


def read_stat(pid: int, proc: Path = Path("/proc")) -> ProcessStat | None:
    """Read a process's stat; None when there is no such process or it may not be read."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain spaces and parentheses.
    fields = text[text.rfind(")") + 1 :].split()
    return ProcessStat(
        state=fields[_STATE],
        cpu_ticks=int(fields[_UTIME]) + int(fields[_STIME]),
        exiting=bool(int(fields[_FLAGS]) & _PF_EXITING),
        start_ticks=int(fields[_STARTTIME]),
        wait_status=int(fields[_EXIT_CODE]),
    )


def catches(pid: int, signal: int, proc: Path = Path("/proc")) -> bool:
    """True if the process has a handler for this signal; without one the signal would end it."""
    try:
        text = (proc / str(pid) / "status").read_text(errors="replace")
    except OSError:
        return False
    for line in text.splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (signal - 1) & 1)
    return False


def wait_channel(pid: int, proc: Path = Path("/proc")) -> str:
    """Name of the kernel function in which the process sleeps; "" if it runs or the kernel hides it."""
    try:
        name = (proc / str(pid) / "wchan").read_text(errors="replace").strip()
    except OSError:
        return ""
    return "" if name == "0" else name


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


# struct flock; the kernel demands that l_pid, the last field, is 0.
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


def take_lock(path: Path) -> int | None:
    """Take the agent's lock; returns the descriptor, which the worker inherits, or None if another agent has the lock.

    Raises:
        OSError: the file cannot be created.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)
    except (BlockingIOError, PermissionError):
        os.close(descriptor)
        return None
    return descriptor


NICENESS: Final = 10
THREADS: Final = Path("/proc/self/task")


def lower_priority() -> None:
    """Give every thread of this process niceness 10, and so every thread and process that they start from now on."""
    for thread in THREADS.iterdir():
        number = int(thread.name)
        try:
            os.setpriority(os.PRIO_PROCESS, number, max(NICENESS, os.getpriority(os.PRIO_PROCESS, number)))
        except ProcessLookupError:
            continue  # the thread has ended


def use_all_cores() -> None:
    """Leave the cores of the rank that started the agent."""
    try:
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
    except OSError:
        return  # a cpuset that allows none of these cores: the affinity stays as it was
