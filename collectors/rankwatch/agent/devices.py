"""The devices of a host: their counters and errors, read by a process of its own that may hang in the driver.

That process is `device_reader`, the only part that calls the driver; the rest runs in the worker.

What the device reader sends the sampler through a pipe: msgpack messages, each after its length.

Tells when the hardware itself slows a device down, from its newest counters. Pure.

A device that is too hot, or whose power supply asks for it, lowers its clocks by itself. For seconds that is usual
under load; through a whole minute, or in six of ten minutes (as gpud warns), it is not. The power cap that an operator
sets is normal operation and does not count.

Starts and supervises the device reader, and keeps its reports until the worker takes them.

A driver that has lost a device can block a call for minutes, in a state in which the process cannot even be killed. So
the reader is a process of its own, its silence is an event, and as long as one hangs no other is started.
"""

from __future__ import annotations

import logging
import os
import select
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec

from rankwatch import children, wire
from rankwatch.agent.clock import AgentClock
from rankwatch.wire import DeviceSample

LENGTH: Final = struct.Struct("<I")
NO_DEVICES_STATUS: Final = 3
"""Exit status of a reader that found no library, no driver or no device: there is no use in another one."""
BUSY_STATUS: Final = 4
"""Exit status of a reader that found another one of this job alive: that one hangs in the driver."""


class DeviceIdentity(msgspec.Struct, array_like=True, frozen=True):
    """One device as it was found; texts are empty where the driver does not report them."""

    index: int
    """In the driver's order, by PCI bus id; never an ordinal of CUDA."""
    uuid: str = ""
    pci_bus_id: str = ""
    """Lower case, with a domain of four digits: 0000:4e:00."""
    serial: str = ""


class DeviceError(msgspec.Struct, array_like=True, frozen=True):
    """An error that the driver reported of one device: by number (Xid), by another event, or by words alone."""

    time_unix_ns: int
    pci_bus_id: str
    xid: int | None = None
    text: str = ""
    sxid: int | None = None
    """The number of an error of an NVSwitch, which is no device of a rank."""
    event: str = ""
    """An event of NVML that has no number, such as "dram_retirement_failure"."""


class Reading(msgspec.Struct, array_like=True, frozen=True):
    """One message of the reader."""

    found: tuple[DeviceIdentity, ...] | None = None
    """All devices, in the first message of a reader."""
    samples: tuple[DeviceSample, ...] = ()
    errors: tuple[DeviceError, ...] = ()
    lost: tuple[int, ...] = ()
    """Indices of devices that no longer answer, reported once."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Reading)


def encoded(reading: Reading) -> bytes:
    """The message with its length before it."""
    body = _ENCODER.encode(reading)
    return LENGTH.pack(len(body)) + body


class Readings:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = b""

    def feed(self, data: bytes) -> list[Reading]:
        """The messages that are complete now.

        Raises:
            msgspec.DecodeError: something else than a reader writes there.
        """
        self._bytes += data
        found = []
        while len(self._bytes) >= LENGTH.size:
            end = LENGTH.size + LENGTH.unpack_from(self._bytes)[0]
            if len(self._bytes) < end:
                break
            found.append(_DECODER.decode(self._bytes[LENGTH.size : end]))
            self._bytes = self._bytes[end:]
        return found


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
    """How many of the last ten minutes it was throttled; 0: it is over."""
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
        """Add the clock event reasons of a sample.

        Returns:
            Something once a minute while the device is throttled, and once when it is over.
        """
        minute = int(now_s // MINUTE_S)
        device = self._devices.setdefault(index, _Device(minute))
        reported = self._finish(device, minute) if minute > device.minute else None
        bits = (reasons or 0) & _BITS
        device.seen += 1
        device.hit += bits != 0
        device.bits |= bits
        return reported

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


READER: Final = tuple(children.python_module("rankwatch.agent.device_reader"))
SILENT_S: Final = 3.0
"""Silence of a reader that reads once a second, after which its driver does not answer."""
OPEN_WITHIN_S: Final = 60.0
"""Time until the first reading: a driver that keeps no state between its users initializes each device anew."""
RESTART_AFTER_S: Final = 10.0
END_WITHIN_S: Final = 1.0
EVENTS_MAX: Final = 256
"""Events that wait to be taken, as the worker does once a second. Further ones are dropped, which the log says."""
REPEATED_S: Final = 5.0
"""Within it the same error of the same device counts once: NVML and the kernel's log both report it, and some errors
come in storms."""

_log = logging.getLogger(__name__)


class DeviceSampler(threading.Thread):
    """Has the newest counters of this host's devices, and events: their errors, their losses, a silent driver.

    Args:
        lock_path: the file that a living reader of this job holds locked.
        clock: for deadlines and the time of events.
        reader: command line of the reader, to which the path is appended.
    """

    def __init__(self, lock_path: str | Path, clock: AgentClock, reader: Sequence[str] = READER) -> None:
        super().__init__(name="devices", daemon=True)
        self._command = [*reader, str(lock_path)]
        self._clock = clock
        self._closed = threading.Event()
        self._woken, self._wake = os.pipe()
        self._samples: tuple[wire.DeviceSample, ...] = ()
        self._events: list[wire.Event] = []
        self._found: dict[int, DeviceIdentity] = {}
        """By index, as the first reader found them: a device that is lost later is still known by its serial."""
        self._throttled = ThrottledDevices()
        self._missing: set[int] = set()
        self._reported_ns: dict[tuple[str, int | None, int | None, str], int] = {}
        """When each error was reported, by device, Xid, SXid and event."""
        self._silent_since_s: float | None = None
        self._received_s = 0.0

    def take(self) -> tuple[wire.DeviceSample, ...]:
        """The newest counters, once; empty if none were read since the last call."""
        samples, self._samples = self._samples, ()
        return samples

    def take_events(self) -> list[wire.Event]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """End the reader. One that hangs in the driver ends by itself as soon as the driver answers."""
        if self._closed.is_set():
            return
        self._closed.set()
        os.write(self._wake, b".")
        if self.is_alive():
            self.join(2 * END_WITHIN_S)
        if not self.is_alive():
            os.close(self._woken)
            os.close(self._wake)

    def run(self) -> None:
        """Watch readers until closed; ends at once on a host without devices. Not for callers."""
        self._received_s = self._clock.monotonic_s()
        status = self._watch()
        while not self._closed.is_set() and status != NO_DEVICES_STATUS:
            _log.info("the device reader exited with status %s", status)
            if status == BUSY_STATUS:
                self._look_for_silence(self._received_s, SILENT_S)
            if not self._closed.wait(RESTART_AFTER_S):
                status = self._watch()

    def _watch(self) -> int | None:
        """Start a reader and follow it to its end; returns its exit status, None if it does not end."""
        try:
            # Its standard error is the agent's log.
            reader = children.start(self._command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        except OSError as error:
            _log.warning("no GPU counters: %s", error)
            return NO_DEVICES_STATUS
        assert reader.stdout is not None
        with reader.stdout as pipe:
            self._follow(pipe)
        return _ended(reader, ask=self._closed.is_set())

    def _follow(self, pipe: IO[bytes]) -> None:
        """Receive what the reader writes until it or the sampler ends."""
        readings, since_s, timeout_s = Readings(), self._clock.monotonic_s(), OPEN_WITHIN_S
        readable = select.poll()  # not select(), which knows no descriptor above 1,023
        readable.register(pipe, select.POLLIN)
        readable.register(self._woken, select.POLLIN)
        while not self._closed.is_set():
            if pipe.fileno() in dict(readable.poll(SILENT_S / 3 * 1e3)):
                data = os.read(pipe.fileno(), 1 << 16)
                if not data:
                    return
                try:
                    for reading in readings.feed(data):
                        self._learn(reading)
                except msgspec.DecodeError as error:
                    _log.warning("the reader of devices wrote something else: %s", error)
                    return
                self._hear()
                since_s, timeout_s = self._received_s, SILENT_S
            self._look_for_silence(since_s, timeout_s)

    # ---- what it tells -----------------------------------------------------------------------------------------------

    def _learn(self, reading: Reading) -> None:
        if reading.found is not None:
            self._compare({device.index: device for device in reading.found})
        for index in reading.lost:
            self._lose(self._found.get(index, DeviceIdentity(index)), "the driver does not reach it any more")
        for error in reading.errors:
            self._report_error(error)
        if reading.samples:
            self._samples = reading.samples
        for sample in reading.samples:
            throttling = self._throttled.see(sample.local_index, sample.throttle_reasons, self._clock.monotonic_s())
            if throttling is not None:
                now = {"temperature_celsius": sample.temperature_celsius, "sm_clock_hz": sample.sm_clock_hz}
                device = self._found.get(sample.local_index, DeviceIdentity(sample.local_index))
                self._report("device_throttled", _named(device) | throttling._asdict() | now)

    def _compare(self, found: dict[int, DeviceIdentity]) -> None:
        """Remember the first inventory; a device of it that is not found any more is lost."""
        if not self._found:
            self._found = found
            return
        here = {device.uuid for device in found.values()}
        for device in self._found.values():
            if device.uuid and device.uuid not in here and device.index not in self._missing:
                self._lose(device, "the driver does not list it any more")

    def _lose(self, device: DeviceIdentity, reason: str) -> None:
        self._missing.add(device.index)
        self._report("device_lost", {**_named(device), "reason": reason})

    def _report_error(self, error: DeviceError) -> None:
        here = {device.pci_bus_id: device for device in self._found.values()}
        if error.sxid is None and error.pci_bus_id not in here and "" not in here:
            return  # the kernel's log is of the whole host: a device that this container does not have
        device = here.get(error.pci_bus_id, DeviceIdentity(-1, pci_bus_id=error.pci_bus_id))
        key = error.pci_bus_id, error.xid, error.sxid, error.event
        last_ns = self._reported_ns.get(key, 0)
        self._reported_ns[key] = error.time_unix_ns
        if error.time_unix_ns - last_ns < REPEATED_S * 1e9:
            return
        if error.sxid is not None:
            fields = {"pci_bus_id": error.pci_bus_id, "sxid": error.sxid, "text": error.text}
            self._report("switch_error", fields, error.time_unix_ns)
        elif error.event:
            self._report("device_event", {**_named(device), "event": error.event}, error.time_unix_ns)
        elif error.xid is None:
            self._report("device_lost", {**_named(device), "reason": error.text}, error.time_unix_ns)
        else:
            fields = {**_named(device), "xid": error.xid, "text": error.text}
            self._report("device_error", fields, error.time_unix_ns)

    def _hear(self) -> None:
        self._received_s = self._clock.monotonic_s()
        if self._silent_since_s is not None:
            silent_s = self._received_s - self._silent_since_s
            self._silent_since_s = None
            self._report("driver_answers", {"silent_s": silent_s})

    def _look_for_silence(self, since_s: float, timeout_s: float) -> None:
        silent_s = self._clock.monotonic_s() - since_s
        if silent_s >= timeout_s and self._silent_since_s is None:
            self._silent_since_s = since_s
            self._report("driver_silent", {"silent_s": silent_s})

    def _report(self, kind: str, fields: dict[str, Any], unix_ns: int | None = None) -> None:
        if len(self._events) >= EVENTS_MAX:
            _log.warning("dropped an event of a device: %s %s", kind, fields)
            return
        self._events.append(wire.Event(kind, unix_ns or self._clock.unix_ns(), fields=fields))


def _named(device: DeviceIdentity) -> dict[str, Any]:
    return {"device_uuid": device.uuid, "index": device.index, "pci_bus_id": device.pci_bus_id, "serial": device.serial}


def _ended(reader: children.Child, *, ask: bool) -> int | None:
    """The status of a reader whose pipe is closed; it is asked to end, but never killed, which can freeze a device."""
    if ask:
        reader.terminate()
    try:
        return reader.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        _log.warning("the reader of devices hangs in the driver, and is left alone")
        return None
