"""Finds and ends every process that works for one demo, by the folder that stands in its environment.

The ranks' agents live in sessions of their own and outlive the ranks on purpose, so the process tree does not tell.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path


def working_in(folder: Path) -> list[int]:
    """Process ids, ascending, of those that were started with `RANKWATCH_DIR=folder` and still run."""
    mark = f"RANKWATCH_DIR={folder}\0".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            if mark in (entry / "environ").read_bytes() + b"\0":
                found.append(int(entry.name))
        except OSError:
            # Gone meanwhile, or another user's.
            continue
    return sorted(found)


def await_none(folder: Path, limit_s: float) -> bool:
    """Wait until no process works in `folder`; False when some still do after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while working_in(folder):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def end_all(folder: Path, grace_s: float = 2.0) -> None:
    """End whatever works in `folder`: asked first, killed after `grace_s`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in working_in(folder):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if await_none(folder, grace_s):
            return
