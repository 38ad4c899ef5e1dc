"""What the reader of devices tells the sampler through a pipe: msgpack messages, each after its length."""

from __future__ import annotations

import struct
from typing import Final

import msgspec

from rankwatch.wire import DeviceSample

LENGTH: Final = struct.Struct("<I")
NO_DEVICES_STATUS: Final = 3
"""Exit status of a reader that found no library, no driver or no device: there is no use in another one."""
BUSY_STATUS: Final = 4
"""Exit status of a reader that found another one of this job alive: that one hangs in the driver."""


class DeviceIdentity(msgspec.Struct, array_like=True, frozen=True):
    """One device as it was found; texts are empty where the driver did not tell."""

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
    """Indices of devices that do not answer any more, told once."""


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
