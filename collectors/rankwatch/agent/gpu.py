"""Device counters, read once a second from the source that this host has.

They are read in a separate thread: a driver that has lost a device can block a call for many seconds, and that must
delay neither orders nor exits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

from rankwatch.agent.clock import AgentClock
from rankwatch.wire import DeviceSample

SAMPLE_EVERY_S: Final = 1.0


class GpuCounters(Protocol):
    """A source of device counters. It may take some milliseconds, and it never raises."""

    def sample(self, unix_ns: int) -> tuple[DeviceSample, ...]:
        """Read all devices now; `unix_ns` is the time of the samples. Counters that fail are None."""
        ...

    def close(self) -> None:
        """Close the driver."""
        ...


class NoGpu:
    """A host without devices that can be read."""

    def sample(self, unix_ns: int) -> tuple[DeviceSample, ...]:  # noqa: ARG002 - the Protocol's
        """Nothing."""
        return ()

    def close(self) -> None:
        """Nothing."""


class GpuSampler(threading.Thread):
    """Reads the counters once a second and keeps the newest reading until it is taken.

    Args:
        open_counters: finds the source; called in the thread, since loading a driver may take long too.
        clock: for the samples' time.
    """

    def __init__(self, open_counters: Callable[[], GpuCounters], clock: AgentClock) -> None:
        super().__init__(name="gpu", daemon=True)
        self._open_counters = open_counters
        self._clock = clock
        self._closed = threading.Event()
        self._newest: tuple[DeviceSample, ...] = ()

    def take(self) -> tuple[DeviceSample, ...]:
        """The newest reading, once; empty if there was none since the last call."""
        newest, self._newest = self._newest, ()
        return newest

    def close(self) -> None:
        """Stop reading; a call that hangs in the driver ends with the process."""
        self._closed.set()

    def run(self) -> None:
        """Sample until closed; ends at once on a host without devices. Not for callers."""
        counters = self._open_counters()
        while not isinstance(counters, NoGpu) and not self._closed.wait(SAMPLE_EVERY_S):
            self._newest = counters.sample(self._clock.unix_ns())
        counters.close()
