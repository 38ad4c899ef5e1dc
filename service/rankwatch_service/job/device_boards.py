"""The devices of a job's hosts, and their counters as frames over time for the series. Pure.

Steps are of one attempt; a device goes on counting between attempts and while a job hangs. So its series go by time:
a frame has a slot of `SLOT_S` for its step and the devices' numbers for its ranks.

All devices of a job's hosts, by kind: a board for each, so that the series of one are not as wide as all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Final

import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import DeviceCounters, Floats, Frame, Ints, StepKind
from rankwatch_service.names import NAME_CHARS_MAX

SLOT_S: Final = 5
"""Length of a slot. Agents read counters once a second. A slot has the mean of `AVERAGED` ones: devices compute and
wait together, but are not read together. Of all others it has the newest value."""

AVERAGED: Final = ("_celsius", "_w", "_hz", "_ratio", "_per_s")
"""Ends of the names of such counters."""

STATED: Final = ("link_bits_per_s",)
"""Counters that end so and are none: a port had one speed or another, and never their mean."""

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

OPEN_CELLS_MAX: Final = 8 * 1024 * 1024
"""Values in a job's open slots, of 16 bytes each: four hours of 64 devices with 40 counters, 80 s of 16,384. Of more
than `OPEN_MIN` slots that exceed it, as after an outage, the samples are not charted."""

OPEN_MIN: Final = 4

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
    """Its index in the job's device series, from 0, in the order of appearance."""
    host: str
    index: int
    """On its host, in the driver's order."""
    uuid: str
    """Empty where the driver does not report it. Of a port its name, of a host empty."""
    kind: str = wire.GPU


Slot = dict[str, tuple[Floats, Ints]]
"""Sum and number of each device's values, by counter; arrays by the device's number."""

NONE: Final[tuple[Floats, Ints]] = (np.zeros(0), np.zeros(0, dtype=np.int64))


class DeviceBoard:
    """Numbers a job's devices of one kind and collects their counters.

    Memory: about 300 bytes for each device, and open slots.
    """

    def __init__(self, kind: str = wire.GPU, known: Iterable[DeviceNumber] = ()) -> None:
        self._kind = kind
        self._devices = {_key(device.host, device.index, device.uuid): device for device in known}
        self._named: tuple[tuple[str, str], ...] = ()
        """Host and UUID, by number."""
        self._counters: set[str] = set()
        self._open: dict[int, Slot] = {}
        self.counts: Counter[str] = Counter()
        """Samples and values that are not charted, by reason."""

    def add(self, batches: Sequence[wire.Batch], ranks: int, now_s: float) -> list[DeviceNumber]:
        """Add the samples of batches; return the devices that are new.

        Args:
            batches: in the order in which they were sent.
            ranks: how many ranks of the job are known.
            now_s: stream time.
        """
        fresh = list[DeviceNumber]()
        for batch in batches:
            samples = self._samples(batch)
            if not samples:
                continue
            # An agent reads all devices of its host at one time.
            time_s = max(sample.time_unix_ns for sample in samples) / 1e9
            if not now_s - PAST_S <= time_s <= now_s + FUTURE_S:
                self.counts["device_samples_misdated"] += len(samples)
                continue
            slot = self._slot(int(time_s // SLOT_S))
            for sample in samples:
                device = self._known(batch.host, sample, ranks, fresh)
                if device is None or slot is None:
                    self.counts["device_samples_beyond_limit"] += 1
                else:
                    self._put(slot, device.number, sample)
        return fresh

    def _samples(self, batch: wire.Batch) -> Sequence[wire.DeviceSample]:
        if self._kind == wire.GPU:
            return batch.devices
        mine = (one for one in batch.host_devices if one.kind == self._kind)
        return [wire.DeviceSample(one.name, one.time_unix_ns, extra=one.counters) for one in mine]

    def due(self, now_s: float) -> Iterator[DeviceCounters]:
        """The slots that are over, oldest first."""
        for slot in sorted(self._open):
            if (slot + 1) * SLOT_S + CLOSE_AFTER_S > now_s:
                break
            if reported := self._open.pop(slot):
                if len(self._named) < len(self._devices):
                    self._named = tuple((device.host, device.uuid) for device in self._devices.values())
                read = {name: _fitted(sums, counts, len(self._named)) for name, (sums, counts) in reported.items()}
                values = {name: sums / np.maximum(counts, 1) for name, (sums, counts) in read.items()}
                present = {name: counts > 0 for name, (_, counts) in read.items()}
                yield DeviceCounters(slot, now_s, self._named, values, present, self._kind)

    def _slot(self, number: int) -> Slot | None:
        """The slot; opened, unless too much is open."""
        slot = self._open.get(number)
        if slot is None:
            cells = (len(self._open) + 1) * len(self._counters) * len(self._devices)
            if cells <= OPEN_CELLS_MAX or len(self._open) < OPEN_MIN:
                slot = self._open[number] = {}
        return slot

    def _known(
        self, host: str, sample: wire.DeviceSample, ranks: int, fresh: list[DeviceNumber]
    ) -> DeviceNumber | None:
        key = _key(host, sample.local_index, sample.device_uuid)
        device = self._devices.get(key)
        if device is None:
            full = len(self._devices) >= max(DEVICES_MIN, DEVICES_PER_RANK * ranks)
            if full or not 0 <= sample.local_index <= INDEX_MAX or len(sample.device_uuid) > NAME_CHARS_MAX:
                return None
            device = DeviceNumber(len(self._devices), host, sample.local_index, sample.device_uuid, self._kind)
            self._devices[key] = device
            fresh.append(device)
        return device

    def _put(self, slot: Slot, number: int, sample: wire.DeviceSample) -> None:
        for name, value in counters(sample):
            if name not in self._counters:
                if len(self._counters) >= COUNTERS_MAX or not 0 < len(name) <= COUNTER_CHARS_MAX:
                    self.counts["device_counters_beyond_limit"] += 1
                    continue
                self._counters.add(name)
            sums, counts = slot.get(name, NONE)
            if number >= len(sums):
                sums, counts = slot[name] = _fitted(sums, counts, max(len(self._devices), 2 * len(sums)))
            if name.endswith(AVERAGED) and name not in STATED:
                sums[number] += value
                counts[number] += 1
            else:
                sums[number], counts[number] = value, 1

    # ---- snapshot --------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types and arrays."""
        return {
            "devices": [list(astuple(device)) for device in self._devices.values()],
            "counters": sorted(self._counters),
            "open": [
                [number, {name: [sums.copy(), counts.copy()] for name, (sums, counts) in slot.items()}]
                for number, slot in self._open.items()
            ],
            "counts": dict(self.counts),
        }

    @classmethod
    def restored(cls, kind: str, state: Mapping[str, Any]) -> DeviceBoard:
        """The board that gave this state."""
        board = cls(kind, [DeviceNumber(*device) for device in state["devices"]])
        board._counters.update(state["counters"])
        for number, slot in state["open"]:
            board._open[number] = {name: (np.array(sums), np.array(counts)) for name, (sums, counts) in slot.items()}
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


def _fitted(sums: Floats, counts: Ints, size: int) -> tuple[Floats, Ints]:
    """The arrays with so many devices."""
    added = max(size - len(sums), 0)
    return np.pad(sums, (0, added))[:size], np.pad(counts, (0, added))[:size]


class DeviceBoards:
    """The boards of GPUs, network ports and hosts, as one."""

    def __init__(self, known: Iterable[DeviceNumber] = ()) -> None:
        devices = list(known)
        self._boards = {
            kind: DeviceBoard(kind, [one for one in devices if one.kind == kind]) for kind in wire.DEVICE_KINDS
        }

    @property
    def counts(self) -> Counter[str]:
        """Samples and values that are not charted, by reason."""
        return sum((board.counts for board in self._boards.values()), Counter())

    def add(self, batches: Sequence[wire.Batch], ranks: int, now_s: float) -> list[DeviceNumber]:
        """As `DeviceBoard.add`."""
        carrying = [batch for batch in batches if batch.devices or batch.host_devices]
        if not carrying:
            return []
        return [device for board in self._boards.values() for device in board.add(carrying, ranks, now_s)]

    def due(self, now_s: float) -> Iterator[DeviceCounters]:
        """As `DeviceBoard.due`, kind by kind."""
        for board in self._boards.values():
            yield from board.due(now_s)

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types and arrays."""
        return {kind: board.state() for kind, board in self._boards.items()}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> DeviceBoards:
        """The boards that gave this state."""
        boards = cls()
        for kind, kept in state.items():
            boards._boards[kind] = DeviceBoard.restored(kind, kept)
        return boards


def as_frame(counters: DeviceCounters) -> Frame:
    """Counters as the series keep them: a frame of the family "devices", of no attempt."""
    whole = (counters.time_s, counters.values, counters.present)
    return Frame("", "devices", counters.slot, StepKind.TRAIN, *whole)
