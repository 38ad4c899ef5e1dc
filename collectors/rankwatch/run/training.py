"""A process of `rankwatch run`, from the first step of an optimizer on."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from rankwatch import startup
from rankwatch.folders import directories
from rankwatch.identity import identify, this_start
from rankwatch.integrations.optimizer_steps import OptimizerSteps
from rankwatch.notices import say
from rankwatch.run import RUN_VARIABLE
from rankwatch.startup import launches_at_once
from rankwatch.watch import Watch

HUGGING_FACE: Final = "rankwatch.integrations.hf"


def optimizer_steps() -> OptimizerSteps:
    """The boundaries of this process's steps; whoever calls this has placed hooks that call `before` and `after`."""
    return OptimizerSteps(started, hooks=False, begun=announce)


def watch_trainer(trainer: Any) -> None:
    """Watch a Trainer of transformers by its callbacks, if there is the integration for it."""
    if find_spec(HUGGING_FACE) is not None and _is_rank():
        import_module(HUGGING_FACE).hf(trainer)


def started() -> Watch | None:
    """The watch of this process; None if its script has one of its own, or it is no rank of the job."""
    os.environ.pop(RUN_VARIABLE, None)  # processes that this one starts are none either
    return startup.start() if _is_rank() else None


def _is_rank() -> bool:
    """Whether this process is a rank that nobody watches yet. Of processes without a number the first one is rank 0."""
    if startup.is_watched():
        return False
    identity = identify(os.environ, process_group=startup.process_group(), start=this_start)
    places = directories(os.environ, os.getuid())
    if identity.source == "single" and launches_at_once(places, identity.job, identity.launch):
        say(f"job {identity.job!r} trains in another process here; process {os.getpid()} is not watched")
        return False
    return True


def announce(watch: Watch, optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> None:
    """Say in the output of rank 0 how its steps are counted."""
    if watch.identity.rank:
        return
    name = type(optimizer).__name__
    line = f"job {watch.identity.job!r}: a step is one step of {name}, its loss what backward() is called on"
    if not models:
        line += "; not watched: gradients (no module holds these parameters)"
    say(f"{line}; such a job can be paused, but not stopped or rolled back")
