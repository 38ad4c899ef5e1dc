"""Brings values from a device to the recorder, without ever waiting for the device.

The values of one step are stacked into one tensor and copied asynchronously into one row of a ring in pinned memory,
and an event is recorded after the copy. Later calls query the event. A row that has not arrived when its place is
needed again is dropped and counted.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, Protocol, cast

import torch

from rankwatch.torch_probe.gradients import Scalar

ROWS: Final = 8
"""Steps in flight. The host runs a step or two ahead of a device; eight also cover a slow evaluation in one step."""

WORDS_MAX: Final = 64
"""Values in one row, as many as the recorder has names for. 8 rows x 64 words x 8 bytes = 4 KiB of pinned memory."""

DRAIN_S: Final = 1.0
"""The longest wait for a device at the end of a process: many steps, and less than any launcher's grace."""
DRAIN_POLL_S: Final = 0.002

_WORD: Final = struct.Struct("<q")
_FLOAT: Final = struct.Struct("<d")


class Moment(Protocol):
    """A point in the work of a device, such as a torch.cuda.Event."""

    def query(self) -> bool:
        """Whether the device has passed it. Returns at once."""
        ...

    def elapsed_time(self, end: Moment) -> float:
        """Milliseconds of device time to a later moment; the device must have passed both."""
        ...


class Device(Protocol):
    """The operations of an accelerator that the probe needs; tests have a fake one."""

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """Host memory of int64 words that the device can write without the host waiting."""
        ...

    def now(self) -> Moment:
        """Record a moment behind all work given to the current stream so far."""
        ...


class CudaDevice:
    """The current CUDA (or ROCm) device."""

    def pinned(self, rows: int, words: int) -> torch.Tensor:
        """Host memory of int64 words that the device can write without the host waiting."""
        return torch.empty((rows, words), dtype=torch.int64, pin_memory=True)

    def now(self) -> Moment:
        """Record a moment behind all work given to the current stream so far."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return cast("Moment", event)


class Span(NamedTuple):
    """A period of device time whose length is known later."""

    name: str
    begin: Moment
    end: Moment


Arrived = Callable[[int, int, dict[str, float], dict[str, int]], None]
"""Takes step, k, values and 64-bit integers by metric name."""


class _Row(NamedTuple):
    step: int
    k: int
    floats: tuple[str, ...]
    ints: tuple[str, ...]
    spans: tuple[Span, ...]
    done: Moment


class LateValues:
    """The ring in pinned memory, with the newest `ROWS` steps that carried device values."""

    def __init__(self, device: Device, arrived: Arrived, dropped: Callable[[int], None]) -> None:
        """Reserve the ring.

        Args:
            device: the device of the values.
            arrived: called for each step whose values arrived, in the order of steps.
            dropped: called with the number of dropped values.
        """
        self._device = device
        self._arrived = arrived
        self._dropped = dropped
        self._memory = device.pinned(ROWS, WORDS_MAX)
        self._rows: dict[int, _Row] = {}
        self._next = 0

    @torch.no_grad()
    def send(
        self,
        step: int,
        k: int,
        floats: Mapping[str, Scalar],
        ints: Mapping[str, Scalar],
        spans: tuple[Span, ...] = (),
    ) -> None:
        """Start the copy of one step's values: 0-d tensors on any device, and periods of device time."""
        words = [torch.as_tensor(value).reshape(()).to(torch.float64).view(torch.int64) for value in floats.values()]
        words += [torch.as_tensor(value).reshape(()).to(torch.int64) for value in ints.values()]
        if not words and not spans:
            return
        place = self._next % ROWS
        late = self._rows.pop(place, None)
        if late is not None:
            self._dropped(len(late.floats) + len(late.ints) + len(late.spans))
        kept = words[:WORDS_MAX]
        if kept:
            home = next((word.device for word in kept if word.device.type != "cpu"), kept[0].device)
            stacked = torch.stack([word.to(home, non_blocking=True) for word in kept])
            self._memory[place, : len(kept)].copy_(stacked, non_blocking=True)
        if len(words) > WORDS_MAX:
            self._dropped(len(words) - WORDS_MAX)
        names = (*floats, *ints)[:WORDS_MAX]
        self._rows[place] = _Row(step, k, names[: len(floats)], names[len(floats) :], spans, self._device.now())
        self._next += 1

    def collect(self) -> None:
        """Hand on the steps that have arrived, oldest first; queries the device, never waits for it."""
        for number in range(self._next - ROWS, self._next):
            row = self._rows.get(number % ROWS)
            if row is None:
                continue
            if not row.done.query():
                return  # a stream works in order, so later rows have not arrived either
            del self._rows[number % ROWS]
            self._hand_on(row, self._memory[number % ROWS].tolist())

    def drain(self) -> None:
        """Hand on all that arrives within `DRAIN_S`; for the end of a process, whose device may be broken."""
        until_s = time.monotonic() + DRAIN_S
        self.collect()
        while self._rows and time.monotonic() < until_s:
            time.sleep(DRAIN_POLL_S)
            self.collect()

    def _hand_on(self, row: _Row, words: list[int]) -> None:
        bits = (_FLOAT.unpack(_WORD.pack(word))[0] for word in words)
        floats = dict(zip(row.floats, bits, strict=False))
        for span in row.spans:
            floats[span.name] = floats.get(span.name, 0.0) + span.begin.elapsed_time(span.end) / 1e3
        ints = dict(zip(row.ints, words[len(row.floats) :], strict=False))
        self._arrived(row.step, row.k, floats, ints)
