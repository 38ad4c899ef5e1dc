"""Lets the agent request this rank's stacks: on a signal, faulthandler writes them to a file beside the ring.

The handler is C code that needs no interpreter lock, so it answers while the rank is blocked in a collective or loops
in Python.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import Final

STACK_SIGNAL: Final = signal.SIGRTMIN + 7
"""Away from the real-time signals in common use: threads use the first, debuggers and profilers the next few."""


class StackFile:
    """The file to which the stacks of all threads are written at each signal."""

    def __init__(self, path: str, number: int) -> None:
        """Install the handler.

        Raises:
            OSError: the file cannot be created.
            ValueError: the number is no signal, or the signal has a handler already.
        """
        if signal.getsignal(number) is not signal.SIG_DFL:
            raise ValueError(f"signal {number} has a handler already")
        self.number = number
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = open(descriptor, "w")  # noqa: SIM115 - the handler writes to it as long as the process lives
        faulthandler.register(number, file=self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """Remove the handler and close the file."""
        faulthandler.unregister(self.number)
        self._file.close()
