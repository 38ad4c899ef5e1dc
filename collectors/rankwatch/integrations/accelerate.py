"""Accelerate: a loop of one's own around what `accelerator.prepare` returned.

    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    watch = rankwatch.accelerate(accelerator)
    for batch in loader:
        ...
        if watch.should_stop:
            break

Methods of the accelerator and of what it has prepared are wrapped on these objects, not on their classes.
"""

from __future__ import annotations

import os
import time
from functools import partial
from typing import Any, Final

import torch

from rankwatch.integrations.optimizer_steps import steps_made
from rankwatch.integrations.started import Saves, advised, started, wrap
from rankwatch.integrations.user_loop import Call, UserLoop
from rankwatch.watch import Watch

MARKER: Final = "random_states_{rank}.pkl"
"""The last file of a rank's part that `save_state` writes."""
ALONE_MAX: Final = 8
"""Steps of one of several optimizers after which they end steps of the job by themselves: a GAN's discriminator makes
up to 5 for each step of its generator."""


def accelerate(accelerator: Any, *, job: str | None = None, **options: Any) -> Watch:
    """Watch the loop around an Accelerator; call it once, after `prepare` and before a state is loaded.

    A step ends with the step of the optimizer in which gradients are synchronized; of several optimizers, when each has
    made one. The loop asks `watch.should_stop` between two steps.

    Args:
        accelerator: an `accelerate.Accelerator`.
        job: the job's name; else RANKWATCH_JOB, its name in the scheduler, or that of the project's folder
            or of the script.
        options: further arguments of `rankwatch.start`.

    Raises:
        TypeError: this is no Accelerator.
        ValueError: it has prepared no model and optimizer, or DeepSpeed trains; or as `rankwatch.start`.
    """
    if not all(hasattr(accelerator, name) for name in ("save_state", "load_state", "_models", "_optimizers")):
        raise TypeError(f"rankwatch.accelerate takes an accelerate.Accelerator, not {type(accelerator).__name__}")
    if not accelerator._models or not accelerator._optimizers:
        raise ValueError("call rankwatch.accelerate after accelerator.prepare(model, optimizer, ...)")
    if hasattr(accelerator._models[0], "is_gradient_accumulation_boundary"):
        raise ValueError("DeepSpeed trains this model: call rankwatch.deepspeed with what accelerator.prepare returned")
    folder = accelerator.project_dir or ""
    watch = started(folder, folder, job, **options)
    AcceleratedLoop(accelerator, watch)
    return watch


class AcceleratedLoop:
    """What the calls to an accelerator mean."""

    def __init__(self, accelerator: Any, watch: Watch) -> None:
        self._accelerator = accelerator
        self._watch = watch
        self._saves = Saves(watch)
        self._loop = UserLoop(watch, accelerator._models, self._first)
        self._loop.measure(accelerator._models, accelerator._optimizers, scaler=accelerator.scaler)
        self._folder = ""
        """Where an ordered checkpoint goes."""
        self._stepped: dict[int, int] = {}
        """Steps of each optimizer since the last one of the job."""
        self._save_state = accelerator.save_state
        for name in ("backward", "save_state", "load_state", "end_training"):
            wrap(accelerator, name, getattr(self, f"_around_{name}"))
        for optimizer in accelerator._optimizers:
            wrap(optimizer, "step", partial(self._around_step, optimizer))
        for loader in accelerator._dataloaders:
            if not hasattr(loader, "_fetch_batches"):  # rank 0 draws for all: the others would wait for it elsewhere
                base = getattr(loader, "base_dataloader", None)
                if base is not None:
                    base.__iter__ = self._loop.batches(base.__iter__)
        self._saves_below(accelerator.project_dir)

    def _around_backward(self, backward: Call, loss: Any, *args: Any, **kwargs: Any) -> Any:
        self._loop.backward(loss)
        return backward(loss, *args, **kwargs)

    def _around_step(self, optimizer: Any, step: Call, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        if self._accelerator.sync_gradients:
            made = self._stepped[id(optimizer)] = self._stepped.get(id(optimizer), 0) + 1
            if len(self._stepped) == len(self._accelerator._optimizers) or made > ALONE_MAX:
                self._stepped = {id(optimizer): made} if made > ALONE_MAX else {}
                self._loop.end(learning_rate=optimizer.param_groups[0]["lr"])
        return result

    def _around_save_state(self, save_state: Call, *args: Any, **kwargs: Any) -> Any:
        self._saves.look()
        begun_s = time.monotonic()
        with self._watch.pause("checkpoint_save"):
            location = save_state(*args, **kwargs)
        with self._watch._faults:
            if self._is_whole(location):
                self._saves.saved(self._loop.next_step, os.fspath(location), time.monotonic() - begun_s)
                self._saves_below(os.path.dirname(os.path.abspath(location)))
        return location

    def _around_load_state(self, load_state: Call, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        checkpoint = advised(self._watch) if input_dir is None else self._watch.resume
        if checkpoint is not None:
            input_dir = input_dir or checkpoint.location
            if os.path.abspath(input_dir) != checkpoint.location:
                checkpoint = None
        return self._loop.load(checkpoint, lambda: load_state(input_dir, *args, **kwargs))

    def _around_end_training(self, end_training: Call, *args: Any, **kwargs: Any) -> Any:
        self._loop.leave()
        self._watch.leave()
        return end_training(*args, **kwargs)

    def _first(self) -> int:
        """The optimizer's own count of steps, which a script may have loaded by itself."""
        inner = self._accelerator._optimizers[0].optimizer
        return steps_made(inner) if isinstance(inner, torch.optim.Optimizer) and inner.state else 0

    def _is_whole(self, location: Any) -> bool:
        """Whether this rank's part of a checkpoint is there."""
        return os.path.isfile(os.path.join(location, MARKER.format(rank=self._accelerator.process_index)))

    def _saves_below(self, folder: Any) -> None:
        """Allow orders of checkpoints, now that the script's own folder is known."""
        if folder and not self._folder:
            self._watch.on_checkpoint(self._save)
        self._folder = str(folder or self._folder)

    def _save(self, step: int) -> str:
        """A checkpoint is ordered."""
        named = self._accelerator.project_configuration.automatic_checkpoint_naming
        location = self._save_state(None if named else os.path.join(self._folder, f"step-{step}"))
        if not self._is_whole(location):
            raise OSError(f"{location} was not saved")
        return str(os.path.abspath(location))
