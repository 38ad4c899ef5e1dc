"""The unit of each rank, followed through attempts and launches.

A rank knows the UUID of its device once its model lies there, which may be after the first rows of a launch. Until then
it is taken for the unit that had its place on the host before.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rankwatch_detectors.base import Ints, Topology


def units_of(topology: Topology, before: Sequence[str]) -> list[str]:
    """A text for each rank's unit; no two are equal.

    Args:
        topology: the ranks as they are known now.
        before: their units, or those of an earlier attempt, by rank.
    """
    earlier = dict(zip(_counted([_host(unit) for unit in before]), before, strict=True))
    devices = zip(topology.device_uuid, _counted(topology.unit), strict=True)
    units = [f"{unit}#{number}" if device else "" for device, (unit, number) in devices]
    told = set(units)
    for rank, (host, place) in enumerate(_counted(topology.host)):
        if not units[rank]:
            assumed = earlier.get((host, place))
            units[rank] = assumed if assumed and assumed not in told else f"{host}/#{place}"
    return units


def came_from(units: Sequence[str], before: Sequence[str], *, same_attempt: bool) -> Ints:
    """Where each rank's unit was before: a rank, or -1 if it is new.

    Within an attempt ranks stay where they are, so that a unit whose device was not known is the one that is told now.
    """
    index = {unit: rank for rank, unit in enumerate(before)}
    found = [index.get(unit, -1) for unit in units]
    if same_attempt:
        found = [rank if place < 0 and _has_no_device(before[rank]) else place for rank, place in enumerate(found)]
    return np.asarray(found, dtype=np.int64)


def names_of(topology: Topology) -> list[str]:
    """What people call each rank."""
    return [f"Rank {rank} on {host}" if host else f"Rank {rank}" for rank, host in enumerate(topology.host)]


def _counted(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Each text, and how many equal ones stand before it."""
    seen: dict[str, int] = {}
    counted = []
    for text in texts:
        number = seen.get(text, 0)
        counted.append((text, number))
        seen[text] = number + 1
    return counted


def _host(unit: str) -> str:
    return unit.partition("/")[0]


def _has_no_device(unit: str) -> bool:
    return unit.partition("/")[2].startswith("#")
