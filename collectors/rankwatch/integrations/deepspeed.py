"""DeepSpeed: a loop of one's own around an engine.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    watch = rankwatch.deepspeed(engine)
    for batch in loader:
        ...
        engine.step()
        if watch.should_stop:
            break

Methods of this engine are wrapped, not those of its class. A pipeline engine, which makes its steps in one call, is not
taken: put `with watch.step():` around its `train_batch`.

Data of a DeepSpeed engine's optimizer on a step's gradients: the norm of ZeRO's parts, and the loss scale.

All private names of ZeRO are here.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

from rankwatch.integrations.started import Saves, advised, started, wrap
from rankwatch.integrations.user_loop import Call, UserLoop
from rankwatch.torch_probe.gradients import Scalar, total_norm
from rankwatch.torch_probe.topology import Division, ModelSlice, slices_of
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
    """What the rank holds of the reduced gradients; None without ZeRO, or if its records do not contain it."""
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


MARKER: Final = "latest"
"""The file, beside the folders of checkpoints, that names the newest one that all ranks have saved."""
SHARDED: Final = 3
"""The stage of ZeRO from which on each rank holds a part of the parameters."""


def deepspeed(engine: Any, *, job: str | None = None, **options: Any) -> Watch:
    """Watch the loop around an engine; call it once, after `deepspeed.initialize` and before a checkpoint is loaded.

    A step ends with the `engine.step` that updates the parameters, or that skips this since gradients have overflowed.
    The loop asks `watch.should_stop` between two steps.

    Args:
        engine: the first of what `deepspeed.initialize` returned.
        job: the job's name; else RANKWATCH_JOB or its name in the scheduler.
        options: further arguments of `rankwatch.start`.

    Raises:
        TypeError: this is no engine, or one of a pipeline.
        ValueError: as `rankwatch.start`.
    """
    if not all(hasattr(engine, name) for name in ("is_gradient_accumulation_boundary", "save_checkpoint", "module")):
        raise TypeError(f"rankwatch.deepspeed takes the engine of deepspeed.initialize, not {type(engine).__name__}")
    if hasattr(engine, "train_batch"):
        raise TypeError("rankwatch.deepspeed takes no pipeline engine: put `with watch.step():` around its train_batch")
    watch = started("", "", job, **options)
    EngineLoop(engine, watch)
    return watch


class EngineLoop:
    """What the calls to an engine mean."""

    def __init__(self, engine: Any, watch: Watch) -> None:
        self._engine = engine
        self._watch = watch
        self._saves = Saves(watch)
        self._loop = UserLoop(watch, [engine], lambda: int(engine.global_steps))
        self._optimizer = getattr(engine, "basic_optimizer", None) or engine.optimizer
        stage = engine.zero_optimization_stage()
        self._loop.measure(
            engine.module,
            self._optimizer,
            scaler=EngineScaler(engine),
            grad_norm=stage == 0,  # else gradients are in parts when the update begins, and were clipped
            replicated=stage < SHARDED and not engine.has_moe_layers and engine.mp_world_size == 1,
        )
        self._norm = EngineNorm(engine, watch)
        self._uncommitted: tuple[int, str, str, float] | None = None
        """Step, folder, tag and seconds of a save that rank 0 has not seen committed."""
        self._folder = ""  # where the last checkpoint was saved, and an ordered one goes
        self._save_checkpoint = engine.save_checkpoint
        for name in ("backward", "allreduce_gradients", "step", "save_checkpoint", "load_checkpoint"):
            wrap(engine, name, getattr(self, f"_around_{name}"))
        if getattr(engine, "training_dataloader", None) is not None:
            wrap(engine.training_dataloader, "_create_dataloader", self._around_create_dataloader)

    def _around_create_dataloader(self, create: Call) -> Any:
        loader, result = self._engine.training_dataloader, create()
        drawn = loader.data
        if drawn is not None:
            loader.data = self._loop.batches(lambda: drawn)()
        return result

    def _around_backward(self, backward: Call, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._loop.backward(loss)
        return backward(loss, *args, **kwargs)

    def _around_allreduce_gradients(self, reduce: Call, *args: Any, **kwargs: Any) -> Any:
        with self._watch.phase("collective"):
            return reduce(*args, **kwargs)

    def _around_step(self, step: Call, *args: Any, **kwargs: Any) -> Any:
        made, values = self._engine.global_steps, {"learning_rate": self._optimizer.param_groups[0]["lr"]}
        result = step(*args, **kwargs)
        if self._engine.global_steps != made:
            self._loop.end(**values, **self._norm.values())
            with self._watch._faults:
                self._commit()
        return result

    def _around_save_checkpoint(self, save: Call, save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        tag = str(f"global_step{self._engine.global_steps}" if tag is None else tag)
        self._saves.look()
        begun_s = time.monotonic()
        with self._watch.pause("checkpoint_save"):
            result = save(save_dir, tag, *args, **kwargs)
        with self._watch._faults:
            if not self._folder:
                self._watch.on_checkpoint(self._save)
            self._folder = os.path.abspath(save_dir)
            self._uncommitted = (self._loop.next_step, self._folder, tag, time.monotonic() - begun_s)
            self._commit()
        return result

    def _around_load_checkpoint(self, load: Call, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = advised(self._watch) if tag is None else self._watch.resume
        if checkpoint is not None:
            if tag is None:
                load_dir, tag = os.path.split(checkpoint.location)
            if os.path.join(os.path.abspath(load_dir), str(tag)) != checkpoint.location:
                checkpoint = None
        return self._loop.load(checkpoint, lambda: load(load_dir, tag, *args, **kwargs))

    def _commit(self) -> None:
        """Enter the last save into the ledger, on rank 0 once the marker names it."""
        if self._uncommitted is not None:
            step, folder, tag, seconds = self._uncommitted
            if self._watch.identity.rank or _marked(folder) == tag:
                self._uncommitted = None
                self._saves.saved(step, os.path.join(folder, tag), seconds)

    def _save(self, step: int) -> str:
        """A checkpoint is ordered."""
        tag = f"global_step{step}"
        if not self._save_checkpoint(self._folder, tag):
            raise OSError(f"{tag} was not saved in {self._folder}")
        return os.path.join(self._folder, tag)


def _marked(folder: str) -> str:
    """The tag that the marker of a folder names; "" without a marker."""
    return marker.read_text().strip() if (marker := Path(folder, MARKER)).exists() else ""
