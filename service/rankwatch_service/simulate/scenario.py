"""Synthetic jobs with scripted faults: seeded, labelled, as the observations that detectors take.

    job = Job(world_size=64, seed=1).slow(rank=17, from_step=300, factor=1.6).hang(rank=3, at_step=500)
    for observation in job.observations(): ...
    job.labels      # what a perfect detector would say

Noise is heavy-tailed, ranks differ by a silicon spread, and the job is synchronous: every rank's step lasts as long as
the slowest one's. Equal seeds give equal observations.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import Final

import numpy as np

from rankwatch_detectors.base import Kind, Observation, Topology
from rankwatch_service.simulate.injected import Exit, Label, LossShape, Restart, Slow, Stall, Transit

WITHOUT_A_STEP: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST})
"""Kinds that show even in a step that is not finished."""


@dataclass(slots=True)
class Job:
    """A scripted synthetic job. All methods return the job, so that calls can be chained."""

    world_size: int = 64
    steps: int = 600
    seed: int = 0
    _: KW_ONLY
    step_s: float = 1.0
    tick_s: float = 1.0
    """Seconds between ticks; the stream's is one."""
    noise: float = 0.02
    """Standard deviation of a rank's busy time from step to step, as a share of it."""
    silicon: float = 0.02
    """Standard deviation of the standing differences between ranks."""
    tp: int = 1
    pp: int = 1
    ranks_per_host: int = 8
    accelerated: bool = True
    """False: ranks are CPU processes without device identities, and CPU time is reported."""
    loss_noise: float = 0.02
    late_values: bool = False
    """Loss and norms come as late values, one step after, as on an accelerator."""
    fingerprint_every: int = 10
    start_step: int = 0
    slows: list[Slow] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)
    restarts: list[Restart] = field(default_factory=list)
    losses: list[LossShape] = field(default_factory=list)
    nonfinites: dict[int, tuple[tuple[int, ...], bool]] = field(default_factory=dict)
    flips: list[tuple[int, int]] = field(default_factory=list)
    """Rank and step."""
    overflows: list[tuple[int, int]] = field(default_factory=list)
    """Rank and step."""
    gradients: list[Slow] = field(default_factory=list)
    silences: list[tuple[str, int, int]] = field(default_factory=list)
    missing: list[tuple[int, int, int]] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    uneven_cv: float = 0.0
    report_tokens: bool = False
    stage_weights: tuple[float, ...] = ()
    collect_every: int = 0
    """0 = never; each rank collects garbage at steps of its own."""
    collect_s: float = 0.0
    hiccup_probability: float = 0.0
    hiccup_s: float = 0.0
    burst_probability: float = 0.0
    wave: float = 0.0
    contention: float = 0.0
    """Standard deviation of wall time that ranks lose to other processes on the same cores."""
    warm_up_steps: int = 0
    warm_up_factor: float = 1.0
    """The first steps of every attempt take longer, less and less so."""
    ramps: list[tuple[int, float]] = field(default_factory=list)
    """From a step on, every rank's batch is so many times larger."""
    congestions: list[tuple[int, float]] = field(default_factory=list)
    """From a step on, every collective takes so many times as long; nobody is busier."""
    climbs: list[tuple[int, float, int]] = field(default_factory=list)
    """From a step on, the loss climbs to so many times what it was, over so many steps."""
    drifts: list[tuple[int, float, int]] = field(default_factory=list)
    """From a step on, every rank's work grows to so many times what it was, over so many steps."""
    levels: list[tuple[int, float]] = field(default_factory=list)
    """From a step on, until the next of them, the whole job takes so many times as long."""
    lean_host: int | None = None
    """A host that has one device less than the others."""
    launch: str = "launch"
    """Begins the names of all attempts: LAUNCHn.k."""
    transit: Transit = field(default_factory=Transit)
    ends: bool = True
    """The ranks leave their loops in the end; False = the record just stops."""

    # ---- faults ----

    def slow(
        self,
        rank: int | tuple[int, ...],
        from_step: int,
        factor: float,
        until_step: int | None = None,
        *,
        every: int = 1,
        data_wait: bool = False,
        wall_only: bool = False,
    ) -> Job:
        """Multiply the busy time (or the data wait) of ranks."""
        ranks = (rank,) if isinstance(rank, int) else rank
        self.slows.append(Slow(ranks, from_step, until_step, factor, every, data_wait, wall_only))
        if factor > 1:
            self.labels.append(Label(Kind.STRAGGLER, ranks, from_step, until_step))
        return self

    def slow_all(self, from_step: int, factor: float, until_step: int | None = None) -> Job:
        """Multiply the busy time of all ranks."""
        self.slows.append(Slow(tuple(range(self.world_size)), from_step, until_step, factor))
        if factor > 1:
            self.labels.append(Label(Kind.SLOWDOWN, (), from_step, until_step))
        return self

    def drift(self, from_step: int, ratio: float, steps: int) -> Job:
        """Let the busy time of all ranks grow, little by little over so many steps, to so many times what it was."""
        self.drifts.append((from_step, ratio, steps))
        self.labels.append(Label(Kind.SLOWDOWN, (), from_step))
        return self

    def congest(self, from_step: int, factor: float) -> Job:
        """The network carries less: collectives take longer for everybody."""
        self.congestions.append((from_step, factor))
        self.labels.append(Label(Kind.SLOWDOWN, (), from_step))
        return self

    def hang(self, rank: int | tuple[int, ...], at_step: int, seconds: float = 60.0, *, stopped: bool = False) -> Job:
        """Let ranks not arrive for so many seconds; the others wait in `backward`."""
        ranks = (rank,) if isinstance(rank, int) else rank
        self.stalls.append(Stall(at_step, seconds, "forward", ranks, stopped=stopped))
        self.labels.append(Label(Kind.HANG, ranks, at_step))
        return self

    def kill(self, rank: int, at_step: int, signal: int | None = 9, code: int | None = None, error: str = "") -> Job:
        """End a process; its peers end within two seconds with connection errors."""
        self.exits.append(Exit(rank, at_step, signal, code, error))
        self.labels.append(Label(Kind.RANK_LOST, (rank,), at_step))
        return self

    def nonfinite(self, rank: int | tuple[int, ...], at_step: int) -> Job:
        """NaN in ranks' local gradients; the reduction puts it on all ranks."""
        ranks = {rank} if isinstance(rank, int) else set(rank)
        bad, skipped = self.nonfinites.get(at_step, ((), True))
        here = tuple(sorted(ranks if skipped else ranks.union(bad)))
        self.nonfinites[at_step] = (here, False)
        # Ranks that have it in the same step are one fault.
        self.labels = [one for one in self.labels if (one.kind, one.at_step) != (Kind.NONFINITE, at_step)]
        self.labels.append(Label(Kind.NONFINITE, here, at_step))
        return self

    def overflow(self, rank: int, at_step: int) -> Job:
        """The gradient norm of one rank is infinite in one step; its peers', and what becomes of them, are not."""
        self.overflows.append((rank, at_step))
        self.labels.append(Label(Kind.NONFINITE, (rank,), at_step, at_step + 1))
        return self

    def scaler_skip(self, at_step: int) -> Job:
        """A step that the loss scaler skips: infinite gradients, finite loss. Not a fault."""
        self.nonfinites.setdefault(at_step, ((0,), True))
        return self

    def flip(self, rank: int, at_step: int) -> Job:
        """Flip a bit in one replica's parameters: its fingerprints differ from then on."""
        self.flips.append((rank, at_step))
        self.labels.append(Label(Kind.CORRUPTION, (rank,), at_step))
        return self

    def gradient(self, rank: int, from_step: int, factor: float) -> Job:
        """Multiply one rank's local gradient norm."""
        self.gradients.append(Slow((rank,), from_step, None, factor))
        self.labels.append(Label(Kind.CORRUPTION, (rank,), from_step))
        return self

    def loss_spike(self, at_step: int, factor: float, steps: int = 1) -> Job:
        """Multiply the loss for some steps."""
        self.losses.append(LossShape(at_step, steps, factor, 0.0, "loss"))
        self.labels.append(Label(Kind.LOSS_SPIKE, (), at_step, at_step + steps))
        return self

    def diverge(self, at_step: int, growth: float) -> Job:
        """Let the loss grow by a share for each step, for good."""
        self.losses.append(LossShape(at_step, None, 1.0, growth, "loss"))
        self.labels.append(Label(Kind.LOSS_DIVERGENCE, (), at_step))
        return self

    def climb(self, at_step: int, factor: float, steps: int) -> Job:
        """Let the loss climb, little by little over so many steps, to so many times what it was."""
        self.climbs.append((at_step, factor, steps))
        self.labels.append(Label(Kind.LOSS_DIVERGENCE, (), at_step))
        return self

    def norm_spike(self, at_step: int, factor: float, steps: int = 1) -> Job:
        """Multiply the gradient norm for some steps."""
        self.losses.append(LossShape(at_step, steps, factor, 0.0, "grad_norm"))
        self.labels.append(Label(Kind.GRAD_NORM, (), at_step, at_step + steps))
        return self

    def silence(self, host: str, from_step: int, until_step: int) -> Job:
        """No telemetry from a host: neither rows nor progress blocks."""
        self.silences.append((host, from_step, until_step))
        self.labels.append(Label(Kind.TELEMETRY_LOST, (), from_step, until_step))
        return self

    # ---- what must raise nothing ----

    def uneven(self, cv: float, *, report_tokens: bool = False) -> Job:
        """Sequences of uneven length: the load of a replica varies by this coefficient from step to step."""
        self.uneven_cv, self.report_tokens = cv, report_tokens
        return self

    def heavy_stage(self, stage: int, factor: float) -> Job:
        """A pipeline stage that has more to do than the others."""
        self.stage_weights = tuple(factor if number == stage else 1.0 for number in range(self.pp))
        return self

    def hiccups(self, probability: float, seconds: float) -> Job:
        """Single slow steps of single ranks: a slow data shard, the operating system."""
        self.hiccup_probability, self.hiccup_s = probability, seconds
        return self

    def collections(self, every: int, seconds: float) -> Job:
        """Every rank pauses for its garbage collection at each n-th step, not all at the same one."""
        self.collect_every, self.collect_s = every, seconds
        return self

    def bursts(self, probability: float) -> Job:
        """Runs of two to four slow steps on single ranks, beginning with this probability per rank and step."""
        self.burst_probability = probability
        return self

    def standstill(self, every: int, seconds: float, phase: str) -> Job:
        """The whole job is in a labelled phase (eval, checkpoint_save) before every n-th step."""
        for step in range(self.start_step + every, self.steps, every):
            self.stalls.append(Stall(step, seconds, phase))
        return self

    def unlabelled(self, every: int, seconds: float) -> Job:
        """The whole job evaluates between two steps, every n-th time, and no phase says so."""
        for step in range(self.start_step + every, self.steps, every):
            self.stalls.append(Stall(step, seconds, "", outside=True))
        return self

    def pause(self, at_step: int, seconds: float) -> Job:
        """Ranks are held by an order."""
        self.stalls.append(Stall(at_step, seconds, "", held=True))
        return self

    def flap(self, at_step: int, seconds: float) -> Job:
        """A link is down for some seconds: all ranks wait for each other, and training goes on by itself."""
        self.stalls.append(Stall(at_step, seconds, "backward"))
        return self

    def warm_up(self, steps: int, factor: float) -> Job:
        """The first steps of every attempt are slow: caches fill, kernels are tuned."""
        self.warm_up_steps, self.warm_up_factor = steps, factor
        return self

    def ramp(self, at_step: int, factor: float) -> Job:
        """A schedule makes every rank's batch larger; the tokens of a step tell so."""
        self.ramps.append((at_step, factor))
        self.report_tokens = True
        return self

    def loss_step(self, at_step: int, factor: float) -> Job:
        """The loss goes to another level for good: a new mix of data, another learning rate."""
        self.losses.append(LossShape(at_step, None, factor, 0.0, "loss"))
        return self

    def loss_bump(self, at_step: int, factor: float, steps: int) -> Job:
        """The loss is somewhat higher for some steps and comes back by itself."""
        self.losses.append(LossShape(at_step, steps, factor, 0.0, "loss"))
        return self

    def lean(self, host: int) -> Job:
        """One host has a device less than the others, and the job was started like that."""
        self.lean_host = host
        return self

    def doubled(self, probability: float) -> Job:
        """Batches that come twice."""
        self.transit.doubled = probability
        return self

    def late(self, probability: float, seconds: float) -> Job:
        """Batches that come late, after the ones sent behind them."""
        self.transit.late, self.transit.late_s = probability, seconds
        return self

    def skew(self, host: str, seconds: float) -> Job:
        """A host whose clock is ahead of the others'."""
        self.transit.skews[host] = seconds
        return self

    def new_collector(self, host: str, at_s: float) -> Job:
        """A host's collector starts anew and numbers its batches from 0."""
        self.transit.boots[host] = at_s
        return self

    def lose_host(self, host: str, at_step: int, seconds: float = 60.0) -> Job:
        """A host goes: nothing comes from it, and its ranks arrive at no collective."""
        ranks = tuple(rank for rank, name in enumerate(self.topology().host) if name == host)
        self.stalls.append(Stall(at_step, seconds, "forward", ranks, stopped=True))
        return self.silence(host, at_step, at_step + 1)

    def restart(self, at_step: int, to_step: int, *, relaunch: bool = True, away_s: float = 20.0) -> Job:
        """Begin a new attempt after a step."""
        self.restarts.append(Restart(at_step, to_step, relaunch, away_s))
        return self

    def absent(self, rank: int, from_step: int, until_step: int) -> Job:
        """A rank's step records do not come, or not yet."""
        self.missing.append((rank, from_step, until_step))
        return self

    def wander(self, low: float, high: float, every: int = 300) -> Job:
        """The pace goes from level to level, a share between two others apart, every few hundred steps."""
        random = np.random.default_rng(self.seed)
        step, level = self.start_step, 1.0
        while (step := step + int(random.integers(every // 3, 2 * every))) < self.steps:
            apart = 1.0 + random.uniform(low, high)
            level = level / apart if level > 1.0 + high / 2 else level * apart
            self.levels.append((step, level))
        return self

    def daily_wave(self, amplitude: float) -> Job:
        """All step times wave over a day."""
        self.wave = amplitude
        return self

    # ---- results ----

    def played_labels(self) -> list[Label]:
        """The labels of the faults that the job lives to see: none after a process that ended for good."""
        restarts = Counter(restart.at_step for restart in self.restarts)
        exits = Counter(end.at_step for end in self.exits)
        last = min((step for step, count in exits.items() if count > restarts[step]), default=self.steps)
        return [
            one for one in self.labels if one.at_step < last or (one.at_step == last and one.kind in WITHOUT_A_STEP)
        ]

    def topology(self) -> Topology:
        """Ranks in Megatron's order: tensor-parallel neighbours first, then data-parallel, then stages."""
        ranks = np.arange(self.world_size, dtype=np.int64)
        replicas = self.world_size // (self.tp * self.pp)
        if replicas * self.tp * self.pp != self.world_size:
            raise ValueError(f"world size {self.world_size} is not a multiple of tp {self.tp} x pp {self.pp}")
        zero = np.zeros_like(ranks)
        hosts = tuple(f"host-{number}" for number in self._host_of_ranks())
        devices = tuple(f"GPU-{zlib.crc32(b'%d' % rank):08x}" for rank in range(self.world_size))
        return Topology(
            world_size=self.world_size,
            host=hosts,
            device_uuid=devices if self.accelerated else ("",) * self.world_size,
            dp=ranks // self.tp % replicas,
            tp=ranks % self.tp,
            pp=ranks // (self.tp * replicas),
            cp=zero,
            ep=zero,
            replicated=True,
            parameters=("embedding.weight", "block.0.weight", "head.weight"),
        )

    def _host_of_ranks(self) -> list[int]:
        ranks = np.arange(self.world_size)
        if self.lean_host is not None:
            ranks = ranks + (ranks >= (self.lean_host + 1) * self.ranks_per_host - 1)
        return [int(number) for number in ranks // self.ranks_per_host]

    def observations(self) -> Iterator[Observation]:
        """All observations in stream order; each call begins anew."""
        from rankwatch_service.simulate.generate import generate  # noqa: PLC0415 - generate needs this module

        return generate(self)
