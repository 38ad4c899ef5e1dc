"""Answers about an incident that hold for its kind: what is normal, and what it does to its job. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF

_NORMAL: Final[Mapping[Kind, str]] = {
    Kind.DEVICE_FAULT: "a device reports no faults",
    Kind.NETWORK_DEGRADED: "links keep their speed and lose almost nothing",
    Kind.DEVICE_DEGRADED: "a device keeps its clocks, as its neighbours do",
    Kind.HOST_DEGRADED: "a host has cores, memory and disk to spare",
    Kind.RESTORE_FAILED: "all ranks load the checkpoint and train on",
    Kind.CHECKPOINT_FAILED: "every save succeeds on all ranks",
    Kind.RANK_LOST: "all ranks live until the job ends",
    Kind.CORRUPTION: "replicas have equal bits",
    Kind.NONFINITE: "every value is finite",
    Kind.STRAGGLER: "ranks that do the same work take equally long",
    Kind.TELEMETRY_LOST: "every host reports every second",
    Kind.HANG: "all ranks go on to the next step",
    Kind.GRAD_NORM: "the gradient norm stays near its usual level",
    Kind.LOSS_SPIKE: "the loss stays near its trend",
    Kind.LOSS_DIVERGENCE: "the loss falls or stays level",
    Kind.SLOWDOWN: "steps take as long as before",
    Kind.RESTART_LOOP: "a launch gets further than the one before",
    Kind.CHECKPOINT_OVERDUE: "checkpoints are saved at their usual pace",
    Kind.FORGED_TELEMETRY: "all telemetry comes from enrolled agents",
    Kind.LIMIT_REACHED: "a job stays below every limit",
    Kind.METRIC: "the condition of the rule does not hold",
    Kind.ALERT: "the alert does not fire",
}

_IMPACT: Final[Mapping[Kind, str]] = {
    Kind.DEVICE_FAULT: "what was computed on that device is in doubt, and it may end the job",
    Kind.NETWORK_DEGRADED: "collectives over that link may slow all ranks down",
    Kind.DEVICE_DEGRADED: "its rank may become slow, and the others wait for it",
    Kind.HOST_DEGRADED: "its ranks may become slow, or be killed",
    Kind.RESTORE_FAILED: "the job cannot go on until a checkpoint is loaded",
    Kind.CHECKPOINT_FAILED: "a fault now would lose all steps since the last good checkpoint",
    Kind.RANK_LOST: "the other ranks wait for it, or end with it",
    Kind.CORRUPTION: "weights are wrong since the onset, and so are checkpoints saved since then",
    Kind.NONFINITE: "training since the onset is worthless",
    Kind.STRAGGLER: "ranks in lockstep wait for the slow one in every step",
    Kind.TELEMETRY_LOST: "nobody knows whether these ranks train, and their faults are not found",
    Kind.HANG: "training stands still",
    Kind.GRAD_NORM: "nothing is lost yet; the loss may follow",
    Kind.LOSS_SPIKE: "nothing is lost if the loss comes back",
    Kind.LOSS_DIVERGENCE: "training since the onset is probably wasted",
    Kind.SLOWDOWN: "every step takes longer",
    Kind.RESTART_LOOP: "the job makes no progress, however often it restarts",
    Kind.CHECKPOINT_OVERDUE: "a fault now would lose more steps than usual",
    Kind.FORGED_TELEMETRY: "none on training: what was refused has changed nothing",
    Kind.LIMIT_REACHED: "none on training; what is above the limit is not watched",
    Kind.METRIC: "as severe as the rule says: nothing else is known to be wrong",
    Kind.ALERT: "what the rule in Prometheus says, in the evidence",
}


def normal(kind: str) -> str:
    """What is normal where there is no incident of this kind, as a clause."""
    return _NORMAL[Kind(kind)]


def impact(kind: str, severity: str, evidence: Mapping[str, Any]) -> str:
    """What an incident does to its job while it lasts, as a clause without figures.

    Args:
        kind: of the incident.
        severity: of the incident.
        evidence: of its first mover.
    """
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        return "none: nothing is wrong"
    if evidence.get(ENDED_BY_ITSELF):
        return "none any more: it has ended by itself"
    return _IMPACT[Kind(kind)]
