"""What a person does first about an incident: the steps of its kind, unless its evidence asks for others. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity
from rankwatch_service.incidents.hang.first_steps import hang_steps
from rankwatch_service.incidents.kinds import ENDED_BY_ITSELF, KINDS, has_norm_alone

ASKED_TO_END: Final = ("Nothing: the job was asked to end.",)
PASSED: Final = ("Nothing: it has ended by itself. It is watched for some minutes, in case it comes back.",)
NORM_ALONE: Final = (
    "Look at the data of that rank first, then at its device. Do not go back on this sign alone.",
    "If fingerprints differ as well, or the loss leaves its level, go back to a checkpoint from before the onset.",
)
"""Of a corruption whose only sign is a local gradient norm."""
GO_BACK: Final = frozenset({Kind.CORRUPTION, Kind.NONFINITE})
"""Kinds whose first step is to go back to a checkpoint."""
NO_CHECKPOINT: Final = (
    "Stop the job, and start it again from a checkpoint from before the onset; no good one is known to rankwatch."
)
"""In place of the first step, where that is to go back."""
LOSS_IS_FINITE: Final = "See whether the loss stays finite: while it does, nothing need be done."
"""In place of the first step about a value that is not finite, where it is neither the loss nor a gradient."""
WITHOUT_DEVICE: Final = (
    "See what else runs on the host (`top`), and which limits its container has (`cat /sys/fs/cgroup/cpu.max`)."
)
"""In place of the first step about a straggler, where ranks compute on the host's processors."""
DONE_ALONE: Final = ("Nothing, if this rank was meant to finish first: the others do not wait for it.",)


def first_steps(
    kind: str,
    severity: str,
    evidence: Mapping[str, Any],
    hosts: Sequence[str] = (),
    *,
    has_checkpoint: bool = True,
    accelerated: bool = True,
) -> list[str]:
    """The first steps for one incident, which may need none.

    Args:
        kind: of the incident.
        severity: of the incident.
        evidence: of its first mover.
        hosts: of the ranks that it names.
        has_checkpoint: a good checkpoint is known to go back to.
        accelerated: the ranks of its job compute on devices.
    """
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        return list(ASKED_TO_END if evidence.get("requested") else DONE_ALONE)
    if evidence.get(ENDED_BY_ITSELF):
        return list(PASSED)
    if has_norm_alone(kind, severity, evidence):
        return list(NORM_ALONE)
    steps = KINDS[Kind(kind)].first_steps
    if kind == Kind.NONFINITE and severity != Severity.CRITICAL:
        steps = (LOSS_IS_FINITE, *steps)
    elif kind in GO_BACK and not has_checkpoint:
        steps = (NO_CHECKPOINT, *steps[1:])
    if kind == Kind.STRAGGLER and not accelerated:
        steps = (WITHOUT_DEVICE, *steps[1:])
    return hang_steps(steps, evidence, hosts) if kind == Kind.HANG else list(steps)
