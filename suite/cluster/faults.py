"""What goes wrong in a job of the cluster model, each with its label. Steps are absolute and the first one affected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rankwatch_detectors.base import Kind
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
