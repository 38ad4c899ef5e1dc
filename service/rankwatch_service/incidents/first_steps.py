"""What a person does first about each kind of incident: the runbooks in docs/incidents in a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity

FIRST_STEPS: Final[dict[str, tuple[str, ...]]] = {
    Kind.NONFINITE: (
        "Training after this step is worthless: roll back to the newest good checkpoint, or relaunch from it.",
        "The same rank again afterwards: suspect its device. The same step on another rank: skip its batch.",
        "All ranks at once: the model or the learning rate.",
    ),
    Kind.LOSS_SPIKE: (
        "Wait some steps: most spikes come back by themselves.",
        "Look at the gradient norm and the batch of that step; the same spike after a rollback: skip the batch.",
    ),
    Kind.LOSS_DIVERGENCE: (
        "A planned change of data or schedule? Acknowledge it: it closes when the new level has settled.",
        "Else go back to a good checkpoint from before the onset, with a lower learning rate or other data.",
        "It diverges again at another step with the same data: suspect a device.",
    ),
    Kind.GRAD_NORM: (
        "Look at the loss of the following steps: if it stays calm, nothing need be done.",
        "Norms that jump again and again: lower the learning rate or the clipping threshold.",
    ),
    Kind.CORRUPTION: (
        "Bits differ: go back to a checkpoint from before the onset; the damage is in everybody's weights since then.",
        "Take the host out or watch it: such faults are permanent more often than not.",
        "Only a local gradient norm: look at the rank's data first, then at its device.",
    ),
    Kind.STRAGGLER: (
        "See the heat map of busy time: one bright row is a rank, a block is a host.",
        "Run `nvidia-smi` on the host: compare temperature, clock and power of its devices; see what else runs there.",
        "It costs more than a restart: checkpoint, and go on without the host.",
    ),
    Kind.SLOWDOWN: (
        "See which phase grew: collective is the network, data_wait the storage, forward and backward the devices.",
        "See what changed shortly before the onset: it is on the timeline.",
        "All devices at once: power cap, cooling, clock policy.",
    ),
    Kind.HANG: (
        "Read the stack of the named rank in the evidence: its innermost frame is where it stands.",
        "Stopped by a signal: `kill -CONT` its process. Nothing tells ranks apart: look at the network.",
        "A job that hangs obeys no rollback: relaunch it, or end its processes and start it from a checkpoint.",
    ),
    Kind.RANK_LOST: (
        "SIGKILL that nobody sent: look for the kernel's out-of-memory killer on that host.",
        "SIGSEGV, SIGBUS, SIGABRT: look at the device and kernel logs. An exception: its text is in the evidence.",
        "Nothing restarts the job: start it from the newest good checkpoint.",
    ),
    Kind.TELEMETRY_LOST: (
        "Other hosts make steps: only the collector is away; see the agent's log, its disk, the way to the service.",
        "Training stands still as well: the host is probably gone; see its console.",
        "All hosts at once: look at the service and the network in front of it.",
    ),
    Kind.RESTART_LOOP: (
        "Look at the lost ranks of these launches: the same host is hardware, the same exception code or data.",
        "Stop the launcher from restarting: it only costs GPU-hours.",
        "Always the same step: skip its batch, or go back one checkpoint further.",
    ),
}
"""By kind, in the order in which they are worth trying."""

ASKED_TO_END: Final = ("Nothing: the job was asked to end.",)
DONE_ALONE: Final = ("Nothing, if this rank was to be done first: the others do not wait for it.",)


def first_steps(kind: str, severity: str, evidence: Mapping[str, Any]) -> list[str]:
    """The first steps for an incident; none for a kind that has no runbook."""
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        return list(ASKED_TO_END if evidence.get("requested") else DONE_ALONE)
    return list(FIRST_STEPS.get(kind, ()))
