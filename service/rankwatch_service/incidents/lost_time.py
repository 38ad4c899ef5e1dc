"""GPU-hours that a job has lost to its incidents, by kind. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

HOUR_NS: Final = 3_600 * 10**9


@dataclass(frozen=True, slots=True)
class Loss:
    """What one incident costs, from its onset until it is resolved or the period ends."""

    kind: str
    from_unix_ns: int
    to_unix_ns: int
    gpu_hours_per_hour: float


def lost_by_kind(losses: Iterable[Loss], world_size: int) -> dict[str, float]:
    """GPU-hours lost by kind, most first.

    Incidents at the same time cannot together cost more than all GPUs of the job: where they would, each counts for its
    share.

    Args:
        losses: one for each incident.
        world_size: GPUs of the job; where it has none, its ranks.
    """
    edges: list[tuple[int, str, float]] = []
    for one in losses:
        if one.to_unix_ns > one.from_unix_ns:
            rate = min(float(world_size), one.gpu_hours_per_hour)
            edges += [(one.from_unix_ns, one.kind, rate), (one.to_unix_ns, one.kind, -rate)]
    edges.sort()
    rates: dict[str, float] = defaultdict(float)
    lost: dict[str, float] = defaultdict(float)
    before = edges[0][0] if edges else 0
    for at, kind, change in edges:
        hours = (at - before) / HOUR_NS
        in_all = sum(rates.values())
        share = world_size / in_all if in_all > world_size else 1.0
        for of, rate in rates.items():
            lost[of] += hours * rate * share
        # Sums of fractions leave a tiny remainder, also below zero.
        rates[kind] = max(0.0, rates[kind] + change)
        before = at
    return dict(sorted(lost.items(), key=lambda item: (-item[1], item[0])))


def cost_unit(accelerated: bool) -> str:
    """What the hours of a job's ranks are called, by its `accelerated`."""
    return "GPU-hours" if accelerated else "rank-hours"
