"""Events that can be injected into a synthetic job. `labels_of` returns what a perfect detector would report.

Steps are absolute. `from_step` and `at_step` are the first step affected, `until_step` the first one that no longer is;
None: until the job ends. A `factor` multiplies the usual value.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rankwatch_detectors.base import Kind

Ranks = int | tuple[int, ...]


def ranks_of(ranks: Ranks) -> tuple[int, ...]:
    """One rank or several, as several."""
    return (ranks,) if isinstance(ranks, int) else ranks


@dataclass(frozen=True, slots=True)
class Label:
    """One injected fault, which should be found."""

    kind: Kind
    ranks: tuple[int, ...]
    """Culprits; empty if the fault is one of the whole job."""
    at_step: int
    until_step: int | None = None


# ---- step time ----


@dataclass(frozen=True, slots=True)
class Slow:
    """Ranks whose busy time, or data wait, is multiplied."""

    ranks: Ranks
    from_step: int
    factor: float
    until_step: int | None = None
    every: int = 1
    """Only every n-th step is slow."""
    data_wait: bool = False
    wall_only: bool = False
    """Descheduled: CPU time does not grow."""
    asleep: bool = False
    """Waiting in its own code, for a disk or a network: CPU time does not grow either."""


@dataclass(frozen=True, slots=True)
class SlowJob:
    """The busy time of all ranks is multiplied."""

    from_step: int
    factor: float
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class Drift:
    """The busy time of all ranks grows linearly over `steps` steps to `factor` times the usual."""

    from_step: int
    factor: float
    steps: int


@dataclass(frozen=True, slots=True)
class Congestion:
    """Collectives take `factor` times as long; no rank is busier."""

    from_step: int
    factor: float


@dataclass(frozen=True, slots=True)
class WanderingPace:
    """The pace of the job changes about every `every` steps, up and down by a share from `low` to `high`."""

    low: float
    high: float
    every: int = 300


@dataclass(frozen=True, slots=True)
class BatchRamp:
    """A schedule makes every rank's batch larger, as the token counts of the steps show."""

    at_step: int
    factor: float


# ---- progress ----


@dataclass(frozen=True, slots=True)
class Hang:
    """Ranks do not arrive at a collective for some seconds; the others wait in `backward`."""

    ranks: Ranks
    at_step: int
    seconds: float = 60.0
    stopped: bool = False
    """The ranks are stopped by a signal; otherwise they are busy."""


@dataclass(frozen=True, slots=True)
class Stall:
    """The job is in one phase for some seconds before a step; without a phase, between two steps."""

    at_step: int
    seconds: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class RecurringStall:
    """A `Stall` before every n-th step: evaluations or checkpoint saves; without a phase, unlabelled evaluations."""

    every: int
    seconds: float
    phase: str = ""


@dataclass(frozen=True, slots=True)
class OrderedPause:
    """An order holds the ranks."""

    at_step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LinkFlap:
    """A link is down for some seconds: all ranks wait for each other, then training goes on."""

    at_step: int
    seconds: float


# ---- processes, hosts and telemetry ----


@dataclass(frozen=True, slots=True)
class Kill:
    """A process ends by a signal, or with an exit code and an error; its peers end with connection errors."""

    rank: int
    at_step: int
    signal: int | None = 9
    code: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """After this step a new attempt begins at `to_step`: a new launch, or a rollback inside the processes."""

    at_step: int
    to_step: int
    relaunch: bool = True
    away_s: float = 20.0
    """Seconds until the new launch begins."""


@dataclass(frozen=True, slots=True)
class HostLoss:
    """A host fails: it sends nothing, and its ranks arrive at no collective."""

    host: str
    at_step: int
    seconds: float = 60.0


@dataclass(frozen=True, slots=True)
class DeviceXid:
    """The driver reports an error of a rank's device; training does not feel it, unless another fault is beside it."""

    rank: int
    at_step: int
    xid: int


@dataclass(frozen=True, slots=True)
class Throttle:
    """The hardware slows a rank's device down because of heat, which its agent reports once a minute."""

    rank: int
    from_step: int
    factor: float
    """Factor of its busy time; 1: training does not feel it."""
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class HostSilence:
    """No telemetry from a host that trains on: neither rows nor progress blocks."""

    host: str
    from_step: int
    until_step: int


@dataclass(frozen=True, slots=True)
class MissingRows:
    """The step records of a rank are missing."""

    rank: int
    from_step: int
    until_step: int


# ---- numbers ----


@dataclass(frozen=True, slots=True)
class NonFinite:
    """NaN in the local gradients of ranks, which the reduction spreads to all ranks. All of one step are one fault."""

    ranks: Ranks
    at_step: int


@dataclass(frozen=True, slots=True)
class Overflow:
    """The gradient norm of one rank is infinite in one step; its peers are not affected."""

    rank: int
    at_step: int


@dataclass(frozen=True, slots=True)
class ScalerSkip:
    """The loss scaler skips a step: infinite gradients, finite loss. Not a fault."""

    at_step: int


@dataclass(frozen=True, slots=True)
class BitFlip:
    """A bit flips in the parameters of one replica: its fingerprints differ from then on."""

    rank: int
    at_step: int


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """The local gradient norm of one rank is multiplied."""

    rank: int
    from_step: int
    factor: float


@dataclass(frozen=True, slots=True)
class LossSpike:
    """The loss is multiplied for some steps."""

    at_step: int
    factor: float
    steps: int = 1


@dataclass(frozen=True, slots=True)
class LossDivergence:
    """The loss grows by a share of itself each step until the job ends."""

    at_step: int
    growth: float


@dataclass(frozen=True, slots=True)
class LossClimb:
    """The loss grows linearly over `steps` steps to `factor` times the usual."""

    at_step: int
    factor: float
    steps: int


@dataclass(frozen=True, slots=True)
class LossLevel:
    """The loss moves to another level: other data, another learning rate. Not a fault."""

    at_step: int
    factor: float


@dataclass(frozen=True, slots=True)
class LossBump:
    """The loss is somewhat higher for some steps. Not a fault."""

    at_step: int
    factor: float
    steps: int


@dataclass(frozen=True, slots=True)
class NormSpike:
    """The gradient norm is multiplied for some steps."""

    at_step: int
    factor: float
    steps: int = 1


Fault = (
    Slow
    | SlowJob
    | Drift
    | Congestion
    | WanderingPace
    | BatchRamp
    | Hang
    | Stall
    | RecurringStall
    | OrderedPause
    | LinkFlap
    | Kill
    | Restart
    | HostLoss
    | DeviceXid
    | Throttle
    | HostSilence
    | MissingRows
    | NonFinite
    | Overflow
    | ScalerSkip
    | BitFlip
    | LocalGradient
    | LossSpike
    | LossDivergence
    | LossClimb
    | LossLevel
    | LossBump
    | NormSpike
)
"""Faults and harmless events, since a job is scripted with both; only faults have labels."""


def labels_of(faults: Iterable[Fault]) -> tuple[Label, ...]:
    """The labels of the faults, in their order."""
    labels: list[Label] = []
    poisoned: dict[int, set[int]] = {}
    for fault in faults:
        if isinstance(fault, NonFinite):
            at_step = fault.at_step
            together = poisoned.setdefault(at_step, set())
            together.update(ranks_of(fault.ranks))
            labels = [label for label in labels if (label.kind, label.at_step) != (Kind.NONFINITE, at_step)]
            labels.append(Label(Kind.NONFINITE, tuple(sorted(together)), at_step))
        elif (label := _label(fault)) is not None:
            labels.append(label)
    return tuple(labels)


def _label(fault: Fault) -> Label | None:
    """The label of a fault that is independent of all others; None if it should not be found."""
    match fault:
        case Slow(ranks, at, factor, until) if factor > 1:
            return Label(Kind.STRAGGLER, ranks_of(ranks), at, until)
        case SlowJob(at, factor, until) if factor > 1:
            return Label(Kind.SLOWDOWN, (), at, until)
        case Drift(at) | Congestion(at):
            return Label(Kind.SLOWDOWN, (), at)
        case Hang(ranks, at):
            return Label(Kind.HANG, ranks_of(ranks), at)
        case Kill(rank, at):
            return Label(Kind.RANK_LOST, (rank,), at)
        case DeviceXid(rank, at):
            return Label(Kind.DEVICE_FAULT, (rank,), at)
        case Throttle(rank, at, _, until):
            return Label(Kind.DEVICE_DEGRADED, (rank,), at, until)
        case HostLoss(_, at):
            return Label(Kind.TELEMETRY_LOST, (), at, at + 1)
        case HostSilence(_, at, until):
            return Label(Kind.TELEMETRY_LOST, (), at, until)
        case Overflow(rank, at):
            return Label(Kind.NONFINITE, (rank,), at, at + 1)
        case BitFlip(rank, at) | LocalGradient(rank, at):
            return Label(Kind.CORRUPTION, (rank,), at)
        case LossSpike(at, _, steps):
            return Label(Kind.LOSS_SPIKE, (), at, at + steps)
        case LossDivergence(at) | LossClimb(at):
            return Label(Kind.LOSS_DIVERGENCE, (), at)
        case NormSpike(at, _, steps):
            return Label(Kind.GRAD_NORM, (), at, at + steps)
        case _:
            return None
