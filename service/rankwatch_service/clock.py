"""The service's clocks: the only place that reads the machine's time."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall clock for timestamps, monotonic clock for durations, and waiting. Tests pass a clock that they control."""

    def unix_ns(self) -> int:
        """Nanoseconds since the Unix epoch; may jump when the machine's clock is set."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary origin; never decreases."""
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
