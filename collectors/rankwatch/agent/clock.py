"""The agent's clocks: wall time for timestamps, monotonic time for durations."""

from __future__ import annotations

import time
from typing import Protocol


class AgentClock(Protocol):
    """The source of time for the agent; tests pass their own."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for stamps only."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never decrease, by the clock that the ranks of this host use in their progress blocks."""
        ...


class HostClock:
    """The clock of this host."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for stamps only."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC, which all processes of one host share."""
        return time.monotonic()
