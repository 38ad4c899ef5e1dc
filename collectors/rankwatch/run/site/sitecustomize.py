"""What `rankwatch run` adds to each Python process of its command: Python imports this file when it starts.

It waits for the script itself to import torch, and then for the first step of an optimizer, or the `train` of a Trainer
of transformers: these make a process a training process. Until then nothing of rankwatch is imported, so that
launchers, compilers, loader workers and pip stay as they are. The environment's own sitecustomize runs too.
"""

import os
import sys

TYPE_CHECKING = False  # importing typing, or __future__, would take longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

VARIABLE = "RANKWATCH_RUN"
"""Set by `rankwatch run`; a process that is watched removes it, so that processes which it starts are not."""


class AfterImport:
    """Finds nothing; calls back after a module was imported for the first time. One of `sys.meta_path`."""

    def __init__(self, name: str, act: "Callable[[], None]") -> None:
        self.name = name
        self.act = act

    def find_spec(self, name: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        """Let the other finders find the module, and watch its execution."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        from importlib.util import find_spec

        spec = find_spec(name)
        loader: Any = getattr(spec, "loader", None)
        if hasattr(loader, "exec_module"):
            execute = loader.exec_module

            def exec_module(module: "ModuleType") -> None:
                loader.exec_module = execute
                execute(module)
                self.act()

            loader.exec_module = exec_module
        return spec


class Optimizers:
    """Torch's hooks on all optimizers, which load rankwatch with the first step of one."""

    def __init__(self) -> None:
        self.steps: Any = None

    def install(self) -> None:
        """Torch was imported: place the hooks. Not within one, where their dictionary must not change."""
        try:
            from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

            register_optimizer_step_pre_hook(self.before)
            register_optimizer_step_post_hook(self.after)
        except Exception as error:
            report(error)

    def before(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        """An optimizer is about to step."""
        if self.steps is not None:
            self.steps.before(optimizer, args, kwargs)

    def after(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        """An optimizer has stepped."""
        if self.steps is None:
            self.steps = self.loaded()
            self.steps.before(optimizer, args, kwargs)
        self.steps.after(optimizer, args, kwargs)

    def loaded(self) -> "Any":
        """The hooks of rankwatch, or others that do nothing."""
        try:
            from rankwatch.run.training import optimizer_steps

            return optimizer_steps()
        except Exception as error:
            report(error)
            return NoHooks()


class Trainers:
    """Trainers of transformers, which rankwatch knows better than by their optimizers."""

    def install(self) -> None:
        """The module of the Trainer was imported: wrap its `train`."""
        try:
            from transformers.trainer import Trainer

            train = Trainer.train

            def watched(trainer: "Any", *args: "Any", **kwargs: "Any") -> "Any":
                if os.environ.get(VARIABLE):
                    self.watch(trainer)
                    return trainer.train(*args, **kwargs)  # which may be another one now
                return train(trainer, *args, **kwargs)

            Trainer.train = watched  # type: ignore[assignment, method-assign]
        except Exception as error:
            report(error)

    def watch(self, trainer: "Any") -> None:
        """Watch a Trainer that is about to train, once in this process; else its optimizer is watched."""
        try:
            from rankwatch.run.training import watch_trainer

            watch_trainer(trainer)
        except Exception as error:
            report(error)
        os.environ.pop(VARIABLE, None)


class NoHooks:
    """Hooks of a process in which rankwatch cannot be loaded."""

    def before(self, optimizer: "Any", args: "Any", kwargs: "Any") -> None:
        """Do nothing."""

    after = before


def report(error: Exception) -> None:
    """Say why this process is not watched."""
    try:
        sys.stderr.write(f"rankwatch: this process is not watched: {error!r} (Python is {sys.executable})\n")
    except Exception:
        return


def run_the_next_one() -> None:
    """Run the sitecustomize that Python would have found without this one."""
    here = os.path.dirname(os.path.abspath(__file__))
    places = [entry for entry in sys.path if os.path.abspath(entry) != here]
    # Asking the finders costs nothing; importlib's own modules would take 5 ms of each process's start.
    specs = (finder.find_spec(__name__, places) for finder in sys.meta_path)
    spec = next((found for found in specs if found is not None and found.loader is not None), None)
    if spec is not None and spec.loader is not None:
        from importlib.util import module_from_spec

        module = sys.modules[__name__] = module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get(VARIABLE):
    sys.meta_path.insert(0, AfterImport("torch", Optimizers().install))
    sys.meta_path.insert(0, AfterImport("transformers.trainer", Trainers().install))
run_the_next_one()
