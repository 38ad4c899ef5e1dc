"""The hosts of a synthetic job's ranks, and the part of the model on each rank."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np

from rankwatch_detectors.base import Topology


@dataclass(frozen=True, slots=True)
class RankPlacement:
    """Ranks in Megatron's order: tensor-parallel neighbours first, then data-parallel ones, then pipeline stages."""

    tp: int = 1
    pp: int = 1
    ranks_per_host: int = 8
    hosts_per_switch: int = 0
    """0: switches are not known."""
    accelerated: bool = True
    """False: ranks are CPU processes without device identities, and their CPU time is reported."""
    uuids: bool = True
    """Accelerated ranks know their devices' UUIDs; False: nothing but the type."""
    launch_cpu: bool = False
    """Accelerated ranks report the CPU time of launching their work, which is about the same in all steps."""
    device_times: bool = False
    """Devices measure their own work and their wait for others; the host waits for its device, and is busy as long."""
    heavy_stage: tuple[int, float] | None = None
    """A pipeline stage, and its work as a multiple of the others'."""
    lean_host: int | None = None
    """A host that has one device less than the others."""

    def topology(self, world_size: int) -> Topology:
        """The topology of a job with `world_size` ranks.

        Raises:
            ValueError: the number of ranks is not a multiple of tp x pp.
        """
        ranks = np.arange(world_size, dtype=np.int64)
        replicas = world_size // (self.tp * self.pp)
        if replicas * self.tp * self.pp != world_size:
            raise ValueError(f"world size {world_size} is not a multiple of tp {self.tp} x pp {self.pp}")
        zero = np.zeros_like(ranks)
        host_of_ranks = self._host_of_ranks(world_size)
        hosts = tuple(f"host-{number}" for number in host_of_ranks)
        switches = tuple(
            f"switch-{number // self.hosts_per_switch}" for number in host_of_ranks if self.hosts_per_switch
        )
        devices = tuple(f"GPU-{zlib.crc32(b'%d' % rank):08x}" for rank in range(world_size))
        return Topology(
            world_size=world_size,
            host=hosts,
            device_uuid=devices if self.accelerated and self.uuids else ("",) * world_size,
            device_type=("cuda",) * world_size if self.accelerated and not self.uuids else (),
            dp=ranks // self.tp % replicas,
            tp=ranks % self.tp,
            pp=ranks // (self.tp * replicas),
            cp=zero,
            ep=zero,
            replicated=True,
            parameters=("embedding.weight", "block.0.weight", "head.weight"),
            switch=switches,
        )

    def stage_weights(self) -> tuple[float, ...]:
        """The work of each stage as a multiple of the usual; empty if all are equal."""
        if self.heavy_stage is None:
            return ()
        heavy, factor = self.heavy_stage
        return tuple(factor if stage == heavy else 1.0 for stage in range(self.pp))

    def _host_of_ranks(self, world_size: int) -> list[int]:
        ranks = np.arange(world_size)
        if self.lean_host is not None:
            ranks = ranks + (ranks >= (self.lean_host + 1) * self.ranks_per_host - 1)
        return [int(number) for number in ranks // self.ranks_per_host]
