"""Which rank computes on a device of which a host tells something."""

from __future__ import annotations

from typing import ClassVar, Final

from rankwatch_detectors.base import Occurrence, Topology
from rankwatch_detectors.scope import IncidentScope
from rankwatch_detectors.state import Stateful

ON_CPU: Final = "cpu"


class DevicePlaces(Stateful):
    """The hosts and devices of a job's ranks, as far as they are known. Memory: linear in ranks."""

    STATE: ClassVar[tuple[str, ...]] = ("_hosts", "_devices")

    def __init__(self) -> None:
        self._hosts: list[str] = []
        self._devices: list[str] = []
        """UUID of each rank's device; `ON_CPU` if it computes on none, "" if that is not known."""

    def learn(self, topology: Topology) -> None:
        """Take the topology of an attempt."""
        types = topology.device_type or ("",) * topology.world_size
        self._hosts = list(topology.host)
        self._devices = [
            uuid or (ON_CPU if kind == ON_CPU else "") for uuid, kind in zip(topology.device_uuid, types, strict=True)
        ]

    def has(self, host: str) -> bool:
        """Whether a rank is on this host."""
        return host in self._hosts

    def has_devices(self, host: str) -> bool:
        """Whether a rank on this host may compute on a device."""
        return any(at == host and device != ON_CPU for at, device in zip(self._hosts, self._devices, strict=True))

    def scope_of(self, occurrence: Occurrence) -> IncidentScope | None:
        """As `scope_at`, of the device that an event is about."""
        return self.scope_at(occurrence.host, str(occurrence.fields.get("device_uuid", "")))

    def scope_at(self, host: str, device_uuid: str) -> IncidentScope | None:
        """The rank on a device, or its host where that is not known; None if the job does not use the device."""
        here = [rank for rank, its_host in enumerate(self._hosts) if its_host == host]
        if not here:
            return None
        uuid = _bare(device_uuid)
        mine = [rank for rank in here if uuid and _bare(self._devices[rank]) == uuid]
        if mine:
            return IncidentScope.of_rank(mine[0])
        # An instance of a divided GPU (MIG) has a UUID of its own, so that its rank cannot be told from the GPU's.
        known = all(self._devices[rank] and "MIG" not in self._devices[rank] for rank in here)
        return None if known and uuid else IncidentScope.of_host(host)


def _bare(uuid: str) -> str:
    """A UUID without what comes before it: NVML writes "GPU-", torch does not."""
    return uuid.lower().removeprefix("gpu-")
