"""The clocks of a simulated accelerator's host."""

from __future__ import annotations

import time
from typing import Protocol


class SimulatedClock(Protocol):
    """When a host gives its device work, and how it waits for it."""

    def now_s(self) -> float:
        """Seconds on a clock that all ranks share."""
        ...

    def wait_until(self, at_s: float) -> None:
        """Return when the clock has reached this time."""
        ...

    def work(self, seconds: float) -> None:
        """The host is busy for so long."""
        ...


class MachineClock:
    """The machine's monotonic clock. A host takes the time that it really takes."""

    def now_s(self) -> float:
        """See `SimulatedClock.now_s`."""
        return time.monotonic()

    def wait_until(self, at_s: float) -> None:
        """See `SimulatedClock.wait_until`."""
        time.sleep(max(at_s - time.monotonic(), 0.0))

    def work(self, seconds: float) -> None:
        """See `SimulatedClock.work`."""
        time.sleep(seconds)


class VirtualClock:
    """A clock that only `work` and waits advance, so that times do not depend on the load of the machine."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now_s(self) -> float:
        """See `SimulatedClock.now_s`."""
        return self._now_s

    def wait_until(self, at_s: float) -> None:
        """See `SimulatedClock.wait_until`."""
        self._now_s = max(self._now_s, at_s)

    def work(self, seconds: float) -> None:
        """See `SimulatedClock.work`."""
        self._now_s += seconds
