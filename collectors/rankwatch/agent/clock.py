"""The agent's clock: the wall for stamps, the monotonic one for durations."""

from __future__ import annotations

import time
from typing import Protocol


class AgentClock(Protocol):
    """Where the agent takes time from; tests hand in their own."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for stamps only."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never go back; the same clock that the ranks of this host use in their progress blocks."""
        ...


class HostClock:
    """The clock of this host."""

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, for stamps only."""
        return time.time_ns()

    def monotonic_s(self) -> float:
        """Seconds of CLOCK_MONOTONIC, which all processes of one host share."""
        return time.monotonic()
