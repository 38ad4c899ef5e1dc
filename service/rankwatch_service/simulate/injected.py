"""What can be injected into a synthetic job, each as a plain fact, and the label of what should be found."""

from __future__ import annotations

from dataclasses import dataclass, field

from rankwatch_detectors.base import Kind


@dataclass(frozen=True, slots=True)
class Label:
    """One injected fault: what should be found."""

    kind: Kind
    ranks: tuple[int, ...]
    """Culprits; empty when the job as a whole is meant."""
    at_step: int
    until_step: int | None = None


@dataclass(frozen=True, slots=True)
class Slow:
    """Ranks whose busy time (or data wait) is multiplied."""

    ranks: tuple[int, ...]
    from_step: int
    until_step: int | None
    factor: float
    every: int = 1
    """2 = only every second step."""
    data_wait: bool = False
    wall_only: bool = False
    """Descheduled: CPU time stays level."""

    def active(self, step: int) -> bool:
        """Whether this step is slowed."""
        started = step >= self.from_step and (self.until_step is None or step < self.until_step)
        return started and (step - self.from_step) % self.every == 0


@dataclass(frozen=True, slots=True)
class Stall:
    """The job stands still before a step is finished."""

    at_step: int
    seconds: float
    phase: str
    ranks: tuple[int, ...] = ()
    """Who does not arrive; empty = all are in `phase`."""
    stopped: bool = False
    """The culprit is stopped by a signal."""
    held: bool = False
    outside: bool = False
    """Between two steps: all evaluate, save or log, and nothing says so."""


@dataclass(frozen=True, slots=True)
class Exit:
    """A process ends; its peers follow with connection errors."""

    rank: int
    at_step: int
    signal: int | None
    code: int | None
    error: str


@dataclass(frozen=True, slots=True)
class Restart:
    """After this step a new attempt begins at `to_step`: by the launcher, or inside the processes."""

    at_step: int
    to_step: int
    relaunch: bool
    away_s: float


@dataclass(frozen=True, slots=True)
class LossShape:
    """Loss multiplied by `factor` for `steps` steps, and growing by `growth` for each step."""

    at_step: int
    steps: int | None
    factor: float
    growth: float
    metric: str


@dataclass(slots=True)
class Transit:
    """What befalls batches between their host and the service (`transit.disturbed`)."""

    doubled: float = 0.0
    """Probability that a batch is sent twice."""
    late: float = 0.0
    """Probability that a batch is late, and comes after its successors."""
    late_s: float = 0.0
    skews: dict[str, float] = field(default_factory=dict)
    """Seconds by which a host's clock is ahead."""
    boots: dict[str, float] = field(default_factory=dict)
    """Time of the job at which a host's collector starts anew, in seconds."""
