# ruff: noqa: N802, N816
"""Stands in for the module `pynvml` of a host with eight devices; a test puts this folder on the agent's path.

Device 3 has no ECC counter, as consumer devices do not. The file that FAKE_NVML names, read anew at each call, says
what is wrong, as JSON: `no_driver`, `hangs` (each call blocks until it is over), `lost` (indices), `missing` (functions
that this version lacks), `failing_fields` (numbers), `xids` ([index, number], each delivered once), `celsius` (by
index).
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8
COUNT = 8
FIELDS = {82: 60, 186: 310_000, 190: 700_000, 74: 5_000_000_000, 144: 0, 230: 0}
"""Values by number; any other field is not supported."""

_delivered: list[list[int]] = []


class NVMLError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def wrong(what, default=None):
    path = os.environ.get("FAKE_NVML")
    return json.loads(Path(path).read_text()).get(what, default) if path else default


def _call(handle=None):
    while wrong("hangs"):
        time.sleep(0.01)
    if handle is not None and handle in wrong("lost", []):
        raise NVMLError(15)


def __getattr__(name):
    function = globals().get(f"_{name}")
    if function is None or name in wrong("missing", []):
        raise AttributeError(name)
    return function


def _nvmlInit():
    _call()
    if wrong("no_driver"):
        raise NVMLError(9)


def _nvmlShutdown():
    pass


def _nvmlDeviceGetCount():
    return COUNT


def _nvmlDeviceGetHandleByIndex(index):
    _call(index)
    return index


def _nvmlDeviceGetHandleByUUID(uuid):
    return _nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-")))


def _nvmlSystemGetDriverVersion():
    return "999.1"


def _nvmlDeviceGetName(handle):
    return "Fake H100"


def _nvmlDeviceGetUUID(handle):
    return f"GPU-{handle}"


def _nvmlDeviceGetSerial(handle):
    return f"S{handle}"


def _nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode())


def _nvmlDeviceGetTemperature(handle, sensor):
    _call(handle)
    assert sensor == NVML_TEMPERATURE_GPU
    return wrong("celsius", {}).get(str(handle), 40 + handle)


def _nvmlDeviceGetPowerUsage(handle):
    return 300_000 + handle


def _nvmlDeviceGetClockInfo(handle, clock):
    assert clock == NVML_CLOCK_SM
    return 1980


def _nvmlDeviceGetMaxClockInfo(handle, clock):
    assert clock == NVML_CLOCK_SM
    return 1980


def _nvmlDeviceGetCurrPcieLinkWidth(handle):
    return 16


def _nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=97, memory=50)


def _nvmlDeviceGetMemoryInfo(handle):
    return SimpleNamespace(total=80 * 2**30, used=2**30, free=79 * 2**30)


def _nvmlDeviceGetCurrentClocksEventReasons(handle):
    return 0x4


def _nvmlDeviceGetTotalEccErrors(handle, kind, counter):
    if handle == 3:
        raise NVMLError(3)
    return 0


def _nvmlDeviceGetFieldValues(handle, fields):
    failing = wrong("failing_fields", [])
    return [
        SimpleNamespace(
            fieldId=field,
            nvmlReturn=0 if field in FIELDS and field not in failing else 3,
            valueType=3,
            value=SimpleNamespace(ullVal=FIELDS.get(field, 0)),
        )
        for field in fields
    ]


def _nvmlEventSetCreate():
    return object()


def _nvmlDeviceRegisterEvents(handle, kinds, events):
    assert kinds == nvmlEventTypeXidCriticalError


def _nvmlEventSetWait_v2(events, timeout_ms):
    until_s = time.monotonic() + timeout_ms / 1e3
    while time.monotonic() < until_s:
        waiting = wrong("xids", [])[len(_delivered) :]
        if waiting:
            _delivered.append(waiting[0])
            index, number = waiting[0]
            return SimpleNamespace(device=index, eventData=number)
        time.sleep(0.01)
    raise NVMLError(10)
