"""What detectors are told and what they answer: the only types that cross the border of this package.

A detector is a pure, deterministic function of the observations it was given, in their order: `AttemptStart` when an
attempt begins or its topology changes, `Frame` when all ranks' values of one step are in (or late), `Occurrence` for
single events, `Tick` about once a second with the ranks' `Presence`. It knows no clock, does no I/O and keeps memory
that is constant in steps and linear in ranks. It scores, then decides, then learns: what it calls abnormal never
teaches its baseline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.scope import IncidentScope

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class Kind(StrEnum):
    """The closed list of incident kinds."""

    NONFINITE = "nonfinite"
    LOSS_SPIKE = "loss_spike"
    LOSS_DIVERGENCE = "loss_divergence"
    GRAD_NORM = "grad_norm"
    CORRUPTION = "corruption"
    STRAGGLER = "straggler"
    SLOWDOWN = "slowdown"
    HANG = "hang"
    RANK_LOST = "rank_lost"
    TELEMETRY_LOST = "telemetry_lost"
    DEVICE_FAULT = "device_fault"
    DEVICE_DEGRADED = "device_degraded"
    NETWORK_DEGRADED = "network_degraded"
    RESTART_LOOP = "restart_loop"


class Severity(StrEnum):
    """How urgent: critical = a person or a policy must act now, warning = soon, info = worth knowing."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class StepKind(StrEnum):
    """What a step was. Only `train` steps are compared with each other."""

    TRAIN = "train"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"


@dataclass(frozen=True, slots=True)
class Topology:
    """Where the ranks of an attempt run and which work they share. All arrays have one entry for each rank."""

    world_size: int
    host: tuple[str, ...]
    device_uuid: tuple[str, ...]
    dp: Ints
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    replicated: bool = False
    """Parameters are bit-equal over dp for the same (tp, pp, cp, ep)."""
    parameters: tuple[str, ...] = ()
    lockstep: bool = True
    """Ranks wait for each other in each step; else each goes at its own pace and is judged against its own past."""
    optimizers: int = 0
    """How many train at once, 0 = unknown: losses of networks that train against each other rise and fall in turn."""

    @property
    def unit(self) -> tuple[str, ...]:
        """Identity of each rank's hardware, "host/device_uuid": stable across restarts, rank numbers are not."""
        return tuple(f"{host}/{device}" for host, device in zip(self.host, self.device_uuid, strict=True))

    @property
    def peer_group(self) -> Ints:
        """Number of each rank's peer group: ranks with the same (pp, tp, cp, ep) do the same work."""
        keys = np.stack([self.pp, self.tp, self.cp, self.ep])
        return np.asarray(np.unique(keys, axis=1, return_inverse=True)[1]).reshape(-1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """An attempt began, or its topology became better known. `attempt` is LAUNCH.k; k > 0 follows a rollback."""

    attempt: str
    topology: Topology
    time_s: float

    @property
    def launch(self) -> str:
        """The part of the attempt's text that all attempts of one launch share."""
        return self.attempt.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Frame:
    """All ranks' values of one step of one attempt: `values[name][rank]` counts only where `present[name][rank]`.

    NaN and Inf are values. Frames of one family come in step order within an attempt, but for late ones.
    Arrays must not be written to.
    """

    attempt: str
    family: str
    """"steps" (written at the step's end) or "values" (late values: loss, norms)."""
    step: int
    kind: StepKind
    time_s: float
    """Stream time at which the frame closed (from ticks), for durations and display."""
    values: Mapping[str, Floats]
    present: Mapping[str, Bools]
    exact: Mapping[str, Ints] = field(default_factory=dict)
    """Values that must not be rounded: `fingerprint`, `nonfinite`, `nonfinite_first`; `present` applies to them too."""
    finite: bool = False
    """True: all values, also where nothing is present, are known to be finite, and nobody needs to look again."""
    late: bool = False
    """Rows that came after their step's frame had closed, which lacks them. Where ranks go at their own pace these are
    all rows of whoever is not among the fastest."""
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """What follows from the values alone and several detectors want, such as medians: computed once, by whoever asks
    first."""


UNREPORTED = "unreported"
"""The phase where only finished steps are told, as by the lines of a log, and nobody knows what is done between."""


@dataclass(frozen=True, slots=True)
class Presence:
    """The newest progress block of every rank of the current attempt, one entry for each rank."""

    attempt: str
    heard: Bools
    """False: no progress block of this rank has come yet; its other entries mean nothing."""
    heard_s: Floats
    """Stream time when the last block came."""
    told_s: Floats
    """When its agent sent the block, on the clock of its host: for differences between blocks of one rank, and for how
    much later than usual one came. Stream time where the agent does not say."""
    step: Ints
    phase: tuple[str, ...]
    phase_age_s: Floats
    """How long it had been in that phase when its agent read the block."""
    step_age_s: Floats
    collective_seq: Ints
    state: tuple[str, ...]
    """running, held, left or exited, as in `rankwatch.wire.Progress`."""
    os_state: tuple[str, ...]
    cpu_s: Floats
    outside_s: Floats
    """How long it had been outside of its step when its agent read the block: the step's work was done and the next had
    not begun. -1: within a step."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: the only clock a detector has. `now_s` never goes back."""

    now_s: float
    presence: Presence | None


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One event (`rankwatch.wire.EVENT_KINDS`) or a control record.

    Control records are `order` (fields: order, phase, action, step), `gap` (fields: missing, boot) and `accepted`
    (fields: kinds): a person resolved an incident of these kinds that still stood.
    """

    kind: str
    attempt: str
    host: str
    time_s: float
    rank: int | None
    step: int | None
    fields: Mapping[str, Any]
    unix_ns: int = 0
    """When it happened, by the clock of its host, for comparing events of one host; 0 = not told."""


Observation = AttemptStart | Frame | Occurrence | Tick


class Change(StrEnum):
    """What a finding says about its episode."""

    OPEN = "open"
    UPDATE = "update"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Finding:
    """What a detector says when its judgement changes: once at the onset, on material change, once at the end.

    (kind, scope) names the episode it belongs to.
    """

    kind: Kind
    change: Change
    scope: IncidentScope
    attempt: str
    severity: Severity
    ranks: tuple[int, ...]
    """Culprits, first mover first; empty when the whole job is meant."""
    onset_step: int | None
    detected_step: int | None
    onset_time_s: float
    detected_time_s: float
    score: float
    """One scale for all kinds: robust sigmas above typical; inf where the value itself is impossible."""
    confidence: float
    """0..1; 1 where the evidence is exact (bits differ, a process is gone)."""
    summary: str
    """One sentence for the on-call engineer: what, where, since when, how much."""
    evidence: Mapping[str, Any]
    """Numbers against their baseline; plain JSON types only, non-finite numbers as the strings NaN, Inf, -Inf."""
    cause: str = ""
    """Cause class where known: worker, host, stage, data, runtime, network, storage."""


class Detector(Protocol):
    """One kind of judgement over one job, told of everything in log order. See the module's text for its duties."""

    name: str
    version: int
    """Raised when the same observations may give other findings or the snapshot's shape changes."""

    def observe(self, observation: Observation) -> Sequence[Finding]:
        """Take the next observation; return what changed in this detector's judgement (mostly nothing)."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """All state that decides the future: str keys; values are JSON types, bytes or numpy arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a snapshot of the same version; afterwards the answers are those of the detector that made it."""
        ...

    def inherit(self, before: Any) -> None:
        """Take up what `before`, a detector of the same kind, has learned of the job for good, and nothing else."""
        ...
