"""The effects of a job's faults, in the few forms that the generator plays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from rankwatch_service.simulate.faults import (
    BatchRamp,
    BitFlip,
    Congestion,
    DeviceXid,
    Drift,
    Fault,
    Hang,
    HostLoss,
    HostSilence,
    Kill,
    LinkFlap,
    LocalGradient,
    LossBump,
    LossClimb,
    LossDivergence,
    LossLevel,
    LossSpike,
    MissingRows,
    NonFinite,
    NormSpike,
    OrderedPause,
    Overflow,
    RecurringStall,
    Restart,
    ScalerSkip,
    Slow,
    SlowJob,
    Stall,
    Throttle,
    WanderingPace,
    ranks_of,
)
from rankwatch_service.simulate.job import Job

OneFault = TypeVar("OneFault", bound=Fault)


@dataclass(frozen=True, slots=True)
class SlowRanks:
    """Ranks whose busy time (or data wait) is multiplied."""

    ranks: tuple[int, ...]
    slow: Slow

    def active(self, step: int) -> bool:
        """Whether this step is slowed."""
        slow = self.slow
        started = step >= slow.from_step and (slow.until_step is None or step < slow.until_step)
        return started and (step - slow.from_step) % slow.every == 0


@dataclass(frozen=True, slots=True)
class Wait:
    """The job stands still before a step is finished."""

    at_step: int
    seconds: float
    phase: str
    ranks: tuple[int, ...] = ()
    """The ranks that do not arrive; empty: all are in `phase`."""
    stopped: bool = False
    """The culprits are stopped by a signal."""
    held: bool = False
    """An order holds the ranks."""
    outside: bool = False
    """The wait is between two steps, without a phase."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A loss or gradient norm that is multiplied for some steps (None: until the end), growing by a share each step."""

    metric: str
    at_step: int
    steps: int | None
    factor: float
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class Disturbances:
    """All disturbances of a job, each kind in the order of its faults."""

    slows: tuple[SlowRanks, ...]
    waits: tuple[Wait, ...]
    factors: tuple[Factor, ...]
    nonfinites: dict[int, tuple[tuple[int, ...], bool]]
    """The ranks with NaN or infinite gradients, and whether the loss scaler skips the step, by step."""
    silences: tuple[HostSilence, ...]
    levels: tuple[tuple[int, float], ...]
    """Step and factor: from this step until the next entry, steps of the whole job take this many times as long."""
    kills: tuple[Kill, ...]
    restarts: tuple[Restart, ...]
    flips: tuple[BitFlip, ...]
    overflows: tuple[Overflow, ...]
    gradients: tuple[LocalGradient, ...]
    missing: tuple[MissingRows, ...]
    ramps: tuple[BatchRamp, ...]
    congestions: tuple[Congestion, ...]
    climbs: tuple[LossClimb, ...]
    drifts: tuple[Drift, ...]
    xids: tuple[DeviceXid, ...]
    throttles: tuple[Throttle, ...]


def disturbances_of(job: Job) -> Disturbances:
    """The disturbances that a job's faults cause."""

    def every(kind: type[OneFault]) -> tuple[OneFault, ...]:
        return tuple(fault for fault in job.faults if isinstance(fault, kind))

    return Disturbances(
        slows=tuple(_slows(job)),
        waits=tuple(_waits(job)),
        factors=tuple(_factors(job)),
        nonfinites=_nonfinites(job),
        silences=tuple(_silences(job)),
        levels=tuple(level for pace in every(WanderingPace) for level in _levels(job, pace)),
        kills=every(Kill),
        restarts=every(Restart),
        flips=every(BitFlip),
        overflows=every(Overflow),
        gradients=every(LocalGradient),
        missing=every(MissingRows),
        ramps=every(BatchRamp),
        congestions=every(Congestion),
        climbs=every(LossClimb),
        drifts=every(Drift),
        xids=every(DeviceXid),
        throttles=every(Throttle),
    )


def _slows(job: Job) -> Iterator[SlowRanks]:
    for fault in job.faults:
        match fault:
            case Slow(ranks):
                yield SlowRanks(ranks_of(ranks), fault)
            case Throttle(rank, from_step, factor, until_step) if factor > 1:
                yield SlowRanks((rank,), Slow(rank, from_step, factor, until_step))
            case SlowJob(from_step, factor, until_step):
                everybody = tuple(range(job.world_size))
                yield SlowRanks(everybody, Slow(everybody, from_step, factor, until_step))
            case _:
                pass


def _waits(job: Job) -> Iterator[Wait]:
    for fault in job.faults:
        match fault:
            case Hang(ranks, at_step, seconds, stopped):
                yield Wait(at_step, seconds, "forward", ranks_of(ranks), stopped=stopped)
            case HostLoss(host, at_step, seconds):
                ranks = tuple(rank for rank, name in enumerate(job.topology().host) if name == host)
                yield Wait(at_step, seconds, "forward", ranks, stopped=True)
            case OrderedPause(at_step, seconds):
                yield Wait(at_step, seconds, "", held=True)
            case LinkFlap(at_step, seconds):
                yield Wait(at_step, seconds, "backward")
            case Stall(at_step, seconds, phase):
                yield Wait(at_step, seconds, phase, outside=not phase)
            case RecurringStall(interval, seconds, phase):
                for step in range(job.start_step + interval, job.steps, interval):
                    yield Wait(step, seconds, phase, outside=not phase)
            case _:
                pass


def _factors(job: Job) -> Iterator[Factor]:
    for fault in job.faults:
        match fault:
            case LossSpike(at_step, factor, steps) | LossBump(at_step, factor, steps):
                yield Factor("loss", at_step, steps, factor)
            case LossLevel(at_step, factor):
                yield Factor("loss", at_step, None, factor)
            case LossDivergence(at_step, growth):
                yield Factor("loss", at_step, None, 1.0, growth)
            case NormSpike(at_step, factor, steps):
                yield Factor("grad_norm", at_step, steps, factor)
            case _:
                pass


def _nonfinites(job: Job) -> dict[int, tuple[tuple[int, ...], bool]]:
    steps: dict[int, tuple[tuple[int, ...], bool]] = {}
    for fault in job.faults:
        match fault:
            case NonFinite(ranks, at_step):
                bad, skipped = steps.get(at_step, ((), True))
                together = set(ranks_of(ranks)) if skipped else set(ranks_of(ranks)).union(bad)
                steps[at_step] = (tuple(sorted(together)), False)
            case ScalerSkip(at_step):
                steps.setdefault(at_step, ((0,), True))
            case _:
                pass
    return steps


def _silences(job: Job) -> Iterator[HostSilence]:
    for fault in job.faults:
        match fault:
            case HostSilence():
                yield fault
            case HostLoss(host, at_step):
                yield HostSilence(host, at_step, at_step + 1)
            case _:
                pass


def _levels(job: Job, pace: WanderingPace) -> Iterator[tuple[int, float]]:
    random = np.random.default_rng(job.seed)
    step, level = job.start_step, 1.0
    while (step := step + int(random.integers(pace.every // 3, 2 * pace.every))) < job.steps:
        apart = 1.0 + random.uniform(pace.low, pace.high)
        level = level / apart if level > 1.0 + pace.high / 2 else level * apart
        yield step, level
