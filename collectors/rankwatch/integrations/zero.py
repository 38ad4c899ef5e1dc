"""What a DeepSpeed engine's optimizer says of a step's gradients: the norm of ZeRO's parts, and the loss scale.

All private names of ZeRO are here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Final

import torch

from rankwatch.integrations.started import wrap
from rankwatch.torch_probe.gradients import Scalar, total_norm
from rankwatch.torch_probe.slices import Division, ModelSlice, slices_of
from rankwatch.watch import Watch

_GROUPS: Final = {1: "bit16_groups", 2: "bit16_groups", 3: "fp16_groups"}
"""Where each stage keeps its groups of parameters, in the order in which it divides them."""
_ELSEWHERE: Final = ("cpu_offload", "offload_optimizer", "zenflow", "use_muon")
"""Flags of optimizers whose gradients lie elsewhere, or are no gradients any more when the update begins."""


class EngineNorm:
    """The gradient norm of each step: what the rank holds of it, if that is known, else as the engine gives it.

    It is known where nothing but data parallelism over all ranks divides the model: no experts, tensor parallelism,
    offloading or Muon, and no groups of ranks that each have the whole model.
    """

    def __init__(self, engine: Any, watch: Watch) -> None:
        """Declare what the rank holds, and measure it whenever an update begins."""
        self._engine = engine
        self._watch = watch
        self._norm: Scalar | None = None
        self._scale = 1.0
        self._slice: ModelSlice | None = None
        with watch._faults:
            self._slice = _slice_of(engine)
            if self._slice is not None:
                watch._recorder.declare({"slices": [[self._slice.content, self._slice.replica_of]]})
                wrap(engine.optimizer, "step", self._around_update)

    def values(self) -> dict[str, Any]:
        """What is to be logged of a step that has ended, whether it had an update or overflowed."""
        with self._watch._faults:
            return self._values()
        return {}

    def _values(self) -> dict[str, Any]:
        if self._slice is None:
            if (given := self._engine.get_global_grad_norm()) is None:
                return {}
            given = torch.as_tensor(given)
            return {"grad_norm": torch.where(given < 0, math.nan, given)}  # -1 is what ZeRO says of NaN and Inf
        norm, self._norm = self._norm, None
        if norm is None or (self._engine.optimizer.overflow and self._scale > 1):
            return {}  # an overflow that the scale explains is no norm
        return {"grad_norm.0": norm / self._scale}

    def _around_update(self, update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._watch._faults:  # later in the update the gradients are scaled, clipped and freed
            self._scale = float(self._engine.optimizer.loss_scale)
            self._norm = self._measured()
        return update(*args, **kwargs)

    def _measured(self) -> Scalar | None:
        optimizer = self._engine.optimizer
        held = [optimizer.averaged_gradients.get(number) for number in range(len(_groups(self._engine)))]
        if any(parts is None for parts in held):
            return None
        gradients = [part.detach() for parts in held for part in parts]
        return total_norm(gradients, on_host=all(part.device.type == "cpu" for part in gradients))


class EngineScaler:
    """The loss scale of an engine that trains in fp16, as `watch.torch` takes one."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def scale(self, outputs: torch.Tensor) -> torch.Tensor:
        """Multiply by the loss scale."""
        return outputs * float(self._engine.optimizer.loss_scale)

    def is_enabled(self) -> bool:
        """Whether the engine trains in fp16."""
        return bool(self._engine.fp16_enabled()) and hasattr(self._engine.optimizer, "loss_scale")


def _groups(engine: Any) -> list[list[torch.Tensor]]:
    """ZeRO's groups of parameters; none without ZeRO."""
    found: list[list[torch.Tensor]] = getattr(
        engine.optimizer, _GROUPS.get(int(engine.zero_optimization_stage()), ""), []
    )
    return found


def _slice_of(engine: Any) -> ModelSlice | None:
    """What the rank holds of the reduced gradients; None without ZeRO, or if its records do not say it."""
    optimizer, parameters = engine.optimizer, [one for group in _groups(engine) for one in group]
    if not parameters or not hasattr(optimizer, "averaged_gradients"):
        return None
    if engine.has_moe_layers or engine.mp_world_size != 1 or any(getattr(optimizer, name, 0) for name in _ELSEWHERE):
        return None
    size = torch.distributed.get_world_size()
    dividing = {id(group): group for one in parameters if (group := getattr(one, "ds_process_group", None)) is not None}
    dividing[id(optimizer.dp_process_group)] = optimizer.dp_process_group
    names = {id(one): name for name, one in engine.module.named_parameters()}
    if any(torch.distributed.get_world_size(group) != size for group in dividing.values()):
        return None
    if any(getattr(one, "use_muon", False) or id(one) not in names for one in parameters):
        return None
    rank = torch.distributed.get_rank(optimizer.dp_process_group)
    way = Division(("zero", int(engine.zero_optimization_stage())), ((rank, size),))
    found = slices_of([(names[id(one)], getattr(one, "ds_shape", one.shape), way) for one in parameters], 0)
    return found[0] if found else None
