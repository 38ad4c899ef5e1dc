"""Finds and ends the processes of one demo by a name in their environment or command line.

The ranks' agents have their own sessions and outlive the ranks intentionally, so the process tree does not show them.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def working_for(name: str, module: str = "") -> list[int]:
    """Ids, ascending, of other processes that have `name` in environment or command, and `module` in the command."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            carried = command + (entry / "environ").read_bytes()
        except OSError:
            # It has ended, or belongs to another user.
            continue
        if name.encode() in carried and module.encode() in command:
            found.append(int(entry.name))
    return sorted(found)


def await_none(name: str, limit_s: float, module: str = "") -> bool:
    """Wait until no such process runs; False if one still does after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while working_for(name, module):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def end_all(name: str, grace_s: float = 2.0) -> None:
    """End all processes with this name: with SIGTERM, and after `grace_s` with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in working_for(name):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if await_none(name, grace_s):
            return
