"""What torch's two forms of FSDP keep of a module's parameters.

All private names of FSDP are here. A version of torch without them yields nothing, and the probe then watches less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Flat:
    """A flat parameter of FSDP1 (`FullyShardedDataParallel`), which holds several original ones in turn."""

    tensor: torch.Tensor
    names: tuple[str, ...]
    """Original names, within the module that FSDP wraps."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the whole original parameters."""
    originals: tuple[torch.Tensor, ...]
    """The original parameters (`use_orig_params=True`); empty if the module has only the flat one."""
    sizes: tuple[int, ...]
    """Elements of each stretch of the flat parameter that is not divided, padding included."""
    is_padding: tuple[bool, ...]
    """Which of these stretches are padding between two parameters."""
    group: Any
    """Process group over which it is divided, or replicated if `divides` is False."""
    replicas: Any
    """Process group of the ranks that hold the same part (HYBRID_SHARD); None: there are none."""
    divides: bool


@dataclass(frozen=True, slots=True)
class FsdpBlock:
    """A module whose parameters FSDP gathers together, or a part of one; without further such modules within it."""

    outer: torch.nn.Module
    """The module whose output FSDP watches for the start of its backward."""
    inner: torch.nn.Module
    """The module whose forward begins when the parameters are gathered."""
    all_ranks: bool
    """Whether its parameters are divided over, or replicated on, all ranks of the job."""


def blocks(module: torch.nn.Module) -> list[FsdpBlock]:
    """The blocks within a module, of both forms of FSDP.

    A block that has others within, as the root often has, gathers the parameters of the rest of its modules, such as an
    embedding or a head. Each of these counts as a block: when it begins, the outer one's wait is over.
    """
    found = []
    for part in module.modules():
        if not _is_managed(part):
            continue
        all_ranks = _ranks_of(part) == _world_size()
        if any(_is_managed(inner) for inner in part.modules() if inner is not part):
            found += [FsdpBlock(own, own, all_ranks) for own in _own_modules(part)]
        else:
            found.append(FsdpBlock(part, getattr(part, "_fsdp_wrapped_module", part), all_ranks))
    return found


def _own_modules(part: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The largest modules with parameters within a block, outside of the blocks within it."""
    for child in part.children():
        holds_blocks = any(_is_managed(inner) for inner in child.modules())
        if holds_blocks or isinstance(child, torch.nn.ModuleList | torch.nn.ModuleDict):  # lists are not called
            if not _is_managed(child):
                yield from _own_modules(child)
        elif any(True for _ in child.parameters()):
            yield child


def _is_managed(part: torch.nn.Module) -> bool:
    if hasattr(part, "_fsdp_wrapped_module"):
        return getattr(part, "_handle", None) is not None
    return hasattr(part, "_get_fsdp_state")


def _ranks_of(part: torch.nn.Module) -> int:
    """How many ranks hold a part of a block's parameters."""
    own = managed_by(part)
    if own:
        return min(int(record.mesh_info.mesh.size()) for record in own)
    groups = [getattr(part, name, None) for name in ("process_group", "_inter_node_pg")]
    return math.prod(int(group.size()) for group in groups if group is not None)


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def flats(module: torch.nn.Module) -> list[Flat]:
    """The flat parameters of all FSDP1 modules within a module."""
    found = []
    for part in module.modules():
        flat = getattr(getattr(part, "_handle", None), "flat_param", None)
        if flat is None or not getattr(flat, "_is_flat_param", False):
            continue
        sizes = tuple(flat._numels_with_padding)
        found.append(
            Flat(
                flat,
                tuple(flat._fqns),
                tuple(tuple(shape) for shape in flat._shapes),
                tuple(flat._params or ()),
                sizes,
                tuple(getattr(flat, "_is_padding_mask", None) or [False] * len(sizes)),
                getattr(part, "process_group", None),
                getattr(part, "_inter_node_pg", None),
                getattr(getattr(part, "sharding_strategy", None), "name", "") != "NO_SHARD",
            )
        )
    return found


def managed(module: torch.nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it divides (`fully_shard`); see `divided_by` and `whole_of`."""
    return [record for part in module.modules() for record in managed_by(part)]


def managed_by(part: torch.nn.Module) -> list[Any]:
    """FSDP2's records of the parameters that it gathers together for this module."""
    if not hasattr(part, "_get_fsdp_state"):
        return []
    state = part._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
    return [record for group in groups for record in group.fsdp_params]


def divided_by(record: Any) -> torch.Tensor:
    """The divided parameter, which the model and its optimizer know."""
    return record.sharded_param  # type: ignore[no-any-return]


def whole_of(record: Any) -> torch.Tensor | None:
    """The whole parameter, with which forward and backward compute; None before the first forward.

    It stays the same object, and gets the gradient of this rank's own data.
    """
    return getattr(record, "_unsharded_param", None)


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor. Reading a whole DTensor would be a collective."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
