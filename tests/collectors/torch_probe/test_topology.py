"""The place of a rank, read from meshes and from frameworks that the script has imported."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from rankwatch.torch_probe.topology import read_topology

pytestmark = pytest.mark.torch


class FakeMesh:
    """A part of a DeviceMesh: names, shape and this rank's place."""

    def __init__(self, shape: dict[str, int], place: tuple[int, ...], root: FakeMesh | None = None) -> None:
        self.mesh_dim_names = tuple(shape)
        self._sizes = tuple(shape.values())
        self._place = place
        self._root = root

    def get_coordinate(self) -> list[int]:
        return list(self._place)

    def size(self, dimension: int) -> int:
        return self._sizes[dimension]

    def _get_root_mesh(self) -> FakeMesh:
        return self._root or self


def on(mesh: FakeMesh) -> Any:
    return SimpleNamespace(device_mesh=mesh)


def test_the_mesh_that_a_parameters_own_was_sliced_from_has_all_axes():
    root = FakeMesh({"pp": 2, "dp_replicate": 2, "dp_shard": 4, "tp": 8}, (1, 1, 3, 5))
    assert read_topology([on(FakeMesh({"tp": 8}, (5,), root))]) == {"pp": 1, "dp": 7, "tp": 5}


def test_experts_have_their_own_mesh_beside_that_of_dense_layers():
    dense, experts = FakeMesh({"dp": 4}, (3,)), FakeMesh({"efsdp": 2, "ep": 2}, (1, 1))
    assert read_topology([on(dense), on(experts)]) == {"dp": 3, "ep": 1}


def test_nothing_is_read_from_a_mesh_without_names_and_from_plain_parameters():
    mesh = FakeMesh({}, (2,))
    mesh.mesh_dim_names = None
    assert read_topology([on(mesh), torch.zeros(1)]) == {}


def test_megatron_is_asked_if_its_groups_exist(monkeypatch):
    state = ModuleType("megatron.core.parallel_state")
    ranks = {"data": 3, "tensor_model": 1, "pipeline_model": 2, "context": 0, "expert_model": 1}
    for name, rank in ranks.items():
        setattr(state, f"get_{name}_parallel_rank", lambda rank=rank: rank)
    state.model_parallel_is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert read_topology([]) == {}
    state.model_parallel_is_initialized = lambda: True
    assert read_topology([]) == {"dp": 3, "tp": 1, "pp": 2, "cp": 0, "ep": 1}


def test_of_deepspeed_only_what_exists_is_read(monkeypatch):
    def creates_a_group() -> int:
        raise AssertionError("this would be a collective")

    groups = ModuleType("deepspeed.utils.groups")
    groups._get_data_parallel_rank = creates_a_group
    groups.mpu, groups.mesh_device, groups._EXPERT_PARALLEL_GROUP = None, None, {}
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
    assert read_topology([]) == {}
    groups.mpu = SimpleNamespace(get_data_parallel_rank=lambda: 1, get_model_parallel_rank=lambda: 3)
    groups._EXPERT_PARALLEL_GROUP = {"ep_size_2": SimpleNamespace(rank=lambda: 1)}
    assert read_topology([]) == {"dp": 1, "tp": 3, "ep": 1}


def test_a_getter_that_fails_leaves_its_axis_out(monkeypatch):
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    state.get_tensor_model_parallel_rank = lambda: 1

    def fails() -> int:
        raise AssertionError("data parallel group is not initialized")

    state.get_data_parallel_rank = fails
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert read_topology([]) == {"tp": 1}
