"""Inputs and outputs of detectors: the only types that cross the border of this package.

A detector is a pure, deterministic function of its observations, in their order: `AttemptStart` when an attempt begins
or its topology changes, `Frame` when all ranks' values of one step are complete (or late), `Occurrence` for single
events, `Tick` about once a second with the ranks' `Presence`. It is given those that it `reads`. It looks at no clock,
does no I/O, and its memory is constant in steps and linear in ranks. It scores, then decides, then learns: its
baseline never learns from what it considers abnormal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from rankwatch_detectors.metric_rule import MetricRule
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
    HOST_DEGRADED = "host_degraded"
    NETWORK_DEGRADED = "network_degraded"
    RESTART_LOOP = "restart_loop"
    CHECKPOINT_FAILED = "checkpoint_failed"
    CHECKPOINT_OVERDUE = "checkpoint_overdue"
    RESTORE_FAILED = "restore_failed"
    LIMIT_REACHED = "limit_reached"
    FORGED_TELEMETRY = "forged_telemetry"
    METRIC = "metric"
    ALERT = "alert"


class Severity(StrEnum):
    """How urgent: critical: a person or a policy must act now; warning: soon; info: no action is needed."""

    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


GRAVITY: Final = (Severity.INFO, Severity.WARNING, Severity.CRITICAL)
"""Mildest first."""


class StepKind(StrEnum):
    """Kind of a step. Only `train` steps are compared with each other."""

    TRAIN = "train"
    EVAL = "eval"
    CHECKPOINT = "checkpoint"


HOST_TYPES: Final = frozenset({"", "cpu", "meta"})
"""Types of torch devices that are no accelerator; "": not known."""


def on_devices(uuids: Iterable[str], types: Iterable[str]) -> bool:
    """Whether any rank computes on a device, by the UUIDs and the types of the devices of all.

    >>> on_devices(["", ""], ["cpu", "cuda"]), on_devices(["", ""], ["cpu", ""])
    (True, False)
    """
    return any(uuids) or not HOST_TYPES.issuperset(types)


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
    slices: tuple[Ints, ...] = ()
    """[n][rank]: a number for the bits that the rank's n-th slice must have, equal on ranks that are known to keep them
    equal; -1: none is. `fingerprint.n` of ranks with equal numbers, of any n, are compared."""
    optimizers: int = 0
    """Number of optimizers, 0: unknown. With several, as in a GAN, losses rise and fall in turn."""
    device_type: tuple[str, ...] = ()
    """Where each rank's parameters lie, as torch calls it: cuda, xpu, ..., cpu; "" or no entries: not known."""
    switch: tuple[str, ...] = ()
    """The switch of each rank's host; "" or no entries: not known."""

    @property
    def accelerated(self) -> bool:
        """Whether any rank computes on a device. CPU time is then that of launching its work, and judges nobody."""
        return on_devices(self.device_uuid, self.device_type)

    @property
    def unit(self) -> tuple[str, ...]:
        """Identity of each rank's hardware, "host/device_uuid"; unlike rank numbers it is stable across restarts."""
        return tuple(f"{host}/{device}" for host, device in zip(self.host, self.device_uuid, strict=True))

    @property
    def peer_group(self) -> Ints:
        """Each rank's peer group, as a number: ranks with the same (pp, tp, cp, ep) do the same work."""
        keys = np.stack([self.pp, self.tp, self.cp, self.ep])
        return np.asarray(np.unique(keys, axis=1, return_inverse=True)[1]).reshape(-1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class AttemptStart:
    """An attempt began, more of its topology became known, or the rules on its metrics changed.

    `attempt` is LAUNCH.k; k > 0 follows a rollback.
    """

    attempt: str
    topology: Topology
    time_s: float
    rules: tuple[MetricRule, ...] = ()
    """Those of people on this job's metrics."""

    @property
    def launch(self) -> str:
        """The launch: the part of the attempt's text before k."""
        return self.attempt.rpartition(".")[0]


@dataclass(frozen=True, slots=True)
class Frame:
    """All ranks' values of one step of one attempt: `values[name][rank]` is valid only if `present[name][rank]`.

    NaN and Inf are values. Frames of one family come in step order within an attempt, except late ones. Detectors must
    not write to the arrays.
    """

    attempt: str
    family: str
    """"steps" (written at the step's end), "values" (late values: loss, norms), or "timed" (a step together with what
    devices measured of it)."""
    step: int
    kind: StepKind
    time_s: float
    """Stream time at which the frame closed (from ticks), for durations and display."""
    values: Mapping[str, Floats]
    present: Mapping[str, Bools]
    exact: Mapping[str, Ints] = field(default_factory=dict)
    """Values that must not be rounded: `fingerprint`, `nonfinite`, `nonfinite_first`; `present` applies to them too."""
    finite: bool = False
    """True: all values, even those not present, are known to be finite, and need not be checked again."""
    late: bool = False
    """The rows arrived after their step's frame had closed without them. If ranks go at their own pace, these are all
    rows of all but the fastest ranks."""
    awaits_times: bool = False
    """What devices measure of this step comes later: a frame "timed" will have the step's times, devices' included."""
    computed: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of results that depend on the values alone and that several detectors use, such as medians."""
    ranks: int = field(init=False, repr=False, compare=False)
    """Entries of each array; 0 if there is none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", next((here.size for here in self.present.values()), 0))


UNREPORTED = "unreported"
"""The phase if only finished steps are reported, as by the lines of a log, and what happens in between is unknown."""


TextColumn = Literal["phase", "state", "os_state", "doing"]


@dataclass(frozen=True, slots=True)
class Presence:
    """The newest progress block of every rank of the current attempt, one entry for each rank."""

    attempt: str
    has_reported: Bools
    """False: no progress block of this rank has arrived yet, and its other entries are meaningless."""
    received_s: Floats
    """Stream time at which the last block arrived."""
    sent_s: Floats
    """When its agent sent the block, by its host's clock; use it only for differences between blocks of one rank, and
    for a block's delay compared with the usual one. Stream time if the agent does not report it."""
    step: Ints
    phase: tuple[str, ...]
    phase_age_s: Floats
    """How long the rank had been in that phase when its agent read the block."""
    step_age_s: Floats
    collective_seq: Ints
    state: tuple[str, ...]
    """running, held, left or exited, as in `rankwatch.wire.Progress`."""
    os_state: tuple[str, ...]
    cpu_s: Floats
    outside_s: Floats
    """How long the rank had been outside of its step when its agent read the block: the step's work was done, and the
    next had not begun. -1: within a step."""
    doing: tuple[str, ...]
    """What a rank that stands still does, as in `rankwatch.wire.Progress`; "": not known."""
    computed: dict[str, frozenset[str]] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of what `told` gives."""

    def reported(self, column: TextColumn) -> frozenset[str]:
        """The different texts of a column: few, whatever the number of ranks."""
        if column not in self.computed:
            self.computed[column] = frozenset(getattr(self, column))
        return self.computed[column]

    def where(self, column: TextColumn, *wanted: str) -> Bools:
        """Ranks whose text is one of the wanted ones."""
        reported = self.reported(column)
        if reported.isdisjoint(wanted):
            return np.zeros(self.has_reported.size, dtype=np.bool_)
        if reported.issubset(wanted):
            return np.ones(self.has_reported.size, dtype=np.bool_)
        return np.fromiter(
            (text in wanted for text in getattr(self, column)), dtype=np.bool_, count=self.has_reported.size
        )


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: the only clock of a detector. `now_s` never decreases."""

    now_s: float
    presence: Presence | None


@dataclass(frozen=True, slots=True)
class DeviceCounters:
    """Counters of a job's devices of one kind in one slot of time; slots come in order, except what agents sent late.

    `values[name][device]` is valid only if `present[name][device]`.
    """

    slot: int
    time_s: float
    """Stream time at which the slot was over."""
    devices: tuple[tuple[str, str], ...]
    """Host and UUID of each device, by its number; the UUID is empty where the driver does not report it. Of a port its
    name, of a host empty."""
    values: Mapping[str, Floats]
    present: Mapping[str, Bools]
    kind: str = "gpu"
    """gpu, port or host."""


@dataclass(frozen=True, slots=True)
class Occurrence:
    """One event (`rankwatch.wire.EVENT_KINDS`) or a control record.

    The service itself reports those of `SERVICE_KINDS`: `order` (fields: order, phase, action, step), `gap` (fields:
    missing, boot), `accepted` (fields: kinds, scopes): a person resolved an incident of these kinds whose findings were
    still open, what it refused: `limit` and `forged` (fields: see `refusals`), and `alert` (see `alerts`): what a
    Prometheus reports about the job.
    """

    kind: str
    attempt: str
    host: str
    time_s: float
    rank: int | None
    step: int | None
    fields: Mapping[str, Any]
    unix_ns: int = 0
    """When it happened, by its host's clock, for comparing events of one host; 0: not reported."""


SERVICE_KINDS: Final = frozenset({"order", "gap", "accepted", "limit", "forged", "alert"})
"""Kinds of occurrences that the service alone reports. An agent's event of such a kind is not one."""

Observation = AttemptStart | DeviceCounters | Frame | Occurrence | Tick
OBSERVATIONS: Final[frozenset[type[Observation]]] = frozenset({AttemptStart, DeviceCounters, Frame, Occurrence, Tick})


class Change(StrEnum):
    """What a finding does to its episode."""

    OPEN = "open"
    UPDATE = "update"
    CLOSE = "close"


@dataclass(frozen=True, slots=True)
class Finding:
    """A change of a detector's judgement: once at the onset, at each material change, and once at the end.

    (kind, scope) identifies its episode.
    """

    kind: Kind
    change: Change
    scope: IncidentScope
    attempt: str
    severity: Severity
    ranks: tuple[int, ...]
    """Culprits, first mover first; empty if the finding is about the whole job."""
    onset_step: int | None
    detected_step: int | None
    onset_time_s: float
    detected_time_s: float
    score: float
    """One scale for all kinds: robust sigmas above typical; inf if the value itself is impossible."""
    confidence: float
    """0..1; 1 if the evidence is exact (bits differ, a process is gone)."""
    summary: str
    """One sentence for the on-call engineer: what, where, since when, how much."""
    evidence: Mapping[str, Any]
    """Numbers against their baseline; plain JSON types only, non-finite numbers as the strings NaN, Inf, -Inf."""
    cause: str = ""
    """Cause class if known: worker, device, host, stage, data, communication, runtime, network, storage, disk."""


class Detector(Protocol):
    """One kind of judgement over one job, which gets all observations in log order. The module states its duties."""

    name: str
    version: int
    """Raised when the same observations may give other findings or the snapshot's shape changes."""

    @property
    def reads(self) -> frozenset[type[Observation]]:
        """The types of observations that can change its judgement in this attempt; it need not be given others."""
        ...

    def observe(self, observation: Observation) -> Sequence[Finding]:
        """Process the next observation; return what changed in this detector's judgement (mostly nothing)."""
        ...

    def snapshot(self) -> dict[str, Any]:
        """All state that decides the future: str keys; values are JSON types, bytes or numpy arrays."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a snapshot of the same version; afterwards it answers like the detector that made the snapshot."""
        ...

    def inherit(self, before: Any) -> None:
        """Copy from `before`, a detector of the same kind, only what it has learned of the job for good."""
        ...
