"""Counters of the devices of a simulated job, as agents would read them: busy, and hot where they are throttled."""

from __future__ import annotations

from typing import Final

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_service.simulate.faults import Throttle
from rankwatch_service.simulate.job import Job

READ_EVERY_NS: Final = 10**9

MEMORY_BYTES: Final = 80 * 10**9
USED_BYTES: Final = 68 * 10**9
CLOCK_HZ: Final = 1.98e9
POWER_W: Final = 640.0
TEMPERATURE_CELSIUS: Final = 62.0
THROTTLED_CELSIUS: Final = 91.0
THROTTLED_SPEED: Final = 0.6
"""Clock and power of a throttled device, as a share."""
POWER_CAP, HEAT = 0x04, 0x40
"""Of NVML's clocks event reasons: the usual one of a busy device, and that of a hot one."""


class DeviceReader:
    """The devices on which the ranks of a job compute; there are none if these have no UUIDs."""

    def __init__(self, job: Job) -> None:
        self._chance = np.random.default_rng(job.seed)
        topology = job.topology()
        self._throttles = [
            (topology.device_uuid[fault.rank], fault) for fault in job.faults if isinstance(fault, Throttle)
        ]
        self._devices: dict[str, list[tuple[str, float]]] = {}
        """By host: UUID of each device, and how much warmer it is than others."""
        for host, uuid in zip(topology.host, topology.device_uuid, strict=True):
            if uuid:
                self._devices.setdefault(host, []).append((uuid, float(self._chance.normal(0, 2))))
        self._read_ns: dict[str, int] = {}

    def read_for(self, batch: wire.Batch, unix_ns: int) -> wire.Batch:
        """The batch with the counters of its host's devices, if they were not read within the last second.

        Args:
            batch: of one host.
            unix_ns: when they are read.
        """
        if (
            not batch.progress
            or batch.host not in self._devices
            or unix_ns - self._read_ns.get(batch.host, 0) < READ_EVERY_NS
        ):
            return batch
        self._read_ns[batch.host] = unix_ns
        step = max((block.step for block in batch.progress), default=-1)
        hot = {
            uuid
            for uuid, fault in self._throttles
            if fault.from_step <= step and (fault.until_step is None or step < fault.until_step)
        }
        samples = tuple(
            self._sample(index, uuid, warmer, unix_ns, hot=uuid in hot)
            for index, (uuid, warmer) in enumerate(self._devices[batch.host])
        )
        return msgspec.structs.replace(batch, devices=samples)

    def _sample(self, index: int, uuid: str, warmer: float, unix_ns: int, *, hot: bool) -> wire.DeviceSample:
        speed = (THROTTLED_SPEED if hot else 1.0) * (1 + 0.01 * float(self._chance.normal()))
        return wire.DeviceSample(
            uuid,
            unix_ns,
            index,
            temperature_celsius=round((THROTTLED_CELSIUS if hot else TEMPERATURE_CELSIUS + warmer) + 2 * (speed - 1)),
            power_w=POWER_W * speed,
            sm_clock_hz=round(CLOCK_HZ * min(speed, 1.0), -6),
            utilization_ratio=round(min(0.98 + 0.01 * float(self._chance.normal()), 1.0), 2),
            memory_used_bytes=USED_BYTES,
            memory_total_bytes=MEMORY_BYTES,
            throttle_reasons=HEAT if hot else POWER_CAP,
        )
