"""Device counters by NVML. The only file that knows `pynvml`.

Counters are asked for in few calls, since each takes a lock that the job's own submissions to the driver take too: one
call for all numbered fields of a device, no lists of processes. What a device or a driver does not have is None, or
absent from `extra`.
"""

from __future__ import annotations

import time
import warnings
from typing import Any, Final

from rankwatch.agent.devices import DeviceError, DeviceIdentity
from rankwatch.wire import DeviceSample

DEVICES_MAX: Final = 64
"""Devices read on one host: four times what the largest servers hold."""
SLOW_EVERY: Final = 10
"""Counters that change slowly are read with each tenth sample."""

FAST_FIELDS: Final[dict[int, tuple[str, float]]] = {82: ("memory_temperature_celsius", 1.0), 186: ("power_now_w", 1e-3)}
"""Number of a field in nvml.h: name of the counter, factor to its unit."""
SLOW_FIELDS: Final[dict[int, tuple[str, float]]] = {
    190: ("power_limit_w", 1e-3),
    74: ("throttled_by_power_s", 1e-9),
    269: ("throttled_by_driver_heat_s", 1e-9),
    270: ("throttled_by_heat_s", 1e-9),
    271: ("throttled_by_power_brake_s", 1e-9),
    94: ("pcie_replays", 1.0),
    142: ("remapped_rows_correctable", 1.0),
    143: ("remapped_rows_uncorrectable", 1.0),
    144: ("remap_pending", 1.0),
    145: ("remap_failed", 1.0),
    38: ("nvlink_crc_flit_errors", 1.0),
    45: ("nvlink_crc_data_errors", 1.0),
    52: ("nvlink_replay_errors", 1.0),
    59: ("nvlink_recovery_errors", 1.0),
    230: ("recovery_action", 1.0),
}
NVLINKS_FIELD: Final = 91
"""Number of a device's NVLinks."""
LINK_FIELDS: Final[dict[int, str]] = {
    206: "nvlink_errors",
    207: "nvlink_errors",
    208: "nvlink_errors",
    211: "nvlink_errors",
    215: "nvlink_recoveries",
}
"""Fields that NVLink 5 has for each link: the counter that sums them."""
ACTIVITIES: Final[dict[int, str]] = {2: "sm_active_ratio", 5: "tensor_active_ratio", 10: "memory_bandwidth_ratio"}
"""Metrics of GPM in percent, from Hopper on: unlike utilization they distinguish work from waiting in a collective."""
EVENTS: Final[dict[int, str]] = {
    0x200: "single_bit_error_storm",
    0x400: "dram_retirement",
    0x800: "dram_retirement_failure",
    0x1000: "poison_error",
    0x2000: "fatal_poison_error",
    0x4000: "unavailable",
    0x8000: "recovery_action",
}
"""Events besides Xids, by number in nvml.h. A driver has some of them."""
_VALUE_PARTS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""By `valueType`, the part of a field's value that is set."""
_LOST: Final = frozenset({15, 16, 28})
"""NVML's GPU_IS_LOST, RESET_REQUIRED and GPU_NOT_FOUND."""
_TIMEOUT: Final = 10


class NoDevicesError(Exception):
    """The library, the driver or a device is missing; the text says which."""


def open_nvml() -> Nvml:
    """NVML with the devices of this host.

    Raises:
        NoDevicesError: there is none that can be read.
    """
    try:
        with warnings.catch_warnings():
            # The deprecated package of the same name, which others depend on, warns about itself at import.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml  # noqa: PLC0415 - an extra; its absence is a normal case
    except ImportError as error:
        raise NoDevicesError("pynvml is not installed") from error
    try:
        pynvml.nvmlInit()
        count = min(pynvml.nvmlDeviceGetCount(), DEVICES_MAX)
    except (pynvml.NVMLError, AttributeError) as error:
        raise NoDevicesError(str(error)) from error
    if not count:
        raise NoDevicesError("the driver lists no device")
    return Nvml(pynvml, count)


class Nvml:
    """The devices that NVML lists when it is opened. One that cannot be opened, or is lost later, loses no other.

    Args:
        library: the module `pynvml`, initialised.
        count: devices.
    """

    def __init__(self, library: Any, count: int) -> None:
        self._nvml = library
        self._refused: dict[str, str] = {}
        self._handles: list[Any] = [self._ask("DeviceGetHandleByIndex", index) for index in range(count)]
        self.found = tuple(self._identity(index) for index in range(count))
        """By index."""
        self.refused: dict[int, dict[str, str]] = {}
        """What the device did not report in the newest sample that asked for it, with the driver's reason, by index."""
        self._lost: set[int] = set()
        self._samples = 0
        self._link_fields: dict[int, frozenset[int]] = {}
        """The fields of single links that the device had at the first reading, by index."""
        self._gpm: dict[int, list[Any]] = {}
        """The reading before and one to read into, by index; empty where the device has none."""
        self._events = self._registered()

    @property
    def hears_errors(self) -> bool:
        """Whether the driver reports errors through NVML; not in some containers and under MIG."""
        return self._events is not None

    @property
    def driver(self) -> str:
        """Version of the driver."""
        return _text(self._ask("SystemGetDriverVersion"))

    def name(self, index: int) -> str:
        """A device's name, with a note if it is divided (MIG): then it reports no utilization and few counters."""
        handle = self._handles[index]
        mode = self._ask("DeviceGetMigMode", handle)
        return _text(self._ask("DeviceGetName", handle)) + (", divided (MIG)" if mode and mode[0] else "")

    def sample(self, unix_ns: int) -> tuple[tuple[DeviceSample, ...], tuple[int, ...]]:
        """Read all devices.

        Args:
            unix_ns: the time of the samples.

        Returns:
            The samples, and the indices of devices that have been lost since the last call. A lost device has no
            sample until it answers again.
        """
        slow = self._samples % SLOW_EVERY == 0
        self._samples += 1
        samples, lost = list[DeviceSample](), list[int]()
        for device in self.found:
            if slow and (device.index in self._lost or self._handles[device.index] is None):
                self._renew(device)
            if self._answers(device.index):
                self._lost.discard(device.index)
                samples.append(self._sample(device, unix_ns, slow))
            elif device.index not in self._lost:
                self._lost.add(device.index)
                lost.append(device.index)
        return tuple(samples), tuple(lost)

    def wait(self, seconds: float) -> tuple[DeviceError, ...]:
        """Errors that the driver reports within this time; waits no longer once there is one."""
        if self._events is None:
            time.sleep(seconds)
            return ()
        try:
            event = self._nvml.nvmlEventSetWait_v2(self._events, int(seconds * 1e3))
        except self._nvml.NVMLError as error:
            if error.value != _TIMEOUT:
                time.sleep(seconds)
            return ()
        now, bus_id = time.time_ns(), self._bus_id(event.device)
        if event.eventType in EVENTS:
            return (DeviceError(now, bus_id, event=EVENTS[event.eventType]),)
        return (DeviceError(now, bus_id, int(event.eventData)),)

    def close(self) -> None:
        """Shut NVML down."""
        self._ask("Shutdown")

    # ---- opening -----------------------------------------------------------------------------------------------------

    def _identity(self, index: int) -> DeviceIdentity:
        handle = self._handles[index]
        if handle is None:
            return DeviceIdentity(index)
        uuid, serial = _text(self._ask("DeviceGetUUID", handle)), _text(self._ask("DeviceGetSerial", handle))
        return DeviceIdentity(index, uuid, self._bus_id(handle), serial)

    def _bus_id(self, handle: Any) -> str:
        """A device's PCI bus id as the kernel writes it: NVML's domain has eight digits, and it adds the function."""
        parts = _text(getattr(self._ask("DeviceGetPciInfo", handle), "busId", "")).lower().split(".")[0].split(":")
        return ":".join([parts[0][-4:], *parts[1:]]) if len(parts) == 3 else ""

    def _registered(self) -> Any:
        """The set in which errors of all devices arrive; None if no device can be registered."""
        events = self._ask("EventSetCreate")
        heard = 0
        for handle in self._handles if events is not None else ():
            further = (self._ask("DeviceGetSupportedEventTypes", handle) or 0) & sum(EVENTS)
            try:
                self._nvml.nvmlDeviceRegisterEvents(handle, self._nvml.nvmlEventTypeXidCriticalError | further, events)
                heard += 1
            except (self._nvml.NVMLError, AttributeError, TypeError):
                continue  # without the right, under MIG, or lost: the kernel's log may still tell
        return events if heard else None

    def _renew(self, device: DeviceIdentity) -> None:
        handle = self._ask("DeviceGetHandleByUUID", device.uuid) if device.uuid else None
        self._handles[device.index] = handle or self._ask("DeviceGetHandleByIndex", device.index)

    # ---- reading -----------------------------------------------------------------------------------------------------

    def _answers(self, index: int) -> bool:
        if self._handles[index] is None:
            return False
        try:
            self._nvml.nvmlDeviceGetTemperature(self._handles[index], self._nvml.NVML_TEMPERATURE_GPU)
        except self._nvml.NVMLError as error:
            return error.value not in _LOST
        return True

    def _sample(self, device: DeviceIdentity, unix_ns: int, slow: bool) -> DeviceSample:
        nvml, handle = self._nvml, self._handles[device.index]
        if slow:
            self.refused[device.index] = self._refused = {}
        memory, use = self._ask("DeviceGetMemoryInfo", handle), self._ask("DeviceGetUtilizationRates", handle)
        milliwatts = self._ask("DeviceGetPowerUsage", handle)
        megahertz = self._ask("DeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM)
        uncorrected = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
        return DeviceSample(
            device_uuid=device.uuid,
            time_unix_ns=unix_ns,
            local_index=device.index,
            temperature_celsius=self._ask("DeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            sm_clock_hz=None if megahertz is None else megahertz * 1e6,
            utilization_ratio=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            throttle_reasons=self._ask("DeviceGetCurrentClocksEventReasons", handle),
            ecc_uncorrected=self._ask("DeviceGetTotalEccErrors", handle, *uncorrected),
            extra=self._fields(handle, FAST_FIELDS | (SLOW_FIELDS if slow else {}))
            | self._activity(device.index)
            | (self._limits(handle) | self._links(device.index) if slow else {}),
        )

    def _fields(self, handle: Any, wanted: dict[int, tuple[str, float]]) -> dict[str, float]:
        found = {}
        for field in self._ask("DeviceGetFieldValues", handle, list(wanted)) or ():
            name, factor = wanted[field.fieldId]
            value = _value(field)
            if value is not None:
                found[name] = value * factor
            else:
                self._refused[name] = str(self._nvml.NVMLError(field.nvmlReturn))
        return found

    def _links(self, index: int) -> dict[str, float]:
        """NVLinks, those of them that are active, and what NVLink 5 counts by link."""
        handle = self._handles[index]
        count = next(
            (_value(field) for field in self._ask("DeviceGetFieldValues", handle, [NVLINKS_FIELD]) or ()), None
        )
        if not count:
            return {}
        links = range(int(count))
        states = [self._ask("DeviceGetNvLinkState", handle, link) for link in links]
        found = {"nvlinks": count}
        if None not in states:
            found["nvlinks_active"] = float(sum(map(bool, states)))
        wanted = [(field, link) for field in LINK_FIELDS for link in links]
        read: dict[int, list[float]] = {}
        for field in self._ask("DeviceGetFieldValues", handle, wanted) or ():
            if (value := _value(field)) is not None:
                read.setdefault(field.fieldId, []).append(value)
        # A sum of what answers now and did not before would jump.
        here = self._link_fields.setdefault(index, frozenset(read))
        for name in dict.fromkeys(LINK_FIELDS.values()):
            fields = [field for field in here if LINK_FIELDS[field] == name]
            if fields and all(len(read.get(field, ())) == len(links) for field in fields):
                found[name] = sum(sum(read[field]) for field in fields)
        return found

    def _activity(self, index: int) -> dict[str, float]:
        """What GPM measured since the call before, where the device has it; the first call only begins."""
        handle = self._handles[index]
        if index not in self._gpm:
            support = self._ask("GpmQueryDeviceSupport", handle)
            has_any = support is not None and support.isSupportedDevice
            samples = [self._ask("GpmSampleAlloc") for _ in range(2)] if has_any else []
            self._gpm[index] = samples if all(sample is not None for sample in samples) else []
            if self._gpm[index] and self._ask("GpmSampleGet", handle, self._gpm[index][0]) is None:
                self._gpm[index] = []
            return {}
        if not self._gpm[index]:
            return {}
        before, now = self._gpm[index]
        if self._ask("GpmSampleGet", handle, now) is None:
            return {}
        self._gpm[index] = [now, before]
        asked = self._nvml.c_nvmlGpmMetricsGet_t()
        asked.version, asked.numMetrics = self._nvml.NVML_GPM_METRICS_GET_VERSION, len(ACTIVITIES)
        asked.sample1, asked.sample2 = before, now
        for place, number in enumerate(ACTIVITIES):
            asked.metrics[place].metricId = number
        if self._ask("GpmMetricsGet", asked) is None:
            return {}
        reported = [asked.metrics[place] for place in range(len(ACTIVITIES))]
        return {ACTIVITIES[one.metricId]: one.value / 100 for one in reported if one.nvmlReturn == 0}

    def _limits(self, handle: Any) -> dict[str, float]:
        """What bounds a device's speed."""
        clock = self._ask("DeviceGetMaxClockInfo", handle, self._nvml.NVML_CLOCK_SM)
        found = {
            "sm_clock_max_hz": None if clock is None else clock * 1e6,
            "temperature_margin_celsius": self._ask("DeviceGetMarginTemperature", handle),
            "pcie_width": self._ask("DeviceGetCurrPcieLinkWidth", handle),
            "pcie_width_max": self._ask("DeviceGetMaxPcieLinkWidth", handle),
            "pcie_generation": self._ask("DeviceGetCurrPcieLinkGeneration", handle),
            "pcie_generation_max": self._ask("DeviceGetMaxPcieLinkGeneration", handle),
        }
        return {name: float(value) for name, value in found.items() if value is not None}

    def _ask(self, function: str, *arguments: Any) -> Any:
        """The result of a function of NVML; None if this device, driver or pynvml lacks it, or it fails now."""
        try:
            return getattr(self._nvml, f"nvml{function}")(*arguments)
        except (self._nvml.NVMLError, AttributeError) as error:
            self._refused[function.removeprefix("DeviceGet")] = str(error)
            return None


def _value(field: Any) -> float | None:
    """The value of a numbered field; None if the device does not report it."""
    if field.nvmlReturn != 0 or field.valueType >= len(_VALUE_PARTS):
        return None
    return float(getattr(field.value, _VALUE_PARTS[field.valueType]))


def _text(name: str | bytes | None) -> str:
    return name.decode() if isinstance(name, bytes) else name or ""
