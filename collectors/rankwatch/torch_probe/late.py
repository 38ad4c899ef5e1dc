"""Brings values from a device to the recorder, without ever waiting for the device.

The values of one step are stacked into one tensor and copied asynchronously into one row of a ring in pinned memory,
and an event is recorded after the copy. Later calls query the event. A row that has not arrived when its place is
needed again is dropped and counted.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch

from rankwatch.torch_probe.device import NO_SPANS, Device, Moment, StepSpans
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


Arrived = Callable[[int, int, dict[str, float], dict[str, int]], None]
"""Takes step, k, values and 64-bit integers by metric name."""


class _Row(NamedTuple):
    step: int
    k: int
    floats: tuple[str, ...]
    ints: tuple[str, ...]
    spans: StepSpans
    done: Moment

    @property
    def size(self) -> int:
        """How many values are lost if the row is dropped; the times of the step count as one."""
        return len(self.floats) + len(self.ints) + (self.spans is not NO_SPANS)


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
        self, step: int, k: int, floats: Mapping[str, Scalar], ints: Mapping[str, Scalar], spans: StepSpans = NO_SPANS
    ) -> None:
        """Start the copy of one step's values: 0-d tensors on any device, and what was marked of its device time."""
        words = [torch.as_tensor(value).reshape(()).to(torch.float64).view(torch.int64) for value in floats.values()]
        words += [torch.as_tensor(value).reshape(()).to(torch.int64) for value in ints.values()]
        if (not words and spans is NO_SPANS) or self._captured(len(words)):
            return
        slot = self._next % ROWS
        late = self._rows.pop(slot, None)
        if late is not None:
            self._dropped(late.size)
            self._free(late)
        kept = words[:WORDS_MAX]
        if kept:
            home = next((word.device for word in kept if word.device.type != "cpu"), kept[0].device)
            stacked = torch.stack([word.to(home, non_blocking=True) for word in kept])
            self._memory[slot, : len(kept)].copy_(stacked, non_blocking=True)
        if len(words) > WORDS_MAX:
            self._dropped(len(words) - WORDS_MAX)
        names = (*floats, *ints)[:WORDS_MAX]
        self._rows[slot] = _Row(step, k, names[: len(floats)], names[len(floats) :], spans, self._device.now())
        self._next += 1

    def collect(self) -> None:
        """Hand on the steps that have arrived, oldest first; queries the device, never waits for it."""
        if self._device.captures():
            return
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
        floats |= self._times(row)
        ints = dict(zip(row.ints, words[len(row.floats) :], strict=False))
        self._free(row)
        self._arrived(row.step, row.k, floats, ints)

    def _captured(self, count: int) -> bool:
        """Whether a graph is captured, into which a copy would go; so many values are then dropped."""
        if not self._device.captures():
            return False
        self._dropped(count)
        return True

    def _times(self, row: _Row) -> dict[str, float]:
        """What was marked of the device; empty, and counted, if some of it lies on a stream that is behind."""
        try:
            return row.spans.read(row.done)
        except RuntimeError:
            self._dropped(1)
            return {}

    def _free(self, row: _Row) -> None:
        for moment in (*row.spans.moments, row.done):
            self._device.free(moment)
