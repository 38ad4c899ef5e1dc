"""The part of rankwatch on training hosts: the SDK in the training process, and the agent beside it.

import rankwatch

watch = rankwatch.start(job="gpt-small")
for step in watch.steps(max_steps):
    loss = train_step()
    watch.log(loss=loss)

With a framework's trainer it is one line: `rankwatch.hf(trainer)`, `rankwatch.lightning(trainer)`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from rankwatch.loop import Checkpoint
from rankwatch.loop.state import Capture
from rankwatch.startup import capture, restore, start
from rankwatch.watch import Watch

if TYPE_CHECKING:
    from rankwatch.integrations.accelerate import accelerate
    from rankwatch.integrations.deepspeed import deepspeed
    from rankwatch.integrations.fabric import fabric
    from rankwatch.integrations.hf import hf
    from rankwatch.integrations.lightning import lightning

__all__ = [
    "Capture",
    "Checkpoint",
    "Watch",
    "accelerate",
    "capture",
    "deepspeed",
    "fabric",
    "hf",
    "lightning",
    "restore",
    "start",
]

_INTEGRATIONS: Final = ("accelerate", "deepspeed", "fabric", "hf", "lightning")
"""Functions that are imported when they are asked for, each from the file of its name in `integrations/`."""


def __getattr__(name: str) -> Any:
    if name in _INTEGRATIONS:
        return getattr(import_module(f"rankwatch.integrations.{name}"), name)
    raise AttributeError(f"module 'rankwatch' has no attribute {name!r}")
