"""Reads /proc for one process of this user: state, CPU time, start time, exit status, caught signals."""

from __future__ import annotations

import os
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
