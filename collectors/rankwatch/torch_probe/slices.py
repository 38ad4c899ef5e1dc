"""Slices of a sharded model: what this rank holds of the parameters that are divided alike.

How a parameter is divided is read from torch's own records of it: the mesh and placements of a DTensor, the process
groups of FSDP1 and DDP. Nothing here starts a collective, so a rank knows of other ranks only what those records say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankwatch.layout import SLICES_MAX
from rankwatch.torch_probe.meshes import holders_of, strides_of
from rankwatch.torch_probe.watched_model import WatchedModel

CONTENT_CHARACTERS: Final = 16
"""Characters of the hash of a slice's parameters: 64 bits."""


@dataclass(frozen=True, slots=True)
class Division:
    """How the ranks of a job divide a parameter."""

    way: tuple[Any, ...]
    """What is divided alike: equal on all ranks, and different wherever other ranks share the parameter."""
    place: tuple[tuple[int, int], ...] = ()
    """This rank's index in each axis that divides it, and how many there are."""
    holders: tuple[int, ...] = ()
    """The ranks that are known to keep the same bits, this one included; empty if there are no others."""


@dataclass(slots=True)
class ModelSlice:
    """What this rank holds of some parameters."""

    content: str
    """Which part of which parameters: equal texts of two ranks mean the same part."""
    replica_of: int
    """The lowest rank that is known to keep the same bits; -1 if no other rank is known to."""
    members: list[int]
    """Indices of its parameters."""


WHOLE: Final = Division(("whole",))
"""A parameter of which every rank has all, but nothing says that ranks keep it equal."""


def divided(tensor: torch.Tensor) -> bool:
    """Whether this is a DTensor."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def division_of(tensor: Any) -> Division | None:
    """How a DTensor is divided; None if this rank has no part in its mesh."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    cut = divided_axes(tensor)
    holders = holders_of(mesh, cut)
    return Division(
        ("mesh", tuple(mesh.mesh_dim_names or ()), tuple(mesh.mesh.shape), strides_of(mesh), cut),
        tuple((coordinate[axis], mesh.size(axis)) for axis in cut),
        holders if len(holders) > 1 else (),
    )


def mesh_size(tensor: Any) -> int:
    """How many ranks the mesh of a DTensor has."""
    return int(tensor.device_mesh.size())


def divided_axes(tensor: Any) -> tuple[int, ...]:
    """The axes of its mesh over which a DTensor is divided; an axis of one rank divides nothing."""
    return tuple(
        axis
        for axis, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(axis) > 1
    )


def group_division(group: Any, replicas: Any = None, *, divides: bool = True) -> Division:
    """How a process group divides its flat parameters.

    Args:
        group: the ranks that divide them.
        replicas: the ranks that hold the same part; None: there are no replicas.
        divides: False: all ranks of `group` hold the whole.
    """
    ranks = torch.distributed.get_process_group_ranks(group)
    own = torch.distributed.get_rank()
    way = ("group", len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 0, replicas is not None, divides)
    holders = tuple(ranks) if not divides else ()
    if replicas is not None:
        holders = tuple(torch.distributed.get_process_group_ranks(replicas))
    place = ((ranks.index(own), len(ranks)),) if divides and len(ranks) > 1 else ()
    return Division(way, place, holders if len(holders) > 1 else ())


def ddp_division(model: WatchedModel) -> Division:
    """How a parameter that no wrapper divides is shared: DDP keeps it equal, else nothing is known to."""
    if model.ddp is None:
        return WHOLE
    ranks = tuple(torch.distributed.get_process_group_ranks(model.ddp.process_group))
    return Division(WHOLE.way, (), ranks if len(ranks) > 1 else ())


def slices_of(parameters: Sequence[tuple[str, Iterable[int], Division | None]], stage: int) -> list[ModelSlice] | None:
    """Put parameters that are divided alike into one slice.

    Args:
        parameters: name, shape of the whole, and division; None: this rank has no part of it. All ranks that share a
            parameter give it the same name and shape.
        stage: index of this rank's pipeline stage: stages may use the same names for different parameters.

    Returns:
        None if there would be more than `SLICES_MAX`.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, (_, _, division) in enumerate(parameters):
        if division is not None:
            alike.setdefault(division.way, []).append(index)
    if len(alike) > SLICES_MAX:
        return None
    slices = []
    for way, members in alike.items():
        what = [(parameters[index][0], tuple(parameters[index][1])) for index in members]
        digest = hashlib.sha256(repr((way, what, stage)).encode()).hexdigest()[:CONTENT_CHARACTERS]
        division = parameters[members[0]][2]
        assert division is not None
        place = " ".join(f"{index}/{count}" for index, count in division.place)
        slices.append(ModelSlice(f"{digest} {place}".strip(), min(division.holders, default=-1), members))
    return slices
