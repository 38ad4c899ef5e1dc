"""The agent's share of the processors: it yields to training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

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
