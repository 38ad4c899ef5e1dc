"""Which trouble brings which other trouble with it: the correlator's tables, and nothing else."""

from __future__ import annotations

from enum import Enum
from typing import Final

from rankwatch_detectors.base import Kind

_LOSS: Final = frozenset({Kind.LOSS_SPIKE, Kind.LOSS_DIVERGENCE, Kind.GRAD_NORM})
_STANDSTILL: Final = frozenset({Kind.HANG, Kind.RANK_LOST, Kind.TELEMETRY_LOST})

ENDS: Final = _STANDSTILL | {Kind.RESTART_LOOP}
"""What a job that cannot go on comes to: whatever ends it ends it again after each restart."""

BRINGS: Final[dict[Kind, frozenset[Kind]]] = {
    Kind.DEVICE_FAULT: frozenset(Kind),
    Kind.DEVICE_DEGRADED: frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.DEVICE_DEGRADED}),
    Kind.NETWORK_DEGRADED: frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.NETWORK_DEGRADED}),
    # A dead rank leaves the others waiting; the launcher then ends them, and their agent with them.
    Kind.RANK_LOST: ENDS | {Kind.SLOWDOWN, Kind.STRAGGLER},
    Kind.TELEMETRY_LOST: ENDS | {Kind.SLOWDOWN},
    # A rank that hangs is ended by somebody in the end.
    Kind.HANG: ENDS | {Kind.SLOWDOWN, Kind.STRAGGLER},
    # Wrong numbers of one rank are everybody's after the next reduction.
    Kind.CORRUPTION: _LOSS | {Kind.CORRUPTION, Kind.NONFINITE, Kind.RESTART_LOOP},
    # A script that meets its own NaN may end by it.
    Kind.NONFINITE: _LOSS | {Kind.NONFINITE, Kind.CORRUPTION, Kind.RANK_LOST, Kind.RESTART_LOOP},
    Kind.GRAD_NORM: _LOSS,
    Kind.LOSS_SPIKE: _LOSS,
    # What grows without end overflows.
    Kind.LOSS_DIVERGENCE: _LOSS | {Kind.NONFINITE},
    # That nothing is heard of a host is never only a slow rank's doing: it is told by itself.
    Kind.STRAGGLER: frozenset({Kind.STRAGGLER, Kind.SLOWDOWN, Kind.HANG, Kind.RANK_LOST}),
    Kind.SLOWDOWN: frozenset({Kind.SLOWDOWN}),
    # While the loop lasts, each further end of the job is more of the same.
    Kind.RESTART_LOOP: ENDS,
}
"""What each kind may bring with it. Two kinds that bring each other: the earlier one did."""

_SPOILT: Final = frozenset({Kind.LOSS_DIVERGENCE, Kind.NONFINITE, Kind.CORRUPTION})

BECOMES: Final[dict[Kind, frozenset[Kind]]] = {Kind.LOSS_SPIKE: _SPOILT, Kind.GRAD_NORM: _SPOILT}
"""What a jump turns out to be when it does not just pass: the incident goes on under that name, whichever was first."""


class Reach(Enum):
    """Whom a cause can reach."""

    JOB = "job"
    """Every rank of the job: they wait for each other and share their gradients."""
    HOST = "host"
    """Ranks of the same hosts."""


_LOCAL: Final = frozenset({Kind.STRAGGLER, Kind.DEVICE_FAULT, Kind.DEVICE_DEGRADED})
_SHARED: Final = frozenset({Kind.SLOWDOWN, *_LOSS})


def reach(cause: Kind, effect: Kind) -> Reach:
    """How far `cause` reaches when it brings `effect`.

    A slow rank slows the whole job, but another slow rank, or a dead one, is its doing only on its own host; two hosts
    that corrupt data, or fall silent, do so for reasons of their own, and NaN ends the rank that computed it.
    """
    if effect in _SHARED:
        return Reach.JOB
    if effect in _LOCAL:
        return Reach.HOST
    alone = cause is effect and cause in {Kind.CORRUPTION, Kind.TELEMETRY_LOST, Kind.NETWORK_DEGRADED}
    ends = (cause, effect) == (Kind.NONFINITE, Kind.RANK_LOST)
    return Reach.HOST if cause in _LOCAL or alone or ends else Reach.JOB


CAUSE_ORDER: Final = (
    Kind.DEVICE_FAULT,
    Kind.NETWORK_DEGRADED,
    Kind.DEVICE_DEGRADED,
    Kind.RANK_LOST,
    Kind.CORRUPTION,
    Kind.NONFINITE,
    Kind.STRAGGLER,
    Kind.TELEMETRY_LOST,
    Kind.HANG,
    Kind.GRAD_NORM,
    Kind.LOSS_SPIKE,
    Kind.LOSS_DIVERGENCE,
    Kind.SLOWDOWN,
    Kind.RESTART_LOOP,
)
"""Among findings with the same onset the one whose kind stands first here is taken for the cause."""

LASTING: Final = frozenset(
    {Kind.STRAGGLER, Kind.SLOWDOWN, Kind.DEVICE_FAULT, Kind.DEVICE_DEGRADED, Kind.NETWORK_DEGRADED, Kind.RESTART_LOOP}
)
"""Kinds that a rollback does not end: the same processes go on, on the same hardware."""

FLAPS: Final = frozenset({Kind.HANG, Kind.TELEMETRY_LOST})
"""Kinds that end with the first sign of life and may come back at once: one incident, however often. The other
detectors watch for themselves that what they found stays away before they say that it ended."""

SPOILS_WEIGHTS: Final = frozenset({Kind.CORRUPTION, Kind.NONFINITE, Kind.LOSS_DIVERGENCE})
"""Kinds after whose onset a checkpoint is not to be trusted. A loss or norm that only jumps proves nothing wrong.
Training goes on for nothing while one lasts."""

HOST_WIDE: Final = frozenset(
    {Kind.STRAGGLER, Kind.HANG, Kind.DEVICE_FAULT, Kind.DEVICE_DEGRADED, Kind.NETWORK_DEGRADED}
)
"""Kinds whose subject is the host where they name most of its ranks: it is what these have in common."""

STANDS_STILL: Final = frozenset({Kind.HANG, Kind.RANK_LOST})
"""Kinds during which nothing moves: all GPUs are idle."""

ON_RECORD: Final = frozenset(
    {
        Kind.STRAGGLER,
        Kind.HANG,
        Kind.RANK_LOST,
        Kind.CORRUPTION,
        Kind.NONFINITE,
        Kind.DEVICE_FAULT,
        Kind.DEVICE_DEGRADED,
        Kind.NETWORK_DEGRADED,
    }
)
"""Kinds that are filed under the host and device of the ranks they name."""
