"""The interface between the probe and an accelerator, and CUDA's form of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import torch

from rankwatch.torch_probe.device_identity import describe_device

FREE_MAX: Final = 6144
"""Events kept to be recorded again: those of two steps in flight, with as many phases, parts of blocks and waits as are
measured (`SPANS_MAX` each). The driver makes one in microseconds and keeps some hundred bytes for it."""


class Moment(Protocol):
    """A point in the work of a device, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it. Returns at once."""
        ...

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds of device time to a later moment; the device must have passed both."""
        ...


class Device(Protocol):
    """The operations of an accelerator that the probe needs. None of them waits for the device."""

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        """The fields `device_type` and `device_uuid` of a rank's identity; see `describe_device`."""
        ...

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """Host memory of int64 words that the device can write without the host waiting."""
        ...

    def now(self) -> Moment:
        """Record a moment behind all work given to the current stream so far."""
        ...

    def stream(self) -> Any:
        """The stream to which this thread gives its work now."""
        ...

    def host_s(self) -> float:
        """Seconds on the clock of the host that gives the work."""
        ...

    def free(self, moment: Moment) -> None:
        """Return a moment that is needed no more, to be recorded again."""
        ...

    def captures(self) -> bool:
        """Whether work of the current stream is captured into a graph: then no moment may be recorded or queried."""
        ...


class CudaDevice:
    """A CUDA (or ROCm) device."""

    def __init__(self, home: torch.device) -> None:
        """Take the device that holds the parameters."""
        self._home = home
        self._free: list[torch.cuda.Event] = []

    def describe(self, known_uuid: str, failed: Callable[[Exception], None]) -> Mapping[str, str]:
        """See `Device.describe`."""
        return describe_device(self._home, known_uuid, os.environ, failed)

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """See `Device.pinned`."""
        return torch.empty((rows, words), dtype=torch.int64, pin_memory=True)

    def now(self) -> torch.cuda.Event:
        """See `Device.now`."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self.stream())
        return event

    def stream(self) -> torch.cuda.Stream:
        """See `Device.stream`."""
        return torch.cuda.current_stream(self._home)

    def host_s(self) -> float:
        """See `Device.host_s`."""
        return time.monotonic()

    def free(self, moment: Any) -> None:
        """See `Device.free`."""
        if len(self._free) < FREE_MAX:
            self._free.append(moment)

    def captures(self) -> bool:
        """See `Device.captures`."""
        with torch.cuda.device(self._home):  # scripts need not make it the current one
            return torch.cuda.is_current_stream_capturing()
