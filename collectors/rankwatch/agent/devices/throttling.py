"""Tells when the hardware itself slows a device down, from its newest counters. Pure.

A device that is too hot, or whose power supply asks for it, lowers its clocks by itself. For seconds that is usual
under load; through a whole minute, or in six of ten minutes (as gpud warns), it is not. The power cap that an operator
sets is normal operation and does not count.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final, NamedTuple

MINUTE_S: Final = 60.0
WINDOW: Final = 10
"""Minutes that are looked back on."""
QUIET: Final = 5
"""Minutes without it after which it is over."""
OFTEN: Final = 6
WHOLE: Final = 0.9
"""Share of a minute's samples that makes it a whole one."""
SAMPLES_MIN: Final = 6
"""Samples without which a minute is not judged a whole one."""
REASONS: Final = {0x08: "hardware slowdown", 0x40: "heat", 0x80: "power brake"}
"""Bits of NVML's clocks event reasons."""
_BITS: Final = sum(REASONS)


class Throttling(NamedTuple):
    """How a device has been throttled lately."""

    minutes: int
    """Of the last ten, those in which it was; 0: it is over."""
    reasons: tuple[str, ...]


@dataclass(slots=True)
class _Device:
    minute: int
    seen: int = 0
    hit: int = 0
    bits: int = 0
    past: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """The bits that occurred in each finished minute."""
    is_throttled: bool = False


class ThrottledDevices:
    """What was seen of each device, by its index."""

    def __init__(self) -> None:
        self._devices: dict[int, _Device] = {}

    def see(self, index: int, reasons: int | None, now_s: float) -> Throttling | None:
        """Take a sample's clocks event reasons.

        Returns:
            Something once a minute while the device is throttled, and once when it is over.
        """
        minute = int(now_s // MINUTE_S)
        device = self._devices.setdefault(index, _Device(minute))
        told = self._finish(device, minute) if minute > device.minute else None
        bits = (reasons or 0) & _BITS
        device.seen += 1
        device.hit += bits != 0
        device.bits |= bits
        return told

    def _finish(self, device: _Device, minute: int) -> Throttling | None:
        is_whole = device.seen >= SAMPLES_MIN and device.hit >= WHOLE * device.seen
        device.past.append(device.bits)
        device.past.extend([0] * min(minute - device.minute - 1, WINDOW))  # nothing was seen in these
        device.minute, device.seen, device.hit, device.bits = minute, 0, 0, 0
        was_throttled, past = device.is_throttled, list(device.past)
        minutes = sum(bits != 0 for bits in past)
        device.is_throttled = is_whole or minutes >= OFTEN or (was_throttled and any(past[-QUIET:]))
        if not device.is_throttled:
            return Throttling(0, ()) if was_throttled else None
        met = 0
        for bits in past:
            met |= bits
        return Throttling(minutes, tuple(name for bit, name in REASONS.items() if met & bit))
