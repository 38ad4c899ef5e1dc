# ruff: noqa: N802
"""Stands in for the module `pynvml` of a host with eight devices; a test puts this folder on the agent's path.

Device 3 has no ECC counter, as consumer devices do not. Set NO_DRIVER before `nvmlInit` for a host without a driver.
"""

from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
NO_DRIVER = False
COUNT = 8


class NVMLError(Exception):
    pass


def nvmlInit():
    if NO_DRIVER:
        raise NVMLError("NVML Shared Library Not Found")


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return COUNT


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def nvmlDeviceGetTemperature(handle, sensor):
    assert sensor == NVML_TEMPERATURE_GPU
    return 40 + handle


def nvmlDeviceGetPowerUsage(handle):
    return 300_000 + handle


def nvmlDeviceGetClockInfo(handle, clock):
    assert clock == NVML_CLOCK_SM
    return 1980


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=97, memory=50)


def nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=80 * 2**30, used=2**30, free=79 * 2**30)


def nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 0x4


def nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    if handle == 3:
        raise NVMLError("Not Supported")
    return 0
