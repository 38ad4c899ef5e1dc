"""The devices of a job's hosts, and their counters as frames over time for the series. Pure.

Steps are of one attempt; a device goes on counting between attempts and while a job hangs. So its series go by time:
a frame has a slot of `SLOT_S` for its step and the devices' numbers for its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Bools, DeviceCounters, Floats, Frame, StepKind

SLOT_S: Final = 5
"""Length of a slot. Agents read counters once a second. A slot has the mean of `AVERAGED` ones: devices compute and
wait together, but are not read together. Of all others it has the newest value."""

AVERAGED: Final = ("_celsius", "_w", "_hz", "_ratio")
"""Ends of the names of such counters."""

CLOSE_AFTER_S: Final = 5
"""A slot is written so long after its end. What comes later is added to it."""

PAST_S: Final = 86_400
FUTURE_S: Final = 60
"""How far a sample's time may be from stream time. A host whose clock is further off has no device series."""

DEVICES_MIN: Final = 64
DEVICES_PER_RANK: Final = 8
"""Devices of a job: so many for each rank of it that is known, or the minimum. A job may train on one of a host's."""

INDEX_MAX: Final = 255
"""Largest index of a device on its host: four times what agents read."""

COUNTERS_MAX: Final = 48
"""Counters of a job's devices: half as many again as agents know."""

COUNTER_CHARS_MAX: Final = 64

_FIXED: Final = (
    "temperature_celsius",
    "power_w",
    "sm_clock_hz",
    "utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "throttle_reasons",
    "ecc_uncorrected",
)
"""Counters that a sample has by name; it names further ones itself."""


@dataclass(frozen=True, slots=True)
class DeviceNumber:
    """A device that a job's agents have reported."""

    number: int
    """Its place in the job's device series, from 0, in the order of appearance."""
    host: str
    index: int
    """On its host, in the driver's order."""
    uuid: str
    """Empty where the driver does not tell it."""


class DeviceBoard:
    """Numbers a job's devices and collects their counters. Memory: about 300 bytes for each device, and open slots."""

    def __init__(self, known: Iterable[DeviceNumber] = ()) -> None:
        self._devices = {_key(device.host, device.index, device.uuid): device for device in known}
        self._named: tuple[tuple[str, str], ...] = ()
        """Host and UUID, by number."""
        self._counters: set[str] = set()
        self._open: dict[int, dict[str, dict[int, tuple[float, int]]]] = {}
        """By slot and counter: by number of the device, the sum of values and how many they are."""
        self.counts: Counter[str] = Counter()
        """Samples and values that are not charted, by reason."""

    def take(self, batches: Sequence[wire.Batch], ranks: int, now_s: float) -> list[DeviceNumber]:
        """Take the samples of batches; returns the devices that are new.

        Args:
            batches: in the order in which they were sent.
            ranks: how many ranks of the job are known.
            now_s: stream time.
        """
        fresh = list[DeviceNumber]()
        for batch in batches:
            if not batch.devices:
                continue
            # An agent reads all devices of its host at one time.
            time_s = max(sample.time_unix_ns for sample in batch.devices) / 1e9
            if not now_s - PAST_S <= time_s <= now_s + FUTURE_S:
                self.counts["device_samples_misdated"] += len(batch.devices)
                continue
            slot = self._open.setdefault(int(time_s // SLOT_S), {})
            for sample in batch.devices:
                device = self._known(batch.host, sample, ranks, fresh)
                if device is None:
                    self.counts["device_samples_beyond_limit"] += 1
                else:
                    self._put(slot, device.number, sample)
        return fresh

    def due(self, now_s: float) -> Iterator[DeviceCounters]:
        """The slots that are over, oldest first."""
        for slot in sorted(self._open):
            if (slot + 1) * SLOT_S + CLOSE_AFTER_S > now_s:
                break
            if told := self._open.pop(slot):
                if len(self._named) < len(self._devices):
                    self._named = tuple((device.host, device.uuid) for device in self._devices.values())
                yield DeviceCounters(slot, now_s, self._named, *_arrays(told))

    def _known(
        self, host: str, sample: wire.DeviceSample, ranks: int, fresh: list[DeviceNumber]
    ) -> DeviceNumber | None:
        key = _key(host, sample.local_index, sample.device_uuid)
        device = self._devices.get(key)
        if device is None:
            full = len(self._devices) >= max(DEVICES_MIN, DEVICES_PER_RANK * ranks)
            if full or not 0 <= sample.local_index <= INDEX_MAX:
                return None
            device = DeviceNumber(len(self._devices), host, sample.local_index, sample.device_uuid)
            self._devices[key] = device
            fresh.append(device)
        return device

    def _put(self, slot: dict[str, dict[int, tuple[float, int]]], number: int, sample: wire.DeviceSample) -> None:
        for name, value in counters(sample):
            if name not in self._counters:
                if len(self._counters) >= COUNTERS_MAX or not 0 < len(name) <= COUNTER_CHARS_MAX:
                    self.counts["device_counters_beyond_limit"] += 1
                    continue
                self._counters.add(name)
            of_device = slot.setdefault(name, {})
            before = of_device.get(number, (0.0, 0)) if name.endswith(AVERAGED) else (0.0, 0)
            of_device[number] = (before[0] + value, before[1] + 1)

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "devices": [list(astuple(device)) for device in self._devices.values()],
            "counters": sorted(self._counters),
            "open": [
                [slot, {name: [list(told), [list(one) for one in told.values()]] for name, told in values.items()}]
                for slot, values in self._open.items()
            ],
            "counts": dict(self.counts),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DeviceBoard:
        """The board that gave this state."""
        board = cls(DeviceNumber(*device) for device in state["devices"])
        board._counters.update(state["counters"])
        for slot, values in state["open"]:
            board._open[slot] = {
                name: {number: (total, count) for number, (total, count) in zip(*told, strict=True)}
                for name, told in values.items()
            }
        board.counts.update(state["counts"])
        return board


def counters(sample: wire.DeviceSample) -> Iterator[tuple[str, float]]:
    """The counters of a sample that the device has: (name, value)."""
    for name in _FIXED:
        value = getattr(sample, name)
        if value is not None:
            yield name, float(value)
    yield from sample.extra.items()


def _key(host: str, index: int, uuid: str) -> str:
    """What a device is known by: a host's devices may be counted anew after one was lost."""
    return f"{host}/{uuid or index}"


def as_frame(counters: DeviceCounters) -> Frame:
    """Counters as the series keep them: a frame of the family "devices", of no attempt."""
    whole = (counters.time_s, counters.values, counters.present)
    return Frame("", "devices", counters.slot, StepKind.TRAIN, *whole)


def _arrays(told: Mapping[str, Mapping[int, tuple[float, int]]]) -> tuple[dict[str, Floats], dict[str, Bools]]:
    width = 1 + max(max(of_device) for of_device in told.values())
    values, present = dict[str, Floats](), dict[str, Bools]()
    for name, of_device in told.items():
        numbers = np.fromiter(of_device.keys(), np.intp, len(of_device))
        values[name], present[name] = np.zeros(width), np.zeros(width, dtype=bool)
        values[name][numbers] = [total / count for total, count in of_device.values()]
        present[name][numbers] = True
    return values, present
