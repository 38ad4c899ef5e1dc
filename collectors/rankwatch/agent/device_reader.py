"""The reader: a process that calls the driver once a second, and writes what it learns to its standard output.

It ends when nobody reads that any more. A call that hangs in the driver hangs this process alone, and not even its end,
as far as the driver lets it be killed. With `survey` as its only argument it says once, as JSON, what the devices of
this host tell and what not, for `rankwatch doctor --gpu`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from rankwatch.agent.devices import BUSY_STATUS, NO_DEVICES_STATUS, DeviceError, Reading, encoded
from rankwatch.agent.nvml import NoDevicesError, open_nvml
from rankwatch.agent.processes import take_lock
from rankwatch.terminal import printable

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
    """The errors of GPUs that lines of the log report."""
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


class SurveyedDevice(msgspec.Struct, frozen=True):
    """One device."""

    index: int
    uuid: str
    name: str
    answers: bool
    refused: dict[str, str]
    """What the device does not report, with the driver's reason."""


class DeviceSurvey(msgspec.Struct, frozen=True):
    """All devices of a host, as JSON for `rankwatch doctor`."""

    trouble: str = ""
    """Why there is no device; then all else is empty."""
    driver: str = ""
    devices: tuple[SurveyedDevice, ...] = ()
    events: bool = False
    """Whether errors are received through NVML."""
    kernel_log: str = ""
    """Why the kernel's log cannot be read; empty if it can."""


def survey() -> DeviceSurvey:
    """Query everything once."""
    try:
        nvml = open_nvml()
    except NoDevicesError as error:
        return DeviceSurvey(trouble=str(error))
    _, lost = nvml.sample(time.time_ns())
    devices = tuple(
        SurveyedDevice(
            one.index, one.uuid, nvml.name(one.index), one.index not in lost, nvml.refused.get(one.index, {})
        )
        for one in nvml.found
    )
    try:
        KernelLog().close()
        trouble = ""
    except OSError as error:
        trouble = f"{KERNEL_LOG}: {error.strerror}"
    return DeviceSurvey("", nvml.driver, devices, nvml.hears_errors, trouble)


SAMPLE_EVERY_S: Final = 1.0
SURVEY: Final = "survey"


def main(lock_path: str) -> int:
    """Read until the pipe is closed; returns the exit status.

    Args:
        lock_path: a file that one reader of a job holds locked: a second one would only hang beside the first.
    """
    if take_lock(Path(lock_path)) is None:
        return BUSY_STATUS
    threading.Thread(target=_end_when_unread, daemon=True).start()
    try:
        nvml = open_nvml()
    except NoDevicesError as error:
        _say(f"no GPU counters: {error}")
        return NO_DEVICES_STATUS
    log = None
    with contextlib.suppress(OSError):
        log = KernelLog()
    if log is None and not nvml.hears_errors:
        _say("errors of GPUs are not seen: neither the kernel's log nor events of NVML are open to this user")
    try:
        _write(Reading(found=nvml.found))
        next_s = time.monotonic()
        while True:
            now = time.time_ns()
            samples, lost = nvml.sample(now)
            logged = () if log is None else log.read(now)
            _write(Reading(samples=samples, lost=lost, errors=logged))
            next_s = max(next_s + SAMPLE_EVERY_S, time.monotonic())
            while (left_s := next_s - time.monotonic()) > 0:
                errors = nvml.wait(left_s)
                if errors:
                    # The kernel's log says more of the same errors, and the first one that is reported counts.
                    logged = () if log is None else log.read(time.time_ns())
                    _write(Reading(errors=(*logged, *errors)))
    except BrokenPipeError:
        return 0


def _end_when_unread() -> None:
    """End the process once the other end of the pipe is closed, whatever the main thread waits for."""
    pipe = select.poll()
    pipe.register(1, select.POLLERR)
    pipe.poll()
    os._exit(0)


def _write(reading: Reading) -> None:
    data = encoded(reading)
    while data:
        data = data[os.write(1, data) :]


def _say(line: str) -> None:
    sys.stderr.write(f"devices: {printable(line)}\n")


if __name__ == "__main__":
    if sys.argv[1] == SURVEY:
        sys.stdout.buffer.write(msgspec.json.encode(survey()))
    else:
        sys.exit(main(sys.argv[1]))
