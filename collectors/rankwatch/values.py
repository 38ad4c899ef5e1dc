"""The values that a script logs: numbers into the entry of the running step, tensors to the torch probe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankwatch.faults import Faults
from rankwatch.loop import Loop
from rankwatch.meter import StepMeter
from rankwatch.recorder import Recorder


class Values:
    """The buffer of the values that `watch.log` gets."""

    __slots__ = ("_faults", "_floats", "_known", "_loop", "_meter", "_recorder")

    def __init__(self, recorder: Recorder, meter: StepMeter, loop: Loop, faults: Faults) -> None:
        self._recorder = recorder
        self._meter = meter
        self._loop = loop
        self._faults = faults
        self._floats = recorder.floats
        self._known: dict[str, int] = {}
        """Index of metrics whose values are floats."""

    def log(self, values: Mapping[str, Any]) -> None:
        """Record values of this step by name; see `Watch.log`."""
        floats, known, mask = self._floats, self._known, 0
        for name, value in values.items():
            if value.__class__ is float and (index := known.get(name, -1)) >= 0:
                floats[index] = value
                mask |= 1 << index
            else:
                self._log_other(name, value)
        self._meter.mask |= mask

    def _log_other(self, name: str, value: Any) -> None:
        try:
            if hasattr(value, "detach"):
                self._log_tensor(name, value)
                return
            index = self._meter.metric(name)
            if self._recorder.is_exact(index):
                self._meter.put_exact(name, int(value))
                return
            self._meter.put(index, float(value))
            if index >= 0:
                self._known[name] = index
        except Exception as error:  # noqa: BLE001 - the boundary
            self._faults.caught(error)

    def _log_tensor(self, name: str, value: Any) -> None:
        # The probe hands values over at the end of a step: what came between two steps would be forgotten.
        if self._loop.probe is not None and self._loop.in_step:
            self._loop.probe.log(name, value)
        elif value.device.type == "cpu":
            self._meter.put(self._meter.metric(name), float(value.detach()))
        else:
            self._recorder.drop("device_values")  # reading it would wait for the device; watch.torch(...) does not
