"""How much the ranks of a host wait for its cores: a delay of all ranks of a host is no fault of one of them.

Work whose wall time exceeds its CPU time was waiting for a core. If most ranks of a host wait, it is chance which of
them gets the cores in a step, and whose caches and clock frequency suffer from its neighbours. So the more ranks wait,
the less the wall and CPU times of that step say about a single rank.
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
    """How waiting for cores widens the scatter of times."""

    memory_rows: int = 16
    """Rows over which crowding is averaged; the larger of this average and the current row counts."""
    share: float = 0.25
    """Added scatter, in logarithms, as a share of the waiting."""
    doubt_max: float = 0.25
    """Largest added scatter; with more, a rank with a third more work would be found only after hundreds of steps."""


class Crowding(Stateful):
    """Crowding of each host. Memory: 16 bytes for each rank."""

    STATE: ClassVar[tuple[str, ...]] = ("_hosts", "_waited")

    def __init__(self, config: CrowdingConfig) -> None:
        self._config = config
        self._hosts = PeerGroups()
        self._waited: Floats = np.zeros(0)

    def regroup(self, hosts: tuple[str, ...]) -> None:
        """Set the host of each rank; hosts with one or two ranks form one group."""
        number: Ints = np.unique(np.asarray(hosts, dtype=np.str_), return_inverse=True)[1].reshape(-1).astype(np.int64)
        self._hosts.regroup(number)
        self._waited = np.zeros(number.size)

    def doubt(self, wall: Floats, cpu: Floats) -> Floats:
        """Added scatter of this row's times because of shared cores, by rank, in logarithms."""
        usable = (wall > 0) & (cpu > 0) & np.isfinite(wall) & np.isfinite(cpu)
        waited = np.log(np.where(usable, wall, 1.0) / np.where(usable, cpu, 1.0))
        now = np.maximum(self._hosts.location(waited, usable), 0.0)
        self._waited += (now - self._waited) / self._config.memory_rows
        return np.minimum(self._config.share * np.maximum(now, self._waited), self._config.doubt_max)
