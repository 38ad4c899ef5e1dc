"""The expected cost of a step for a rank, given its share of the work.

Sequences of uneven length make healthy ranks slow. If tokens (and squared lengths) are reported, their effect on the
logarithm of busy time is fitted over all ranks and subtracted. If not, all ranks of one data-parallel replica still
have the same load, so the common part of a replica's ranks in a step is subtracted, as soon as these ranks are seen to
vary together from step to step.

`CpuContention` is how much the ranks of a host wait for its cores: a delay of all ranks of a host is no fault of one of
them. Work whose wall time exceeds its CPU time was waiting for a core. If most ranks of a host wait, it is chance which
of them gets the cores in a step, and whose caches and clock frequency suffer from its neighbours. So the more ranks
wait, the less the wall and CPU times of that step say about a single rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from rankwatch_detectors.base import Bools, Floats, Frame, Ints
from rankwatch_detectors.dispatch import finite
from rankwatch_detectors.state import Stateful
from rankwatch_detectors.statistics.peers import GROUP_MIN, PeerGroups, everyone

# A load a hundred times the peers', or a hundredth of it, is a wrong number and explains nothing.
RANGE = math.log(100.0)


@dataclass(frozen=True, slots=True)
class LoadConfig:
    """How quickly loads are learned, in rows."""

    memory_rows: int = 64
    replica_rows_min: int = 12
    """Rows before replicas may be seen to vary together."""
    on_ratio: float = 4.0
    """Variance between replicas, as a multiple of that of independent ranks, above which the common load is
    subtracted; below `off_ratio` it no longer is. Two limits, so that it does not alternate."""
    off_ratio: float = 2.0


class LoadModel(Stateful):
    """Fitted effect of tokens, or of belonging to a replica, on the residual of each rank."""

    STATE: ClassVar[str] = "_replicas _usable_replicas _products _targets _before _between _within _rows _common"

    def __init__(self, config: LoadConfig) -> None:
        self._config = config
        self._replicas = PeerGroups()
        self._begin()

    def regroup(self, replica: Ints) -> None:
        """Set the data-parallel replica of each rank; a change discards what was learned."""
        before = self._replicas.number
        self._replicas.regroup(replica)
        if not np.array_equal(before, self._replicas.number):
            self._begin()

    def _begin(self) -> None:
        # With one replica the common part is that of the whole job, and in replicas of one or two ranks a common load
        # looks the same as a slow rank.
        self._usable_replicas = self._replicas.count >= GROUP_MIN and bool(self._replicas.proper.all())
        self._products: Floats = np.zeros((2, 2))
        self._targets: Floats = np.zeros(2)
        self._before: Floats = np.zeros(self._replicas.number.size)
        self._between = 0.0
        self._within = 0.0
        self._rows = 0
        self._common = False

    def unexplained(self, frame: Frame, residual: Floats, usable: Bools, groups: PeerGroups, sigma: Floats) -> Floats:
        """Each rank's residual without the part that its load explains. Learns from the same row, values clipped."""
        features = _load_features(frame, usable, groups)
        if features is not None:
            return residual - self._fit(features, residual, usable, sigma)
        if not self._usable_replicas:
            return residual
        common = self._replica_part(residual, usable)
        return residual if common is None else residual - common

    def _fit(self, features: Floats, residual: Floats, usable: Bools, sigma: Floats) -> Floats:
        keep = 1.0 - 1.0 / self._config.memory_rows
        clipped = np.where(usable, np.clip(residual, -1.0, 1.0), 0.0)
        fitted = self._solve() @ features
        typical_sigma = float(sigma.min(initial=math.inf))
        # One slow rank must not bend the fit: after the first rows only values near it are used.
        near = np.abs(clipped - fitted) < (
            6.0 * typical_sigma if self._rows >= self._config.replica_rows_min else np.inf
        )
        taught = np.where(near & usable, features, 0.0)
        self._products = keep * self._products + taught @ taught.T
        self._targets = keep * self._targets + taught @ clipped
        self._rows += 1
        return np.asarray(self._solve() @ features, dtype=np.float64)

    def _solve(self) -> Floats:
        ridge = 1e-6 + 1e-3 * float(np.trace(self._products))
        return np.asarray(np.linalg.solve(self._products + ridge * np.eye(2), self._targets), dtype=np.float64)

    def _replica_part(self, residual: Floats, usable: Bools) -> Floats | None:
        """What all ranks of each replica have in common; None as long as replicas are not seen to vary together."""
        config = self._config
        common = self._replicas.location(residual, usable)
        # Loads change from step to step and a slow host does not, so only the change counts as load.
        change = (common - self._before) ** 2
        change *= 0.5
        self._before = common
        self._rows += 1
        if self._rows > 1:
            gain = 1.0 / min(self._rows - 1, config.memory_rows)
            self._between += gain * (_mean(np.minimum(change, 1.0)) - self._between)
            apart = residual - common
            apart = (apart if everyone(usable) else apart[usable]) ** 2
            self._within += gain * (_mean(np.minimum(apart, 1.0)) - self._within)
        ranks = self._replicas.number.size / self._replicas.count
        # The median of n independent values has about pi/2 times the variance of their mean.
        independent = 0.5 * np.pi * self._within / ranks
        ratio = config.off_ratio if self._common else config.on_ratio
        self._common = self._rows >= config.replica_rows_min and self._between > ratio * independent
        return common if self._common else None


def _mean(values: Floats) -> float:
    return float(np.add.reduce(values)) / values.size


def _load_features(frame: Frame, usable: Bools, groups: PeerGroups) -> Floats | None:
    """Tokens and squared lengths as logarithms around the peers' median; None where tokens are not reported."""
    if "tokens" not in frame.values and "tokens_squared" not in frame.values:
        return None
    rows = []
    for name in ("tokens", "tokens_squared"):
        found = finite(frame, name)
        if found is None or not bool((found[1] & (found[0] > 0))[usable].all()):
            rows.append(np.zeros(usable.size))
            continue
        logs = np.log(np.where(usable, found[0], 1.0))
        around = np.clip(logs - groups.location(logs, usable), -RANGE, RANGE)
        rows.append(np.where(usable, around, 0.0))
    features = np.stack(rows)
    return features if bool(features.any()) else None


@dataclass(frozen=True, slots=True)
class CpuContentionConfig:
    """How waiting for cores widens the scatter of times."""

    memory_rows: int = 16
    """Rows over which crowding is averaged; the larger of this average and the current row counts."""
    share: float = 0.25
    """Added scatter, in logarithms, as a share of the waiting."""
    uncertainty_max: float = 0.25
    """Largest added scatter; with more, a rank with a third more work would be found only after hundreds of steps."""


class CpuContention(Stateful):
    """CPU contention of each host. Memory: 16 bytes for each rank."""

    STATE: ClassVar[str] = "_hosts _waited"

    def __init__(self, config: CpuContentionConfig) -> None:
        self._config = config
        self._hosts = PeerGroups()
        self._waited: Floats = np.zeros(0)

    def regroup(self, hosts: tuple[str, ...]) -> None:
        """Set the host of each rank; hosts with one or two ranks form one group."""
        number: Ints = np.unique(np.asarray(hosts, dtype=np.str_), return_inverse=True)[1].reshape(-1).astype(np.int64)
        self._hosts.regroup(number)
        self._waited = np.zeros(number.size)

    def uncertainty(self, wall: Floats, cpu: Floats) -> Floats:
        """Added scatter of this row's times because of shared cores, by rank, in logarithms."""
        usable = (wall > 0) & (cpu > 0) & np.isfinite(wall) & np.isfinite(cpu)
        waited = np.log(np.where(usable, wall, 1.0)) - np.log(np.where(usable, cpu, 1.0))
        now = np.maximum(self._hosts.location(waited, usable), 0.0)
        self._waited += (now - self._waited) / self._config.memory_rows
        return np.minimum(self._config.share * np.maximum(now, self._waited), self._config.uncertainty_max)
