"""What torch's two forms of FSDP keep of a module's parameters.

All private names of FSDP are here. A version of torch without them yields nothing, and the probe then watches less.
"""

from __future__ import annotations

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
    found: list[Any] = []
    for part in module.modules():
        if not hasattr(part, "_get_fsdp_state"):
            continue
        state = part._get_fsdp_state()  # type: ignore[operator]
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group is not None else []
        found += [record for group in groups for record in group.fsdp_params]
    return found


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
