"""Synthetic jobs: seeded, with labelled faults.

    job = Job(64, seed=1).inject(Slow(17, from_step=300, factor=1.6), Hang(3, at_step=500))
    for observation in generate(job): ...
    job.labels      # what a perfect detector would report

Noise is heavy-tailed, ranks differ by a silicon spread, and training is synchronous: a step lasts as long on every rank
as on the slowest one. Equal jobs give equal observations.
"""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Final

import numpy as np

from rankwatch_detectors.base import Kind, Topology
from rankwatch_service.simulate.faults import BatchRamp, Fault, Kill, Label, Restart, labels_of
from rankwatch_service.simulate.transit import Transit


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


@dataclass(frozen=True, slots=True)
class Noise:
    """Sizes and probabilities of the usual variation. Shares are of the usual value; 0 turns an effect off."""

    busy: float = 0.02
    """Standard deviation of a rank's busy time from step to step, as a share."""
    silicon: float = 0.02
    """Standard deviation of the lasting differences between ranks, as a share."""
    loss: float = 0.02
    """Standard deviation of the loss from step to step, as a share."""
    contention: float = 0.0
    """Standard deviation of wall time that ranks lose to other processes on the same cores, as a share."""
    uneven_cv: float = 0.0
    """Sequences of uneven length: coefficient of variation of a replica's load from step to step."""
    collect_every: int = 0
    """Steps between garbage collections of a rank; ranks collect in different steps."""
    collect_s: float = 0.0
    hiccup_probability: float = 0.0
    """Probability of one slow step, for each rank and step: a slow data shard, the operating system."""
    hiccup_s: float = 0.0
    burst_probability: float = 0.0
    """Probability that two to four slow steps begin, for each rank and step."""
    wave: float = 0.0
    """Amplitude by which all step times vary over a day, as a share."""
    warm_up_steps: int = 0
    """First steps of every attempt that take longer, with decreasing excess: caches fill, kernels are tuned."""
    warm_up_factor: float = 1.0


WITHOUT_A_STEP: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST})
"""Kinds that show even in a step that is not finished."""


@dataclass(frozen=True, slots=True)
class Job:
    """A scripted synthetic job."""

    world_size: int = 64
    steps: int = 600
    """The step before which training ends, absolute."""
    seed: int = 0
    _: KW_ONLY
    start_step: int = 0
    step_s: float = 1.0
    tick_s: float = 1.0
    """Seconds between ticks; one in the stream."""
    noise: Noise = field(default_factory=Noise)
    placement: RankPlacement = field(default_factory=RankPlacement)
    faults: tuple[Fault, ...] = ()
    """In the order in which they were injected."""
    transit: Transit = field(default_factory=Transit)
    expected: tuple[Label, ...] | None = None
    """Labels, if they differ from those of the faults so far; labels of faults injected later are added."""
    late_values: bool = False
    """Loss and norms arrive as late values, one step after, as on an accelerator."""
    report_tokens: bool = False
    """The steps have token counts; they always do under a `BatchRamp`."""
    fingerprint_every: int = 10
    """Steps; 0 = never."""
    launch: str = "launch"
    """Prefix of the names of all attempts: LAUNCHn.k."""
    ends: bool = True
    """The ranks leave their loops at the end; False: the record stops without that."""

    def inject(self, *faults: Fault) -> Job:
        """The same job with more faults."""
        expected = None if self.expected is None else self.expected + labels_of(faults)
        return replace(self, faults=self.faults + faults, expected=expected)

    @property
    def labels(self) -> tuple[Label, ...]:
        """The faults that should be found."""
        return labels_of(self.faults) if self.expected is None else self.expected

    def played_labels(self) -> list[Label]:
        """The labels of the faults that the job reaches: none after the end of a process without a restart."""
        restarts = Counter(fault.at_step for fault in self.faults if isinstance(fault, Restart))
        kills = Counter(fault.at_step for fault in self.faults if isinstance(fault, Kill))
        last = min((step for step, count in kills.items() if count > restarts[step]), default=self.steps)
        return [
            one for one in self.labels if one.at_step < last or (one.at_step == last and one.kind in WITHOUT_A_STEP)
        ]

    @property
    def has_tokens(self) -> bool:
        """Whether the steps have token counts."""
        return self.report_tokens or any(isinstance(fault, BatchRamp) for fault in self.faults)

    def topology(self) -> Topology:
        """Hosts, devices and parallel groups of the ranks.

        Raises:
            ValueError: the number of ranks is not a multiple of the parallel groups.
        """
        return self.placement.topology(self.world_size)
