"""What one step costs each rank: its data, its work, and the collectives that all wait for.

A rank's work takes (share of the model) x (load) / (speed of its device), times what its device, its host and chance
add. Its batch comes from a queue that a loader of its own fills. Collectives begin when the last rank arrives, and take
as long as the slowest switch needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from rankwatch_detectors.base import Floats
from suite.cluster.faults import RankHang, SlowDevice, SlowLoader, SlowSwitch
from suite.cluster.noise import PINK_S, CorrelatedNoise, tails
from suite.cluster.placement import DEVICES, host_of_ranks, switches

if TYPE_CHECKING:
    from suite.cluster.job import ClusterJob

COMPUTE, TRANSFER, LOADING = 0.8, 0.15, 0.5
"""Shares of a step: work, collectives, and the time in which a loader makes a batch, while the step before runs."""
FORWARD: Final = 1 / 3
"""Share of the work that is forward; the rest is backward."""
DEVICE_SPREAD: Final = 0.015
"""Standard deviation of lasting differences between devices of one kind; this and all that follows of a logarithm."""
DEVICE_SIGMA: Final = 0.008
"""1/f noise of a device: clocks, temperature."""
HOST_SIGMA, HOST_S = 0.01, 60.0
"""AR(1) noise that the ranks of a host share: power, cooling, other processes."""
STEP_SIGMA: Final = 0.01
"""What single steps add by chance."""
TAIL_PROBABILITY, TAIL_MEDIAN, TAIL_SIGMA = 1e-4, 0.2, 0.8
"""Single steps that take far longer, by a share of their work that is log-normal."""
SWITCH_SIGMA, SWITCH_S = 0.08, 20.0
"""AR(1) noise of a switch: its other traffic."""
SWITCH_PINK_SIGMA: Final = 0.05
LOADER_SIGMA: Final = 0.3
STORAGE_SIGMA, STORAGE_S = 0.15, 300.0
"""AR(1) noise of storage, which the loaders of a host share."""
PREFETCH: Final = 4
"""Batches that a loader makes ahead."""
HANDOVER, HANDOVER_SIGMA = 0.003, 0.5
"""Share of a step in which a batch that is ready comes to the device."""
EXPERT_SHARE, EXPERT_SIGMA, EXPERT_S, TOKEN_SIGMA = 0.5, 0.08, 300.0, 0.02
"""Share of the work that experts do; AR(1) noise of what the router gives to each of them; chance of single steps."""
SEQUENCE_SIGMA, LATER_CHUNK = 0.04, 0.05
"""With context parallelism: chance of a replica's long sequences; what each later chunk has more to attend to."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one step: of each rank, float64 [ranks], and of the collectives."""

    data_wait: Floats
    forward: Floats
    backward: Floats
    transfer: float

    @property
    def busy(self) -> Floats:
        """Seconds of each rank's own work."""
        return self.forward + self.backward

    @property
    def arrival(self) -> Floats:
        """Seconds from the beginning of the step until each rank comes to its collectives."""
        return self.data_wait + self.busy

    @property
    def seconds(self) -> float:
        """How long the step takes on all ranks."""
        return float(self.arrival.max()) + self.transfer


class WorkModel:
    """The costs of the steps of one attempt, one after the other."""

    def __init__(self, job: ClusterJob, hosts: tuple[int, ...], now_s: float, random: np.random.Generator) -> None:
        self._job, self._random = job, random
        self._topology = topology = job.placement.topology(hosts)
        self._ranks = ranks = topology.world_size
        self._host = host_of_ranks(len(hosts))
        # A device keeps its spread in all attempts, whichever rank it has.
        spread = np.random.default_rng((job.seed, 1)).standard_normal((job.hosts, DEVICES))
        self._usual = np.exp(DEVICE_SPREAD * spread[list(hosts)].reshape(-1)) / job.placement.speed(hosts)
        if job.placement.cp > 1:
            self._usual = self._usual * (1 + LATER_CHUNK * topology.cp)
        self._devices = CorrelatedNoise(random, ranks, DEVICE_SIGMA, PINK_S)
        self._hosts = CorrelatedNoise(random, len(hosts), HOST_SIGMA, (HOST_S,))
        self._traffic = CorrelatedNoise(random, switches(len(hosts)), SWITCH_SIGMA, (SWITCH_S,))
        self._switches = CorrelatedNoise(random, switches(len(hosts)), SWITCH_PINK_SIGMA, PINK_S)
        self._storage = CorrelatedNoise(random, len(hosts), STORAGE_SIGMA, (STORAGE_S,))
        self._router = CorrelatedNoise(random, job.placement.ep, EXPERT_SIGMA, (EXPERT_S,))
        self._ready_s = np.full(ranks, now_s)
        self._taken_s = np.full((PREFETCH, ranks), now_s)
        """When each rank took its last batches, by their number modulo `PREFETCH`."""

    def step(self, step: int, now_s: float, elapsed_s: float) -> StepCost:
        """The cost of a step that begins now, so many seconds after the one before began."""
        faults = [fault for fault in self._job.faults if step >= fault.at_step]
        chance = np.exp(STEP_SIGMA * self._random.standard_normal(self._ranks))
        chance *= 1 + tails(self._random, self._ranks, TAIL_PROBABILITY, TAIL_MEDIAN, TAIL_SIGMA)
        lasting = np.exp(self._devices.after(elapsed_s) + self._hosts.after(elapsed_s)[self._host])
        slow = self._slowed(fault for fault in faults if isinstance(fault, SlowDevice))
        compute = COMPUTE * self._job.step_s * self._usual * self._load(elapsed_s) * lasting * chance * slow
        loading = self._slowed(fault for fault in faults if isinstance(fault, SlowLoader))
        data_wait = self._wait_for_data(step, now_s, elapsed_s, loading)
        congestion = np.exp(self._traffic.after(elapsed_s) + self._switches.after(elapsed_s))
        for fault in faults:
            if isinstance(fault, SlowSwitch):
                congestion[fault.switch] *= fault.factor
        backward = compute * (1 - FORWARD)
        for fault in faults:
            if isinstance(fault, RankHang) and fault.at_step == step:
                backward[fault.rank] += fault.seconds
        return StepCost(data_wait, compute * FORWARD, backward, TRANSFER * self._job.step_s * float(congestion.max()))

    def _slowed(self, faults: Iterable[SlowDevice | SlowLoader]) -> Floats:
        factor = np.ones(self._ranks)
        for fault in faults:
            factor[list(fault.ranks) or slice(None)] *= fault.factor
        return factor

    def _load(self, elapsed_s: float) -> Floats:
        placement, load = self._job.placement, np.ones(self._ranks)
        if placement.ep > 1:
            chosen = self._router.after(elapsed_s)[self._topology.ep]
            tokens = np.exp(chosen + TOKEN_SIGMA * self._random.standard_normal(self._ranks))
            load *= 1 - EXPERT_SHARE + EXPERT_SHARE * tokens
        if placement.cp > 1:
            replicas = int(self._topology.dp.max()) + 1
            load *= np.exp(SEQUENCE_SIGMA * self._random.standard_normal(replicas))[self._topology.dp]
        return load

    def _wait_for_data(self, step: int, now_s: float, elapsed_s: float, loading: Floats) -> Floats:
        """A loader begins a batch when it has made the one before and its queue has room."""
        shared = self._storage.after(elapsed_s)[self._host]
        making = np.exp(shared + LOADER_SIGMA * self._random.standard_normal(self._ranks))
        slot = step % PREFETCH
        begun_s = np.maximum(self._ready_s, self._taken_s[slot])
        self._ready_s = begun_s + LOADING * self._job.step_s * making * loading
        handover = HANDOVER * self._job.step_s * np.exp(HANDOVER_SIGMA * self._random.standard_normal(self._ranks))
        data_wait = np.maximum(self._ready_s - now_s, 0.0) + handover
        self._taken_s[slot] = now_s + data_wait
        return data_wait
