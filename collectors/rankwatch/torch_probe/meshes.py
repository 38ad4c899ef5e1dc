"""Reads torch's device meshes: which axis a dimension is, and what a mesh was sliced from. Creates none."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final

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
    """The mesh that this one was sliced from; itself if it was not, or if this torch does not say it."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    known: Any = getattr(sys.modules.get("torch.distributed.device_mesh"), "_mesh_resources", None)
    return known.get_root_mesh(mesh) if hasattr(known, "get_root_mesh") else mesh


def strides_of(mesh: Any) -> tuple[int, ...]:
    """The distance between the ranks of neighbours in each dimension; 0 in one of a single rank.

    It is the same in all parts of a mesh, and tells meshes of the same shape apart.
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
