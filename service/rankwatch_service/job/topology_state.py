"""The topology of an attempt as far as agents have reported it for their hosts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from rankwatch import wire
from rankwatch_detectors.base import Topology


class TopologyState:
    """The rank infos of one attempt, and the world size that they or the rows imply."""

    def __init__(self) -> None:
        self._infos: dict[int, wire.RankInfo] = {}
        self._parameters: tuple[str, ...] = ()
        self._highest = -1
        self._apart = False

    @property
    def infos(self) -> list[wire.RankInfo]:
        """The known rank infos, by rank, without parameter names."""
        return [self._infos[rank] for rank in sorted(self._infos)]

    @property
    def infos_told(self) -> bool:
        """Whether any rank info is known; if so, rows do not change the world size."""
        return bool(self._infos)

    @property
    def world_size(self) -> int:
        """As reported; before any report, the highest rank seen + 1."""
        return max(self._told, self._highest + 1)

    @property
    def complete(self) -> bool:
        """Whether the infos of all ranks are known."""
        return bool(self._infos) and len(self._infos) == self.world_size

    @property
    def _told(self) -> int:
        return next((info.world_size for info in self._infos.values()), 0)

    @property
    def lockstep(self) -> bool:
        """Whether ranks wait for each other in each step: all report so, and no observation contradicts it."""
        return not self._apart and all(info.lockstep for info in self._infos.values())

    def end_lockstep(self) -> None:
        """Record that ranks go at their own pace, for the rest of this launch."""
        self._apart = True

    @property
    def can(self) -> frozenset[str]:
        """The actions that every rank supports."""
        told = [frozenset(info.can) for info in self._infos.values()]
        return frozenset.intersection(*told) if told else frozenset()

    def learn(self, infos: Iterable[wire.RankInfo]) -> bool:
        """Take rank infos; returns whether the topology changed. An info with another world size is ignored."""
        changed = False
        for told in infos:
            if self._infos and told.world_size != self._told:
                continue
            if told.parameters and not self._parameters:
                self._parameters, changed = told.parameters, True
            before = self._infos.get(told.rank)
            changed |= before is None or _topology(before) != _topology(told)
            self._infos[told.rank] = _without_parameters(told)
        return changed

    def see(self, highest_rank: int) -> bool:
        """Take the highest rank of some rows, unless an info is known; returns whether the world size changed."""
        if self._infos or highest_rank <= self._highest:
            return False
        self._highest = highest_rank
        return True

    def hosts_of(self, ranks: Iterable[int]) -> list[str]:
        """Hosts of these ranks, each once, in the order of the ranks."""
        return list(dict.fromkeys(self._infos[rank].host for rank in ranks if rank in self._infos))

    def devices_of(self, ranks: Iterable[int]) -> list[str]:
        """Device UUIDs of these ranks, each once, in the order of the ranks."""
        told = (self._infos[rank].device_uuid for rank in ranks if rank in self._infos)
        return list(dict.fromkeys(device for device in told if device))

    def ranks_of(self, host: str) -> list[int]:
        """Ranks that run on a host, ascending."""
        return sorted(rank for rank, info in self._infos.items() if info.host == host)

    def topology(self) -> Topology:
        """The topology for the detectors. A rank without an info is alone on a host without a name."""
        size = self.world_size
        infos = [self._infos.get(rank) or wire.RankInfo(rank, size, dp=rank) for rank in range(size)]
        place = {
            name: np.array([getattr(info, name) for info in infos], dtype=np.int64)
            for name in ("dp", "tp", "pp", "cp", "ep")
        }
        return Topology(
            world_size=size,
            host=tuple(info.host for info in infos),
            device_uuid=tuple(info.device_uuid for info in infos),
            replicated=bool(self._infos) and all(info.replicated for info in self._infos.values()),
            parameters=self._parameters,
            lockstep=self.lockstep,
            optimizers=max((info.optimizers for info in infos), default=0),
            **place,
        )

    def state(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        return {
            "infos": msgspec.to_builtins(self.infos),
            "parameters": list(self._parameters),
            "highest": self._highest,
            "apart": self._apart,
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> TopologyState:
        """The object that gave this state."""
        restored = cls()
        infos = msgspec.convert(state["infos"], list[wire.RankInfo])
        restored._infos = {info.rank: info for info in infos}
        restored._parameters = tuple(state["parameters"])
        restored._highest = state["highest"]
        restored._apart = state.get("apart", False)
        return restored


def _topology(info: wire.RankInfo) -> wire.RankInfo:
    """The part of an info that decides whether the topology has changed."""
    return msgspec.structs.replace(info, parameters=(), pid=0)


def _without_parameters(info: wire.RankInfo) -> wire.RankInfo:
    """The info without parameter names: they are the same on every rank and kept once."""
    return msgspec.structs.replace(info, parameters=()) if info.parameters else info
