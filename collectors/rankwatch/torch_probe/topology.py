"""How a job's ranks share the model and the batch.

Reads torch's device meshes: which axis a dimension is, and what a mesh was sliced from. Creates none.

Reads which work a rank does, if the script does not say it: from device meshes, Megatron and DeepSpeed.

A framework is asked only if the script has imported it. Nothing here starts a collective or creates a group.

Slices of a sharded model: what this rank holds of the parameters that are divided alike.

How a parameter is divided is read from torch's own records of it: the mesh and placements of a DTensor, the process
groups of FSDP1 and DDP. Nothing here starts a collective, so a rank knows of other ranks only what those records say.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from rankwatch.layout import SLICES_MAX
from rankwatch.torch_probe.watched_model import WatchedModel, WatchedModels

AXIS_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "dp": ("dp", "dp_replicate", "dp_shard", "ddp", "fsdp", "replicate", "shard", "data", "data_parallel"),
    "tp": ("tp", "tensor", "tensor_parallel", "model_parallel"),
    "pp": ("pp", "pipe", "pipeline", "pipeline_parallel"),
    "cp": ("cp", "sp", "context", "context_parallel", "sequence_parallel"),
    "ep": ("ep", "expert", "expert_parallel"),
}
"""Names of mesh dimensions, as torchtitan, Lightning, Accelerate, DeepSpeed and PyTorch's tutorials use them. Where an
axis has several dimensions, the outer ones count first."""


def axis_of(name: str) -> str | None:
    """The axis that a dimension of this name belongs to."""
    return next((axis for axis, known in AXIS_NAMES.items() if name.lower() in known), None)


def root_mesh(mesh: Any) -> Any:
    """The mesh that this one was sliced from; itself if it was not, or if this version of torch does not show it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    known: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return known.get_root_mesh(mesh) if hasattr(known, "get_root_mesh") else mesh


def strides_of(mesh: Any) -> tuple[int, ...]:
    """The distance between the ranks of neighbours in each dimension; 0 in one of a single rank.

    It is the same in all parts of a mesh, and differs between meshes of the same shape.
    """
    ranks = mesh.mesh
    first = int(ranks[(0,) * ranks.dim()])
    return tuple(
        int(ranks[tuple(int(axis == at) for at in range(ranks.dim()))]) - first if size > 1 else 0
        for axis, size in enumerate(ranks.shape)
    )


def holders_of(mesh: Any, divided: tuple[int, ...]) -> tuple[int, ...]:
    """The ranks that hold the same part of a parameter which is divided over some dimensions of a mesh.

    They are those with the same place in these dimensions, and of the mesh that this one was sliced from, all ranks
    along its tensor-parallel dimension: tensor parallelism computes what it does not divide alike on all of them.
    """
    own = mesh.get_coordinate()
    same = tuple(own[axis] if axis in divided else slice(None) for axis in range(mesh.mesh.dim()))
    holders = [int(rank) for rank in mesh.mesh[same].flatten()]
    whole = root_mesh(mesh)
    names = tuple(whole.mesh_dim_names or ())
    beyond = [at for at, name in enumerate(names) if axis_of(name) == "tp" and name not in (mesh.mesh_dim_names or ())]
    if not beyond:
        return tuple(holders)
    found: set[int] = set()
    for rank in holders:
        place = (whole.mesh == rank).nonzero()[0].tolist()
        along = tuple(slice(None) if at in beyond else place[at] for at in range(len(place)))
        found.update(int(other) for other in whole.mesh[along].flatten())
    return tuple(sorted(found))


_MEGATRON: Final = {
    "dp": "get_data_parallel_rank",
    "tp": "get_tensor_model_parallel_rank",
    "pp": "get_pipeline_model_parallel_rank",
    "cp": "get_context_parallel_rank",
    "ep": "get_expert_model_parallel_rank",
}
_DEEPSPEED: Final = {
    "dp": ("get_data_parallel_rank",),
    "tp": ("get_tensor_model_parallel_rank", "get_model_parallel_rank"),
    "pp": ("get_pipeline_model_parallel_rank", "get_pipe_parallel_rank"),
    "cp": ("get_sequence_parallel_rank",),
}
"""Methods of the object that the script passes to DeepSpeed as `mpu`."""


def placed_by(models: WatchedModels, failed: Callable[[Exception], None]) -> dict[str, int]:
    """Read the topology, and let the models know that it is known; `failed` gets what this raises."""
    try:
        found = read_topology(models.parameters)
    except Exception as error:  # noqa: BLE001 -- private names of a torch or framework that is not known
        failed(error)
        return {}
    if found:
        models.place()
    return found


def read_topology(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """This rank's index in each axis that can be read; empty if it is not known.

    Args:
        parameters: those of the watched models, whose meshes are read.
    """
    found: dict[str, int] = {}
    for read in (_of_megatron, _of_deepspeed, lambda: _of_meshes(parameters)):
        for axis, index in read().items():
            found.setdefault(axis, index)
    return found


def _of_meshes(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    meshes: dict[int, Any] = {}
    for parameter in parameters:
        mesh = getattr(parameter, "device_mesh", None)
        if mesh is not None:
            meshes.setdefault(id(mesh), mesh)
    found: dict[str, int] = {}
    for mesh in meshes.values():
        for part in (root_mesh(mesh), mesh):
            for axis, index in _of_mesh(part).items():
                found.setdefault(axis, index)
    return found


def _of_mesh(mesh: Any) -> dict[str, int]:
    names, place = mesh.mesh_dim_names or (), mesh.get_coordinate()
    found: dict[str, int] = {}
    for dimension, name in enumerate(names if place is not None else ()):
        axis = axis_of(name)
        if axis is not None:
            found[axis] = found.get(axis, 0) * mesh.size(dimension) + place[dimension]
    return found


def _of_megatron() -> dict[str, int]:
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not _asked(getattr(state, "model_parallel_is_initialized", None)):
        return {}
    return _answers({axis: (getattr(state, name, None),) for axis, name in _MEGATRON.items()})


def _of_deepspeed() -> dict[str, int]:
    groups = sys.modules.get("deepspeed.utils.groups")
    if groups is None:
        return {}
    # Its own functions create a group on their first call, so only what exists already is read.
    mpu, mesh = getattr(groups, "mpu", None), getattr(groups, "mesh_device", None)
    asked = {axis: tuple(getattr(mpu, name, None) for name in names) for axis, names in _DEEPSPEED.items()}
    experts = next(iter((getattr(groups, "_EXPERT_PARALLEL_GROUP", None) or {}).values()), None)
    asked["ep"] = (getattr(experts, "rank", None),)
    return {**({} if mesh is None else _of_mesh(mesh)), **_answers(asked)}


def _answers(asked: Mapping[str, tuple[Callable[[], Any] | None, ...]]) -> dict[str, int]:
    """The first of these functions that gives an index, by axis."""
    found: dict[str, int] = {}
    for axis, functions in asked.items():
        for function in functions:
            index = _asked(function)
            if isinstance(index, int) and index >= 0:
                found.setdefault(axis, index)
    return found


def _asked(function: Callable[[], Any] | None) -> Any:
    """What a function of a framework returns; None if there is none, or its groups do not exist."""
    if function is None:
        return None
    try:
        return function()
    except Exception:  # noqa: BLE001 -- frameworks raise AssertionError and others for groups that do not exist
        return None


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
    """Group parameters that are divided alike into slices.

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
