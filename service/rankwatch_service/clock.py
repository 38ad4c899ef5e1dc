"""The service's clocks: the only place that asks the machine for the time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock for stamps, monotonic clock for durations, and waiting. Tests hand in one that they move."""

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may step when the machine's clock is set."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary origin; never goes back."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`."""
        ...


class SystemClock:
    """The machine's clocks."""

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait for `seconds`; a signal handler that raises ends the wait."""
        time.sleep(seconds)
