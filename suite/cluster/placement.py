"""Hosts, switches and kinds of devices of a cluster, and how a job's ranks are laid out on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from rankwatch_detectors.base import Floats, Ints, Topology

DEVICES: Final = 8
"""Devices of a host, one rank on each."""
HOSTS_PER_SWITCH: Final = 2


@dataclass(frozen=True, slots=True)
class ClusterPlacement:
    """Tensor-parallel neighbours first, then context-parallel ones, replicas and stages, as Megatron has them."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    """Expert-parallel ranks are neighbouring replicas."""
    speeds: tuple[float, ...] = (1.0,)
    """Speeds of the kinds of devices, as multiples of the usual. The n-th host has the n-th kind, and so on in turn."""

    def topology(self, hosts: Sequence[int]) -> Topology:
        """The topology of a job on these hosts.

        Raises:
            ValueError: the ranks cannot be divided so.
        """
        size = DEVICES * len(hosts)
        replicas, over = divmod(size, self.tp * self.cp * self.pp)
        if over or replicas % self.ep:
            raise ValueError(f"{size} ranks cannot be divided as {self}")
        ranks = np.arange(size, dtype=np.int64)
        dp = ranks // (self.tp * self.cp) % replicas
        return Topology(
            world_size=size,
            host=tuple(f"node{host:04d}" for host in np.repeat(hosts, DEVICES)),
            device_uuid=tuple(f"GPU-{host:04x}-{device}" for host in hosts for device in range(DEVICES)),
            dp=dp,
            tp=ranks % self.tp,
            pp=ranks // (self.tp * self.cp * replicas),
            cp=ranks // self.tp % self.cp,
            ep=dp % self.ep,
            switch=tuple(f"switch{number}" for number in _switch_of_ranks(len(hosts))),
        )

    def speed(self, hosts: Sequence[int]) -> Floats:
        """The speed of each rank's device, float64 [ranks]."""
        return np.repeat([self.speeds[host % len(self.speeds)] for host in hosts], DEVICES).astype(np.float64)


def hosts_for(ranks: int) -> int:
    """How many hosts so many ranks fill.

    Raises:
        ValueError: they do not fill whole hosts.
    """
    hosts, over = divmod(ranks, DEVICES)
    if over or not hosts:
        raise ValueError(f"{ranks} ranks do not fill whole hosts of {DEVICES}")
    return hosts


def ranks_of_host(host: int) -> tuple[int, ...]:
    """The ranks on the n-th host of a job."""
    return tuple(range(host * DEVICES, (host + 1) * DEVICES))


def ranks_of_switch(switch: int) -> tuple[int, ...]:
    """The ranks below the n-th switch of a job: those of one rack, which share its power and its cooling."""
    per_switch = DEVICES * HOSTS_PER_SWITCH
    return tuple(range(switch * per_switch, (switch + 1) * per_switch))


def switches(hosts: int) -> int:
    """How many switches so many hosts are connected to."""
    return -(-hosts // HOSTS_PER_SWITCH)


def _switch_of_ranks(hosts: int) -> list[int]:
    return [host // HOSTS_PER_SWITCH for host in host_of_ranks(hosts).tolist()]


def host_of_ranks(hosts: int) -> Ints:
    """The position of each rank's host, int64 [ranks]."""
    return np.repeat(np.arange(hosts, dtype=np.int64), DEVICES)
