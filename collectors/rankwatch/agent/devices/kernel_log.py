"""Errors of GPUs in the kernel's log, where this user may read it.

The driver writes each Xid there with its details, also those from before NVML's events were registered, and a GPU that
fell off the bus also where no Xid says so. Errors of the NVSwitches between GPUs (SXids) stand nowhere else.
"""

from __future__ import annotations

import os
import re
from typing import Final

from rankwatch.agent.devices.readings import DeviceError

KERNEL_LOG: Final = "/dev/kmsg"
TEXT_CHARS_MAX: Final = 500
LINES_AT_ONCE: Final = 1_000
"""Read at one look, so that a flood in the log does not hold up the counters; the rest follows at the next."""

_XID: Final = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:]+)(?:\.\d)?\): (\d+),? ?(.*)")
_SXID: Final = re.compile(r"nvidia-nvswitch\d+: SXid \(PCI:([0-9a-fA-F:]+)(?:\.\d)?\): (\d+),? ?(.*)")
_OFF_THE_BUS: Final = re.compile(
    r"NVRM: .*GPU (?:at )?(?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}).*fallen off the bus"
)


class KernelLog:
    """The kernel's log from now on.

    Args:
        path: the device file, in which each read is one record.

    Raises:
        OSError: this user may not read it, or there is none.
    """

    def __init__(self, path: str = KERNEL_LOG) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        os.lseek(self._file, 0, os.SEEK_END)

    def read(self, unix_ns: int) -> tuple[DeviceError, ...]:
        """Errors that were logged since the last call.

        Args:
            unix_ns: now; records have only the time since the machine started, less its sleeps.
        """
        found = list[DeviceError]()
        for _ in range(LINES_AT_ONCE):
            try:
                record = os.read(self._file, 8192)
            except BlockingIOError:
                break
            except BrokenPipeError:
                continue  # records were overwritten before they were read: the next read is of the oldest there is
            except OSError:
                break
            if not record:
                break
            found += errors_in(record.decode(errors="replace"), unix_ns)
        return tuple(found)

    def close(self) -> None:
        """Close the log."""
        os.close(self._file)


def errors_in(text: str, unix_ns: int) -> list[DeviceError]:
    """The errors of GPUs that lines of the log tell."""
    found = []
    for line in text.splitlines():
        if xid := _XID.search(line):
            bus, number, words = xid.groups()
            found.append(DeviceError(unix_ns, _bus_id(bus), int(number), words.strip()[:TEXT_CHARS_MAX]))
        elif sxid := _SXID.search(line):
            bus, number, words = sxid.groups()
            text = words.strip()[:TEXT_CHARS_MAX]
            found.append(DeviceError(unix_ns, _bus_id(bus), text=text, sxid=int(number)))
        elif lost := _OFF_THE_BUS.search(line):
            found.append(DeviceError(unix_ns, _bus_id(lost[1]), None, line.partition("NVRM: ")[2][:TEXT_CHARS_MAX]))
    return found


def _bus_id(text: str) -> str:
    domain, bus, device = text.lower().split(":")
    return f"{domain[-4:]}:{bus}:{device}"
