"""How much the ranks of a host wait for its cores: what a host does to all its ranks accuses none of them.

Work that takes longer by the clock than by the CPU's own count was waiting for a core. Where most ranks of a host wait,
which of them gets the cores in a step is chance, and so is whose caches and clock suffer from what runs beside it:
times of that step, by the clock and by the CPU, say the less the more was waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Floats, Ints
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import PeerGroups


@dataclass(frozen=True, slots=True)
class CrowdingConfig:
    """What waiting for cores does to times."""

    memory_rows: int = 16
    """A host is as crowded as it was over some rows, or as it is in this one."""
    share: float = 0.25
    """Scatter that waiting brings, in logarithms, as a share of it."""
    doubt_max: float = 0.25
    """With more of it a third more work would take hundreds of steps to be told."""


class Crowding(Stateful):
    """The ranks of each host together. Memory: 16 bytes for each rank."""

    STATE: ClassVar[tuple[str, ...]] = ("_hosts", "_waited")

    def __init__(self, config: CrowdingConfig) -> None:
        self._config = config
        self._hosts = PeerGroups()
        self._waited: Floats = np.zeros(0)

    def regroup(self, hosts: tuple[str, ...]) -> None:
        """Take up where ranks run; hosts of one or two ranks are taken together."""
        number: Ints = np.unique(np.asarray(hosts, dtype=np.str_), return_inverse=True)[1].reshape(-1).astype(np.int64)
        self._hosts.regroup(number)
        self._waited = np.zeros(number.size)

    def doubt(self, wall: Floats, cpu: Floats) -> Floats:
        """Scatter in logarithms that this row's times have since cores are shared, by rank."""
        usable = (wall > 0) & (cpu > 0) & np.isfinite(wall) & np.isfinite(cpu)
        waited = np.log(np.where(usable, wall, 1.0) / np.where(usable, cpu, 1.0))
        now = np.maximum(self._hosts.location(waited, usable), 0.0)
        self._waited += (now - self._waited) / self._config.memory_rows
        return np.minimum(self._config.share * np.maximum(now, self._waited), self._config.doubt_max)
