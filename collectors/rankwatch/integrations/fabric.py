"""Lightning Fabric: a loop of the user's own, around models and optimizers that Fabric has set up.

watch = rankwatch.fabric(fabric)     # after fabric.launch()
...
    if watch.should_stop:
        break
"""

from __future__ import annotations

import os
from typing import Any

from rankwatch.integrations.started import Saves, started, wrap
from rankwatch.watch import Watch


def fabric(fabric: Any, *, job: str | None = None, **options: Any) -> Watch:
    """Watch the optimizer steps of this process until `close`, and what `fabric.save` saves.

    The job's name is `job`, else RANKWATCH_JOB, the scheduler's, or that of the working directory. `options` are
    further arguments of `rankwatch.start`.

    Raises:
        TypeError: this is no Fabric.
        ValueError: Fabric has not launched its processes yet; or as `rankwatch.start`.
    """
    from rankwatch.integrations.optimizer_steps import OptimizerSteps  # noqa: PLC0415 - imports torch

    if not all(hasattr(fabric, name) for name in ("launch", "setup", "save", "world_size")):
        raise TypeError(f"rankwatch.fabric takes a lightning.Fabric, not {type(fabric).__name__}")
    watch = started(os.getcwd(), "", job, **options)
    if watch.identity.world_size != fabric.world_size:
        watch.close()
        raise ValueError("call rankwatch.fabric after fabric.launch()")
    saves = Saves(watch)

    def save(original: Any, path: Any, *args: Any, **kwargs: Any) -> Any:
        saves.look()
        with saves.save(watch._loop.next_step, os.fspath(path)):
            return original(path, *args, **kwargs)  # returns when all ranks have saved

    def close(original: Any) -> None:
        steps.close()
        original()

    wrap(fabric, "save", save)
    wrap(fabric, "load", saves.loads)
    steps = OptimizerSteps(lambda: watch)
    wrap(watch, "close", close)
    return watch
