"""How the watched model is made: what wraps it, where its parameters live, who reduces its gradients and when."""

from __future__ import annotations

from typing import Final

import torch
from torch.nn.parallel import DistributedDataParallel

_CPU: Final = torch.device("cpu")


class WatchedModel:
    """A module with its parameters, plain or wrapped by DistributedDataParallel."""

    def __init__(self, module: torch.nn.Module, replicated: bool | None) -> None:
        """Look at a module.

        Args:
            module: as the loop calls it.
            replicated: whether peers hold bit-equal parameters; None = those that DDP keeps equal do.
        """
        self.module = module
        self.ddp = module if isinstance(module, DistributedDataParallel) else None
        named = dict((self.ddp.module if self.ddp else module).named_parameters())
        self.names = list(named)
        self.parameters = list(named.values())
        self.sharded = any(_is_sharded(parameter) for parameter in self.parameters)
        self.replicated = self.ddp is not None and not self.sharded if replicated is None else replicated
        self.home = next((tensor.device for tensor in self.parameters if tensor.device.type != "cpu"), _CPU)
        self.is_whole_after_backward = self.ddp is not None or not _is_distributed()
        """Gradients are the total ones when backward ends, before the loop clips them; else before the update."""

    @property
    def gradients(self) -> list[torch.Tensor]:
        """The gradients that are there."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    @property
    def own_parts(self) -> list[torch.Tensor]:
        """The parts of the parameters that this rank holds; to read a DTensor as a whole would be a collective."""
        return [parameter.to_local() if hasattr(parameter, "to_local") else parameter for parameter in self.parameters]

    @property
    def reduces(self) -> bool:
        """Whether the backward under way ends with DDP's reduction; within `no_sync` it does not."""
        return self.ddp is not None and self.ddp.require_backward_grad_sync

    @property
    def reduces_early(self) -> bool:
        """Whether a local gradient may be gone before backward ends.

        DDP reduces in place where gradients are views of its buckets, and with a static graph its first reduction
        begins early.
        """
        return self.ddp is not None and (self.ddp.gradient_as_bucket_view or self.ddp.static_graph)


def _is_sharded(tensor: torch.Tensor) -> bool:
    """DTensor (FSDP2, tensor parallel) and FSDP1's flat parameters, told without importing them."""
    return hasattr(tensor, "to_local") or getattr(tensor, "_is_flat_param", False)


def _is_distributed() -> bool:
    dist = torch.distributed
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
