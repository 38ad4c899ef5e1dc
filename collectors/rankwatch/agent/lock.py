"""One agent for each job and host: a lock that supervisor and worker hold together.

It is an open-file-description lock. It conflicts with the POSIX lock by which the SDK looks for an agent, but belongs
to the open file: it lasts as long as either of the two processes lives, and no third one can take it in between.
"""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

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
