"""The module `pynvml` of a simulated host with eight devices; an agent with this folder on its path reads them.

Device 3 has no ECC counter, as consumer devices do not. The file that SIMULATED_NVML names, read anew at each call,
says what is wrong, as JSON: `no_driver`, `hangs` (each call blocks until it is over), `lost` (indices), `missing`
(functions that this version lacks), `failing_fields` (numbers), `xids` ([index, number], or [index, 0, type of another
event], each delivered once),
`celsius` and `megahertz` (by index), `clock_reasons` (by index: bits of NVML's clocks event reasons), `links_down` and
`link_errors` (by index: [number of NVLinks] and [number of a link, errors]), `no_gpm`.
"""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NVML_TEMPERATURE_GPU = 0
NVML_CLOCK_SM = 1
NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 1
NVML_VOLATILE_ECC = 0
nvmlEventTypeXidCriticalError = 8
SUPPORTED_EVENTS = 0xC1F
"""Among them Xids (8) and the retirement of memory (0x400, failed 0x800), but not the newer ones."""
COUNT = 8
FIELDS = {82: 60, 186: 310_000, 190: 700_000, 74: 5_000_000_000, 144: 0, 230: 0, 91: 18, 208: 0, 215: 0}
"""Values by number; any other field is not supported."""
NVML_GPM_METRICS_GET_VERSION = 1
ACTIVITIES = {2: 91.0, 5: 47.0, 10: 33.0}
"""Percent by metric of GPM."""

_delivered: list[list[int]] = []


class NVMLError(Exception):
    def __init__(self, value: Any) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


def wrong(what: Any, default: Any = None) -> Any:
    path = os.environ.get("SIMULATED_NVML")
    return json.loads(Path(path).read_text()).get(what, default) if path else default


def _call(handle: Any = None) -> Any:
    while wrong("hangs"):
        time.sleep(0.01)
    if handle is not None and handle in wrong("lost", []):
        raise NVMLError(15)


class _MetricsRequest:
    def __init__(self) -> None:
        self.metrics = [SimpleNamespace(metricId=0, nvmlReturn=3, value=0.0) for _ in range(8)]
        self.sample1 = self.sample2 = SimpleNamespace(time_s=None)
        self.numMetrics = self.version = 0


def by_index(what: str, handle: Any, default: Any) -> Any:
    return wrong(what, {}).get(str(handle), default)


ANSWERS = {
    "nvmlShutdown": lambda: None,
    "nvmlSystemGetDriverVersion": lambda: "999.1",
    "nvmlDeviceGetCount": lambda: COUNT,
    "nvmlDeviceGetHandleByUUID": lambda uuid: _nvmlDeviceGetHandleByIndex(int(uuid.removeprefix("GPU-"))),
    "nvmlDeviceGetName": lambda handle: "Simulated H100",
    "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
    "nvmlDeviceGetSerial": lambda handle: f"S{handle}",
    "nvmlDeviceGetPciInfo": lambda handle: SimpleNamespace(busId=f"00000000:0{handle}:00.0".encode()),
    "nvmlDeviceGetPowerUsage": lambda handle: 300_000 + handle,
    "nvmlDeviceGetClockInfo": lambda handle, clock: {NVML_CLOCK_SM: by_index("megahertz", handle, 1980)}[clock],
    "nvmlDeviceGetMaxClockInfo": lambda handle, clock: {NVML_CLOCK_SM: 1980}[clock],
    "nvmlDeviceGetCurrPcieLinkWidth": lambda handle: 16,
    "nvmlDeviceGetUtilizationRates": lambda handle: SimpleNamespace(gpu=97, memory=50),
    "nvmlDeviceGetMemoryInfo": lambda handle: SimpleNamespace(total=80 * 2**30, used=2**30, free=79 * 2**30),
    "nvmlDeviceGetCurrentClocksEventReasons": lambda handle: by_index("clock_reasons", handle, 0x4),
    "nvmlDeviceGetNvLinkState": lambda handle, link: int(link >= by_index("links_down", handle, 0)),
    "nvmlDeviceGetSupportedEventTypes": lambda handle: SUPPORTED_EVENTS,
    "nvmlEventSetCreate": object,
    "nvmlGpmQueryDeviceSupport": lambda handle: SimpleNamespace(isSupportedDevice=int(not wrong("no_gpm"))),
    "nvmlGpmSampleAlloc": lambda: SimpleNamespace(time_s=None),
    "c_nvmlGpmMetricsGet_t": _MetricsRequest,
}


def __getattr__(name: Any) -> Any:
    function = ANSWERS.get(name) or globals().get(f"_{name}")
    if function is None or name in wrong("missing", []):
        raise AttributeError(name)
    return function


def _nvmlInit() -> Any:
    _call()
    if wrong("no_driver"):
        raise NVMLError(9)


def _nvmlDeviceGetHandleByIndex(index: Any) -> Any:
    _call(index)
    return index


def _nvmlDeviceGetTemperature(handle: Any, sensor: Any) -> Any:
    _call(handle)
    assert sensor == NVML_TEMPERATURE_GPU
    return by_index("celsius", handle, 40 + handle)


def _nvmlDeviceGetTotalEccErrors(handle: Any, kind: Any, counter: Any) -> Any:
    if handle == 3:
        raise NVMLError(3)
    return 0


def _nvmlDeviceGetFieldValues(handle: Any, fields: Any) -> Any:
    failing = wrong("failing_fields", [])
    asked = [field if isinstance(field, tuple) else (field, None) for field in fields]
    bad_link, errors = by_index("link_errors", handle, (None, 0))
    return [
        SimpleNamespace(
            fieldId=field,
            nvmlReturn=0 if field in FIELDS and field not in failing else 3,
            valueType=3,
            value=SimpleNamespace(
                ullVal=errors if link is not None and (field, link) == (208, bad_link) else FIELDS.get(field, 0)
            ),
        )
        for field, link in asked
    ]


def _nvmlGpmSampleGet(handle: Any, sample: Any) -> Any:
    _call(handle)
    sample.time_s = time.monotonic()
    return sample


def _nvmlGpmMetricsGet(asked: Any) -> Any:
    assert asked.version == NVML_GPM_METRICS_GET_VERSION
    assert asked.sample1.time_s < asked.sample2.time_s
    for metric in asked.metrics[: asked.numMetrics]:
        metric.nvmlReturn, metric.value = 0, ACTIVITIES[metric.metricId]
    return asked


def _nvmlDeviceRegisterEvents(handle: Any, kinds: Any, events: Any) -> Any:
    assert kinds & nvmlEventTypeXidCriticalError
    if kinds & ~SUPPORTED_EVENTS:
        raise NVMLError(3)


def _nvmlEventSetWait_v2(events: Any, timeout_ms: Any) -> Any:
    until_s = time.monotonic() + timeout_ms / 1e3
    while time.monotonic() < until_s:
        waiting = wrong("xids", [])[len(_delivered) :]
        if waiting:
            _delivered.append(waiting[0])
            index, number, *kind = waiting[0]
            (event,) = kind or (nvmlEventTypeXidCriticalError,)
            return SimpleNamespace(device=index, eventType=event, eventData=number)
        time.sleep(0.01)
    raise NVMLError(10)
