"""The reader: a process that calls the driver once a second, and writes what it learns to its standard output.

It ends when nobody reads that any more. A call that hangs in the driver hangs this process alone, and not even its end,
as far as the driver lets it be killed.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Final

from rankwatch.agent.devices.kernel_log import KernelLog
from rankwatch.agent.devices.nvml import NoDevicesError, open_nvml
from rankwatch.agent.devices.readings import BUSY_STATUS, NO_DEVICES_STATUS, Reading, encoded
from rankwatch.agent.lock import take_lock

SAMPLE_EVERY_S: Final = 1.0


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
                    # The kernel's log says more of the same errors, and the first one that is told counts.
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
    sys.stderr.write(f"devices: {line}\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
