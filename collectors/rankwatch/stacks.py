"""Lets the agent ask this rank for its stacks: a signal makes faulthandler write them into a file beside the ring.

The handler is C code that needs no interpreter lock, so it answers while the rank is blocked in a collective or loops
in Python.
"""

from __future__ import annotations

import faulthandler
import signal
from typing import Final

STACK_SIGNAL: Final = signal.SIGRTMIN + 7
"""Away from the real-time signals that runtimes use: threads take the first, debuggers and profilers the next few."""


class StackFile:
    """Where the stacks of all threads are written whenever the signal comes."""

    def __init__(self, path: str, number: int) -> None:
        """Take the signal.

        Raises:
            OSError: the file cannot be made.
            ValueError: the number is no signal, or something else handles it.
        """
        if signal.getsignal(number) is not signal.SIG_DFL:
            raise ValueError(f"signal {number} has a handler already")
        self.number = number
        self._file = open(path, "w")  # noqa: SIM115 - the handler writes to it as long as the process lives
        faulthandler.register(number, file=self._file, all_threads=True, chain=False)

    def close(self) -> None:
        """Give the signal back."""
        faulthandler.unregister(self.number)
        self._file.close()
