"""The table of kinds: all that is known of a kind of incident, in one row.

What adds a kind adds its row here, its member in `rankwatch_detectors.base.Kind`, its runbook in docs/incidents and its
label in the dashboard's `format.js`; `tests/service/incidents/test_kinds.py` compares them. How severe an incident is
depends on its findings, not on its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankwatch_detectors.base import Kind, Severity

_LOSS: Final = frozenset({Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE, Kind.GRAD_NORM})
_SPOILT: Final = frozenset({Kind.LOSS_DIVERGENCE, Kind.NONFINITE, Kind.CORRUPTION})
_ENDS: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST, Kind.RESTART_LOOP})


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTraits:
    """What holds for all incidents of a kind."""

    label: str
    """Its name on pages."""
    may_cause: frozenset[Kind]
    """Kinds that it may cause. Of two kinds that may cause each other the earlier incident is the cause."""
    first_steps: tuple[str, ...]
    """What a person does first, in the order in which it is worth trying: the runbook in short."""
    first_step: str
    """The first of them in a clause, where there is room for one only."""
    actions: tuple[str, ...] = ("wait", "pause")
    """What helps, best first: a `policy.Action`, or waiting for what usually passes by itself."""
    becomes: frozenset[Kind] = frozenset()
    """What it turns out to be when it does not pass: the incident goes on under that kind."""
    ends_job: bool = False
    """A job that cannot go on comes to this: what ends it ends it again after each restart."""
    stands_still: bool = False
    """Nothing moves meanwhile: all GPUs are idle."""
    spoils_weights: bool = False
    """A checkpoint from after its onset is not to be trusted, and training goes on for nothing while it lasts."""
    is_lasting: bool = False
    """A rollback does not end it: the same processes go on, on the same hardware."""
    flaps: bool = False
    """It ends with the first sign of life and may be back at once: one incident, however often. Detectors of other
    kinds watch for themselves that what they found stays away before they report its end."""
    is_host_wide: bool = False
    """Its subject is the host where it names most of the host's ranks."""
    is_on_record: bool = False
    """It is filed under the host and the device of the ranks that it names."""


KINDS: Final[dict[Kind, KindTraits]] = {
    Kind.DEVICE_FAULT: KindTraits(
        label="Device fault",
        may_cause=frozenset(Kind),
        first_steps=(
            "Read the logs of kernel and driver on that host: an Xid, an ECC error or a bus error names the device.",
            "Relaunch without the device, or without its host; a device that has failed once fails again.",
            "What was computed on it since the onset is in doubt: go back to a checkpoint from before it.",
        ),
        first_step="move the work off that device, and start again from the newest good checkpoint",
        actions=("relaunch", "checkpoint", "pause"),
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
    ),
    Kind.NETWORK_DEGRADED: KindTraits(
        label="Network degraded",
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.NETWORK_DEGRADED}),
        first_steps=(
            "Look at the link and the switch port: error counters, speed, a flapping port.",
            "Several hosts of one rack: their switch.",
            "It slows the job: checkpoint, and go on without the host.",
        ),
        first_step="look at the link and the switch port of that host",
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
    ),
    Kind.DEVICE_DEGRADED: KindTraits(
        label="Device degraded",
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.DEVICE_DEGRADED}),
        first_steps=(
            "See what limits the device: temperature, power cap, clocks, link width (`nvidia-smi -q -d PERFORMANCE`).",
            "Several devices of one host: its cooling or its power supply.",
            "It slows the job: checkpoint, and go on without the host.",
        ),
        first_step="see what limits that device: heat, power or its link",
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
    ),
    Kind.RANK_LOST: KindTraits(
        label="Rank lost",
        # A dead rank leaves the others waiting; the launcher then ends them, and their agent with them.
        may_cause=_ENDS | {Kind.STRAGGLER, Kind.SLOWDOWN},
        first_steps=(
            "SIGKILL that nobody sent: look for the kernel's out-of-memory killer on that host.",
            "SIGSEGV, SIGBUS, SIGABRT: look at the device and kernel logs. An exception: its text is in the evidence.",
            "Nothing restarts the job: start it from the newest good checkpoint.",
        ),
        first_step="read the end of that rank's own log",
        actions=("wait", "relaunch"),
        ends_job=True,
        stands_still=True,
        is_on_record=True,
    ),
    Kind.CORRUPTION: KindTraits(
        label="Data corruption",
        # Wrong numbers of one rank are in all ranks after the next reduction.
        may_cause=_LOSS | {Kind.NONFINITE, Kind.CORRUPTION, Kind.RESTART_LOOP},
        first_steps=(
            "Bits differ: go back to a checkpoint from before the onset; since then the damage is in all weights.",
            "Take the host out or watch it: such faults are permanent more often than not.",
            "Only a local gradient norm: look at the rank's data first, then at its device.",
        ),
        first_step="roll back to a checkpoint from before it, and take the host out",
        actions=("rollback", "relaunch", "pause"),
        spoils_weights=True,
        is_on_record=True,
    ),
    Kind.NONFINITE: KindTraits(
        label="NaN / Inf",
        # A script that checks for NaN may end by it.
        may_cause=_LOSS | {Kind.NONFINITE, Kind.CORRUPTION, Kind.RANK_LOST, Kind.RESTART_LOOP},
        first_steps=(
            "Training after this step is worthless: roll back to the newest good checkpoint, or relaunch from it.",
            "The same rank again afterwards: suspect its device. The same step on another rank: skip its batch.",
            "All ranks at once: the model or the learning rate.",
        ),
        first_step="roll back to the newest good checkpoint from before that step",
        actions=("rollback", "relaunch", "pause"),
        spoils_weights=True,
        is_on_record=True,
    ),
    Kind.STRAGGLER: KindTraits(
        label="Straggler",
        # The silence of a host is never only the effect of a slow rank: it is an incident of its own.
        may_cause=frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.RANK_LOST}),
        first_steps=(
            "See the heat map of busy time: one bright row is a rank, a block is a host.",
            "Run `nvidia-smi` on the host: compare temperature, clock and power of its devices, and what else runs.",
            "It costs more than a restart: checkpoint, and go on without the host.",
        ),
        first_step="compare temperature, clock and power of its device with its neighbours'",
        actions=("wait", "relaunch", "pause", "checkpoint"),
        is_lasting=True,
        is_host_wide=True,
        is_on_record=True,
    ),
    Kind.TELEMETRY_LOST: KindTraits(
        label="Telemetry lost",
        may_cause=_ENDS | {Kind.SLOWDOWN},
        first_steps=(
            "Other hosts make steps: only the collector is away; see its log, its disk, the way to the service.",
            "Training stands still as well: the host is probably gone; see its console.",
            "All hosts at once: look at the service and the network in front of it.",
        ),
        first_step="see whether other hosts make steps: then only the collector is away",
        ends_job=True,
        flaps=True,
    ),
    Kind.HANG: KindTraits(
        label="Hang",
        # A rank that hangs is ended by somebody in the end.
        may_cause=_ENDS | {Kind.STRAGGLER, Kind.SLOWDOWN},
        first_steps=(
            "Read the stack of the named rank in the evidence: its innermost frame is where it stands.",
            "Stopped by a signal: `kill -CONT` its process. Nothing tells ranks apart: look at the network.",
            "A job that hangs obeys no rollback: relaunch it, or end its processes and start it from a checkpoint.",
        ),
        first_step="look at where the named rank stands; collectives wait for it",
        actions=("relaunch",),
        ends_job=True,
        stands_still=True,
        flaps=True,
        is_host_wide=True,
        is_on_record=True,
    ),
    Kind.GRAD_NORM: KindTraits(
        label="Gradient norm",
        may_cause=_LOSS,
        first_steps=(
            "Look at the loss of the following steps: if it stays calm, nothing need be done.",
            "Norms that jump again and again: lower the learning rate or the clipping threshold.",
        ),
        first_step="look at the loss of the next steps: while it stays calm, nothing need be done",
        becomes=_SPOILT,
    ),
    Kind.LOSS_SPIKE: KindTraits(
        label="Loss spike",
        may_cause=_LOSS,
        first_steps=(
            "Wait some steps: most spikes come back by themselves.",
            "Look at the gradient norm and the batch of that step; the same spike after a rollback: skip the batch.",
        ),
        first_step="wait some steps; then look at the gradient norm and the batch of that step",
        becomes=_SPOILT,
    ),
    Kind.LOSS_DIVERGENCE: KindTraits(
        label="Loss divergence",
        # What grows without end overflows.
        may_cause=_LOSS | {Kind.NONFINITE},
        first_steps=(
            "A planned change of data or schedule? Acknowledge it: it closes when the new level has settled.",
            "Else go back to a good checkpoint from before the onset, with a lower learning rate or other data.",
            "It diverges again at another step with the same data: suspect a device.",
        ),
        first_step="unless it was planned, roll back to a checkpoint from before it",
        actions=("rollback", "relaunch", "pause"),
        spoils_weights=True,
    ),
    Kind.SLOWDOWN: KindTraits(
        label="Slowdown",
        may_cause=frozenset({Kind.SLOWDOWN}),
        first_steps=(
            "See which phase grew: collective is the network, data_wait the storage, forward and backward the devices.",
            "See what changed shortly before the onset: it is on the timeline.",
            "All devices at once: power cap, cooling, clock policy.",
        ),
        first_step="look at which phase grew, and at what changed shortly before",
        is_lasting=True,
    ),
    Kind.RESTART_LOOP: KindTraits(
        label="Restart loop",
        # While the loop lasts, each further end of the job is more of the same.
        may_cause=_ENDS,
        first_steps=(
            "Look at the lost ranks of these launches: the same host is hardware, the same exception code or data.",
            "Stop the launcher from restarting: it only costs GPU-hours.",
            "Always the same step: skip its batch, or go back one checkpoint further.",
        ),
        first_step="stop the launcher, then read the error that repeats",
        actions=("stop",),
        ends_job=True,
        is_lasting=True,
    ),
}
"""In the order of causes: of findings with the same onset the one whose kind stands first here is the cause."""

CAUSE_ORDER: Final = tuple(KINDS)

ASKED_TO_END: Final = ("Nothing: the job was asked to end.",)
DONE_ALONE: Final = ("Nothing, if this rank was to be done first: the others do not wait for it.",)


def kinds_where(holds: Callable[[KindTraits], bool]) -> frozenset[Kind]:
    """The kinds whose row says so."""
    return frozenset(kind for kind, traits in KINDS.items() if holds(traits))


def first_steps(kind: str, severity: str, evidence: Mapping[str, Any]) -> list[str]:
    """The first steps for one incident, which may need none.

    Args:
        kind: of the incident.
        severity: of the incident.
        evidence: of its first mover.
    """
    if kind == Kind.RANK_LOST and severity == Severity.INFO:
        return list(ASKED_TO_END if evidence.get("requested") else DONE_ALONE)
    return list(KINDS[Kind(kind)].first_steps)
