"""Reads which work a rank does, if the script does not say it: from device meshes, Megatron and DeepSpeed.

A framework is asked only if the script has imported it. Nothing here starts a collective or creates a group.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch

from rankwatch.torch_probe.meshes import axis_of, root_mesh
from rankwatch.torch_probe.watched_model import WatchedModels

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
    """This rank's index in each axis that can be read; empty if nothing says it.

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
    """By axis, the first of these functions that gives an index."""
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
