"""What the devices of this host tell and what not, as JSON: a process of its own for `rankwatch doctor --gpu`."""

from __future__ import annotations

import sys
import time

import msgspec

from rankwatch.agent.devices.kernel_log import KERNEL_LOG, KernelLog
from rankwatch.agent.devices.nvml import NoDevicesError, open_nvml


class SurveyedDevice(msgspec.Struct, frozen=True):
    """One device."""

    index: int
    uuid: str
    name: str
    answers: bool
    refused: dict[str, str]
    """What it does not tell, with the driver's reason."""


class DeviceSurvey(msgspec.Struct, frozen=True):
    """All devices of a host, as JSON for `rankwatch doctor`."""

    trouble: str = ""
    """Why there is no device; then all else is empty."""
    driver: str = ""
    devices: tuple[SurveyedDevice, ...] = ()
    events: bool = False
    """Whether errors are heard through NVML."""
    kernel_log: str = ""
    """Why the kernel's log cannot be read; empty if it can."""


def survey() -> DeviceSurvey:
    """Ask for everything once."""
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


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(survey()))
