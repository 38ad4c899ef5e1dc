"""Device counters by NVML. The only file that knows `pynvml`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Final

from rankwatch.agent.gpu import GpuCounters, NoGpu
from rankwatch.wire import DeviceSample

DEVICES_MAX: Final = 64
"""Devices read on one host: four times what the largest servers hold."""

_log = logging.getLogger(__name__)


def open_gpus() -> GpuCounters:
    """NVML's counters, or none if the library, the driver or a device is missing; the log says which."""
    try:
        with warnings.catch_warnings():
            # The deprecated package of the same name, which others depend on, warns about itself at import.
            warnings.simplefilter("ignore", FutureWarning)
            import pynvml  # noqa: PLC0415 - an extra; its absence is a normal case
    except ImportError:
        _log.info("no GPU counters: pynvml is not installed")
        return NoGpu()
    try:
        pynvml.nvmlInit()
        return Nvml(pynvml)
    except pynvml.NVMLError as error:
        _log.info("no GPU counters: %s", error)
        return NoGpu()


class Nvml:
    """Counters of all devices that NVML lists when it is opened.

    Args:
        library: the module `pynvml`, initialised.
    """

    def __init__(self, library: Any) -> None:
        self._nvml = library
        count = min(library.nvmlDeviceGetCount(), DEVICES_MAX)
        handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        self._devices = [
            (index, _text(library.nvmlDeviceGetUUID(handle)), handle) for index, handle in enumerate(handles)
        ]

    def sample(self, unix_ns: int) -> tuple[DeviceSample, ...]:
        """Read all devices; a counter that a device does not have is None."""
        return tuple(self._sample(index, uuid, handle, unix_ns) for index, uuid, handle in self._devices)

    def close(self) -> None:
        """Shut NVML down."""
        try:
            self._nvml.nvmlShutdown()
        except self._nvml.NVMLError as error:
            _log.debug("NVML did not shut down: %s", error)

    def _sample(self, index: int, uuid: str, handle: Any, unix_ns: int) -> DeviceSample:
        nvml = self._nvml
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = self._ask(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        milliwatts = self._ask(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        megahertz = self._ask(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        return DeviceSample(
            device_uuid=uuid,
            time_unix_ns=unix_ns,
            local_index=index,
            temperature_celsius=self._ask(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            power_w=None if milliwatts is None else milliwatts / 1e3,
            sm_clock_hz=None if megahertz is None else megahertz * 1e6,
            utilization_ratio=None if use is None else use.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            throttle_reasons=self._ask(lambda: nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)),
            ecc_uncorrected=self._ask(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._nvml.NVMLError:
            return None  # this device or driver does not have the counter, or cannot read it now


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name
