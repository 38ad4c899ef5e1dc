"""The cluster model: jobs by other assumptions than the simulator's. Seeded, with labels; equal jobs give equal
observations.

    job = ClusterJob(ClusterPlacement(ep=8), hosts=8, faults=(SlowDevice(200, 1.3, ranks=(17,)),))
    for observation in job.observations(): ...
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Final, Protocol

import numpy as np

from rankwatch_detectors.base import (
    AttemptStart,
    Bools,
    Floats,
    Frame,
    Ints,
    Kind,
    Observation,
    Occurrence,
    Presence,
    StepKind,
    Tick,
    Topology,
)
from rankwatch_service.simulate.faults import Label


class ClusterFault(Protocol):
    """One thing that goes wrong."""

    @property
    def at_step(self) -> int: ...

    @property
    def label(self) -> Label:
        """What a perfect detector would report."""
        ...


@dataclass(frozen=True, slots=True)
class SlowDevice:
    """Devices need `factor` times as long for their work from this step on; without ranks all of them."""

    at_step: int
    factor: float
    ranks: tuple[int, ...] = ()

    @property
    def label(self) -> Label:
        return Label(Kind.STRAGGLER if self.ranks else Kind.SLOWDOWN, self.ranks, self.at_step)


@dataclass(frozen=True, slots=True)
class SlowLoader:
    """The data loaders of ranks need `factor` times as long for a batch. It shows once their queues are empty."""

    at_step: int
    factor: float
    ranks: tuple[int, ...]

    @property
    def label(self) -> Label:
        return Label(Kind.STRAGGLER, self.ranks, self.at_step)


@dataclass(frozen=True, slots=True)
class SlowSwitch:
    """Collectives over one switch take `factor` times as long, and all ranks wait for them."""

    at_step: int
    factor: float
    switch: int

    @property
    def label(self) -> Label:
        return Label(Kind.SLOWDOWN, (), self.at_step)


@dataclass(frozen=True, slots=True)
class RankHang:
    """A rank does not arrive at a collective for some seconds; the others wait for it."""

    at_step: int
    rank: int
    seconds: float

    @property
    def label(self) -> Label:
        return Label(Kind.HANG, (self.rank,), self.at_step)


@dataclass(frozen=True, slots=True)
class RankKill:
    """The kernel kills a rank's process; the others end with errors of their collectives, each after a while."""

    at_step: int
    rank: int

    @property
    def label(self) -> Label:
        return Label(Kind.RANK_LOST, (self.rank,), self.at_step)


@dataclass(frozen=True, slots=True)
class NonFiniteGradient:
    """A rank's gradients become NaN in one step; the reduction brings it to the weights of all ranks."""

    at_step: int
    rank: int

    @property
    def label(self) -> Label:
        return Label(Kind.NONFINITE, (self.rank,), self.at_step)


@dataclass(frozen=True, slots=True)
class LossBurst:
    """The loss is `factor` times the usual for some steps."""

    at_step: int
    factor: float
    steps: int

    @property
    def label(self) -> Label:
        return Label(Kind.LOSS_SPIKE, (), self.at_step, self.at_step + self.steps)


@dataclass(frozen=True, slots=True)
class LossDrift:
    """The loss grows by a share of itself in each step."""

    at_step: int
    share: float

    @property
    def label(self) -> Label:
        return Label(Kind.LOSS_DIVERGENCE, (), self.at_step)


@dataclass(frozen=True, slots=True)
class Resize:
    """Elastic membership: the launcher ends all processes and starts them on these of its hosts, from a checkpoint.

    No fault, and so without a label.
    """

    at_step: int
    hosts: tuple[int, ...]


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


PINK_S: Final = tuple(4.0**power for power in range(7))
"""Time constants from a second to an hour, each four times the one before. The sum of such AR(1) series is 1/f noise:
its power falls with the frequency between the inverses of the longest and the shortest of them."""


class CorrelatedNoise:
    """Independent stationary series, each a sum of AR(1) series with equal variances.

    With one time constant it is AR(1), with `PINK_S` 1/f noise. Values that lie t seconds apart have the correlation
    mean(e^(-t / constant)).
    """

    def __init__(self, random: np.random.Generator, count: int, sigma: float, constants_s: Sequence[float]) -> None:
        """Draw the values of `count` series at the beginning."""
        self._random = random
        self._constants_s = np.asarray(constants_s)[:, np.newaxis]
        self._sigma = sigma / len(constants_s) ** 0.5
        self._parts = self._sigma * random.standard_normal((len(constants_s), count))

    def after(self, seconds: float) -> Floats:
        """The values so many seconds after those before, float64 [count]."""
        kept = np.exp(-seconds / self._constants_s)
        fresh = self._random.standard_normal(self._parts.shape)
        self._parts = kept * self._parts + self._sigma * np.sqrt(1 - kept**2) * fresh
        return np.asarray(self._parts.sum(axis=0))


def tails(random: np.random.Generator, count: int, probability: float, median: float, sigma: float) -> Floats:
    """Mostly 0; with the given probability log-normal with this median and, of its logarithm, standard deviation."""
    size = median * np.exp(sigma * random.standard_normal(count))
    return np.where(random.random(count) < probability, size, 0.0)


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


LOSS_END, LOSS_RANGE, LOSS_STEPS, LOSS_POWER = 1.8, 6.0, 50.0, 0.6
"""The loss falls as a power of the steps, as scaling laws have it: END + RANGE x (1 + step / STEPS)^-POWER."""
LOSS_SIGMA, LOSS_MEMORY_STEPS = 0.01, 5.0
"""AR(1) noise: neighbouring batches are of the same documents."""
NORM_SIGMA, NORM_MEMORY_STEPS = 0.15, 10.0
LOCAL_NORM_SIGMA: Final = 0.1


class TrainingCurves:
    """What training computes in each step. A step that is repeated gets new noise, as a restart shuffles data anew."""

    def __init__(self, job: ClusterJob, random: np.random.Generator) -> None:
        self._job, self._random = job, random
        self._loss = CorrelatedNoise(random, 1, LOSS_SIGMA, (LOSS_MEMORY_STEPS,))
        self._norm = CorrelatedNoise(random, 1, NORM_SIGMA, (NORM_MEMORY_STEPS,))

    def frame(self, attempt: str, step: int, ranks: int) -> Frame:
        """A step's values, as a frame that has not arrived yet and so has no time."""
        loss = self._loss_of(step) * float(np.exp(self._loss.after(1.0)[0]))
        norm = float(np.exp(self._norm.after(1.0)[0]))
        local = np.exp(LOCAL_NORM_SIGMA * self._random.standard_normal(ranks))
        exact = {"nonfinite": np.zeros(ranks, dtype=np.int64)}
        for fault in self._job.faults:
            if isinstance(fault, NonFiniteGradient) and step >= fault.at_step:
                bad: list[int] | slice = [fault.rank] if step == fault.at_step else slice(None)
                local[bad], norm, exact["nonfinite"][bad] = np.nan, np.nan, 7
                loss = loss if step == fault.at_step else np.nan
        values: dict[str, Floats] = {
            "loss": np.full(ranks, loss), "grad_norm": np.full(ranks, norm), "local_grad_norm": local,
        }  # fmt: skip
        present = dict.fromkeys([*values, *exact], np.ones(ranks, dtype=np.bool_))
        logs = np.zeros(ranks, dtype=np.bool_)
        logs[0] = step % self._job.log_every == 0
        present |= {"loss": logs, "grad_norm": logs}
        return Frame(attempt, "values", step, StepKind.TRAIN, 0.0, values, present, exact)

    def _loss_of(self, step: int) -> float:
        loss: float = LOSS_END + LOSS_RANGE * (1 + step / LOSS_STEPS) ** -LOSS_POWER
        for fault in self._job.faults:
            if isinstance(fault, LossBurst) and fault.at_step <= step < fault.at_step + fault.steps:
                loss *= fault.factor
            if isinstance(fault, LossDrift) and step >= fault.at_step:
                loss *= (1 + fault.share) ** (step - fault.at_step)
        return loss


EVAL_SIGMA: Final = 0.3
"""Of the logarithm of a rank's part of an evaluation: the parts are of uneven length."""
SAVE_EVERY: Final = 50
"""A resized job goes on from the last multiple."""
RENDEZVOUS_S: Final = 40.0
"""Until a resized job trains again."""
TEARDOWN_S: Final = 5.0
"""How soon a process ends that has lost its peers or was asked to end, on average."""
PHASES: Final = ("data_wait", "forward", "backward", "backward")
"""Of a rank in a step, one after the other; in the last it waits in a collective."""


class ClusterPlayer:
    """One play of a job."""

    def __init__(self, job: ClusterJob) -> None:
        self._job = job
        self._random = np.random.default_rng((job.seed, 0))
        self._curves = TrainingCurves(job, np.random.default_rng((job.seed, 2)))
        self._launch = 0
        self._now_s, self._next_tick_s = 0.0, 1.0
        self._step = job.start_step
        self._begin(tuple(range(job.hosts)))

    def _begin(self, hosts: tuple[int, ...]) -> None:
        self._topology = self._job.placement.topology(hosts)
        self._work = WorkModel(self._job, hosts, self._now_s, self._random)
        self._collective = 0
        self._step_since_s, self._elapsed_s = self._now_s, 0.0
        self._received_s = np.full(self._ranks, self._now_s)
        self._state = ["running"] * self._ranks
        self._logged: deque[Frame] = deque()

    @property
    def _ranks(self) -> int:
        return self._topology.world_size

    @property
    def _attempt(self) -> str:
        return f"cluster{self._launch}.0"

    def play(self) -> Iterator[Observation]:
        """The observations, in stream order."""
        yield AttemptStart(self._attempt, self._topology, self._now_s)
        resizes = deque(self._job.resizes)
        while self._step < self._job.steps:
            if resizes and self._step >= resizes[0].at_step:
                yield from self._resize(resizes.popleft())
            for fault in self._job.faults:
                if isinstance(fault, RankKill) and fault.at_step == self._step:
                    yield from self._killed(fault.rank)
                    return
            yield from self._train()
            self._step += 1

    def _train(self) -> Iterator[Observation]:
        self._step_since_s, evaluated = self._now_s, np.zeros(self._ranks)
        if self._job.eval_every and self._step % self._job.eval_every == 0 and self._step > self._job.start_step:
            evaluated = self._job.eval_s * np.exp(EVAL_SIGMA * self._random.standard_normal(self._ranks))
            yield from self._pass(float(evaluated.max()), evaluated[np.newaxis], ("eval", "eval"))
            self._collective += 1
        cost = self._work.step(self._step, self._now_s, self._elapsed_s)
        changes = np.stack([cost.data_wait, cost.data_wait + cost.forward, cost.arrival])
        yield from self._pass(cost.seconds, changes, PHASES)
        self._collective += 1
        self._elapsed_s = self._now_s - self._step_since_s
        yield self._measured(cost, evaluated)
        self._logged.append(self._curves.frame(self._attempt, self._step, self._ranks))
        if len(self._logged) > self._job.log_lag:
            yield replace(self._logged.popleft(), time_s=self._now_s)

    def _measured(self, cost: StepCost, evaluated: Floats) -> Frame:
        values = {
            "step_time_s": np.full(self._ranks, self._elapsed_s),
            "busy_s": cost.busy + evaluated,
            "wait_s": self._elapsed_s - cost.busy - evaluated - cost.data_wait,
            "phase.data_wait": cost.data_wait,
            "phase.forward": cost.forward,
            "phase.backward": cost.backward,
        }
        kind = StepKind.TRAIN
        if evaluated.any():
            values["phase.eval"], kind = evaluated, StepKind.EVAL
        present = dict.fromkeys(values, np.ones(self._ranks, dtype=np.bool_))
        return Frame(self._attempt, "steps", self._step, kind, self._now_s, values, present)

    def _killed(self, rank: int) -> Iterator[Observation]:
        yield self._exit(rank, signal=9, error="")
        yield from self._ended([one for one in range(self._ranks) if one != rank], "RuntimeError: NCCL remote process")

    def _resize(self, resize: Resize) -> Iterator[Observation]:
        yield from self._ended(list(range(self._ranks)), "", signal=15)
        yield from self._pass(RENDEZVOUS_S, np.zeros((1, self._ranks)), ("", ""))
        self._launch += 1
        self._step -= self._step % SAVE_EVERY
        self._begin(resize.hosts)
        yield AttemptStart(self._attempt, self._topology, self._now_s)

    def _ended(self, ranks: list[int], error: str, signal: int | None = None) -> Iterator[Observation]:
        """The ends of these ranks, one after the other, and some time after the last."""
        since_s = np.sort(self._random.exponential(TEARDOWN_S, len(ranks)).clip(max=4 * TEARDOWN_S))
        waits = np.zeros((1, self._ranks))
        for rank, pause_s in zip(self._random.permutation(ranks), np.diff(since_s, prepend=0.0), strict=True):
            yield from self._pass(float(pause_s), waits, ("backward", "backward"))
            yield self._exit(int(rank), signal=signal, error=error)
        yield from self._pass(4 * TEARDOWN_S, waits, ("backward", "backward"))

    def _exit(self, rank: int, signal: int | None, error: str) -> Occurrence:
        self._state[rank] = "exited"
        code = None if signal else 1
        fields: dict[str, Any] = {"code": code, "signal": signal, "how": "pidfd", "error": error}
        host = self._topology.host[rank]
        return Occurrence("process_exit", self._attempt, host, self._now_s, rank, self._step, fields)

    def _pass(self, seconds: float, changes: Floats, phases: tuple[str, ...]) -> Iterator[Observation]:
        """Let time pass, with the ticks in it.

        Args:
            seconds: how long.
            changes: seconds from now at which each rank comes to its next phase, float64 [phases - 1, ranks].
            phases: the ranks' phases. In the last, a rank has entered one more collective.
        """
        began_s = self._now_s
        while self._next_tick_s <= began_s + seconds:
            self._now_s = self._next_tick_s
            self._next_tick_s += 1.0
            yield Tick(self._now_s, self._presence(self._now_s - began_s, changes, phases))
        self._now_s = began_s + seconds

    def _presence(self, age_s: float, changes: Floats, phases: tuple[str, ...]) -> Presence:
        place: Ints = (changes <= age_s).sum(axis=0)
        since = np.where(place > 0, np.take_along_axis(changes, np.maximum(place - 1, 0)[np.newaxis], axis=0)[0], 0.0)
        alive: Bools = np.asarray([state == "running" for state in self._state])
        self._received_s = np.where(alive, self._now_s, self._received_s)
        return Presence(
            attempt=self._attempt,
            has_reported=np.ones(self._ranks, dtype=np.bool_),
            received_s=self._received_s,
            sent_s=self._received_s,
            step=np.full(self._ranks, self._step, dtype=np.int64),
            phase=tuple(phases[number] for number in place),
            phase_age_s=age_s - since,
            step_age_s=np.full(self._ranks, self._now_s - self._step_since_s),
            collective_seq=self._collective + (place == len(phases) - 1).astype(np.int64),
            state=tuple(self._state),
            os_state=("R",) * self._ranks,
            # A rank that waits for its device or for others polls, so it uses its core all the time.
            cpu_s=self._received_s,
            outside_s=np.full(self._ranks, -1.0),
            doing=("",) * self._ranks,
        )


@dataclass(frozen=True, slots=True)
class ClusterJob:
    """A job on a number of hosts with eight devices each."""

    placement: ClusterPlacement = field(default_factory=ClusterPlacement)
    hosts: int = 8
    seed: int = 0
    _: KW_ONLY
    start_step: int = 0
    steps: int = 400
    """The step before which the record ends, absolute."""
    step_s: float = 1.0
    """About how long a step takes."""
    log_every: int = 1
    """Rank 0 logs the loss and the gradient norm of every n-th step."""
    log_lag: int = 2
    """How many steps later the logged values, and what was counted on devices, arrive."""
    eval_every: int = 0
    """An evaluation comes before every n-th step; 0: never."""
    eval_s: float = 30.0
    """Median time of a rank's part of an evaluation."""
    resizes: tuple[Resize, ...] = ()
    faults: tuple[ClusterFault, ...] = ()

    @property
    def labels(self) -> tuple[Label, ...]:
        """The faults that should be found."""
        return tuple(fault.label for fault in self.faults)

    def topology(self) -> Topology:
        """The topology of the first attempt.

        Raises:
            ValueError: the ranks cannot be divided as the placement says.
        """
        return self.placement.topology(range(self.hosts))

    def observations(self) -> Iterator[Observation]:
        """The job's observations in stream order; each call begins anew."""
        return ClusterPlayer(self).play()
