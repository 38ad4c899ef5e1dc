"""Lightning's Trainer, of `lightning` or `pytorch_lightning`, with automatic and with manual optimization.

    rankwatch.lightning(trainer)
    trainer.fit(module, loader)

A callback sees steps and validations; `fit`, `save_checkpoint` and the profiler are wrapped for the rest.
"""

from __future__ import annotations

import inspect
import os
from importlib import import_module
from typing import Any, Final

from rankwatch.identity import is_launched
from rankwatch.integrations.framework_steps import FrameworkSteps, OpenPause
from rankwatch.integrations.started import Saves, advised, is_relaunch, started, wrap
from rankwatch.loop import Checkpoint
from rankwatch.watch import Watch

FETCH: Final = "train_dataloader_next"
"""Ends the name under which the trainer shows its profiler the fetch of a batch."""
_NO_RUN: Final = (None, "", "lightning_logs", "default")


def lightning(trainer: Any, *, job: str | None = None, **options: Any) -> _Events:
    """Watch a Trainer of Lightning from its next `fit` on; returns the callback, whose `watch` exists from then on.

    The job's name is `job`, else RANKWATCH_JOB, the scheduler's, that of the logger, or of `default_root_dir`;
    `options` are further arguments of `rankwatch.start`. The loss is what `training_step` returns.

    Raises:
        TypeError: `trainer` is no Trainer. ValueError: as of `rankwatch.start`; where Lightning launches the ranks
            itself, `fit` raises it.
    """
    if not all(hasattr(trainer, name) for name in ("fit", "callbacks", "fit_loop", "strategy")):
        raise TypeError(f"rankwatch.lightning takes a lightning.Trainer, not {type(trainer).__name__}")
    modules = [each.__module__.partition(".trainer.") for each in type(trainer).__mro__]
    package = next(name for name, found, _ in modules if found)
    callback: _Events = _blank(package)
    callback.attach(trainer, package, {"job": job, **options})
    if is_launched(options.get("env") or os.environ) or trainer.world_size == 1:
        callback.start()
    trainer.callbacks.insert(0, callback)  # before others, which may save: their time is none of the step's
    return callback


class _Events:
    """What the events of a Trainer mean."""

    watch: Watch

    def attach(self, trainer: Any, package: str, options: dict[str, Any]) -> None:
        self._trainer, self._package, self._options, self._resumes = trainer, package, options, is_relaunch(options)
        self._resumed: Checkpoint | None = None
        self._stepped_at = -1
        self._counts = False  # whether the trainer counts optimizer steps: in manual optimization it may not
        wrap(trainer, "fit", self._fit)
        wrap(trainer, "save_checkpoint", self._save_checkpoint)
        wrap(trainer.profiler, "start", self._profile)
        wrap(trainer.profiler, "stop", self._profiled)

    def start(self) -> None:
        trainer = self._trainer
        names = [str(one.name) for one in trainer.loggers if one.name not in _NO_RUN]
        self.watch = watch = started((names or [os.path.abspath(trainer.default_root_dir)])[0], "", **self._options)
        self._steps, self._pause, self._saves = FrameworkSteps(watch), OpenPause(watch), Saves(watch)
        wrap(trainer.strategy, "load_checkpoint", self._saves.loads)
        self._wait = watch.phase("data_wait")
        watch.allow("stop")
        watch.on_checkpoint(self._save)

    def _fit(self, fit: Any, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(fit).bind(*args, **kwargs).arguments
        if call.get("ckpt_path") is None and self._resumes and hasattr(self, "watch"):
            self._resumed = advised(self.watch)
            call["ckpt_path"] = self._resumed.location if self._resumed is not None else None
        self._resumes = False
        return fit(**call)

    def setup(self, trainer: Any, *_: Any, **__: Any) -> None:
        if not hasattr(self, "watch"):
            self.start()
        if trainer.strategy.broadcast(self._resumed) != self._resumed:
            raise RuntimeError("rank 0 resumes from another checkpoint: another relaunch will settle it")

    def on_train_start(self, trainer: Any, _module: Any) -> None:
        resumed, self._resumed, self._stepped_at = self._resumed, None, trainer.global_step
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._steps.train(trainer.model, trainer.optimizers, scaler, trainer.global_step, resumed)

    def _profile(self, start: Any, action: str) -> Any:
        if action.endswith(FETCH):
            self._steps.begin()
            self._wait.__enter__()
        return start(action)

    def _profiled(self, stop: Any, action: str) -> Any:
        if action.endswith(FETCH):
            self._wait.__exit__(None, None, None)
        return stop(action)

    def on_train_batch_start(self, *_: Any) -> None:
        self._saves.look()
        self._steps.begin()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """A batch is done, and with it the step if an optimizer has stepped, or if it cannot be seen to."""
        loss: Any = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if hasattr(loss, "detach"):
            self._steps.add("loss", loss.detach())  # each is divided by their number
        has_stepped = trainer.global_step != self._stepped_at
        self._counts |= has_stepped
        if not has_stepped and (self._counts or module.automatic_optimization):
            return
        self._stepped_at = trainer.global_step
        self._steps.end(learning_rate=trainer.optimizers[0].param_groups[0]["lr"])
        if self.watch.should_stop:
            trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None
            trainer.should_stop = True

    def on_validation_start(self, *_: Any) -> None:
        self._pause.open("eval")

    def on_validation_end(self, *_: Any) -> None:
        self._pause.close()

    def on_train_epoch_end(self, *_: Any) -> None:
        self._steps.abandon()

    def on_train_end(self, *_: Any) -> None:
        self.watch.leave()

    def _save_checkpoint(self, save: Any, filepath: Any, weights_only: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._saves.save(self._steps.next, os.fspath(filepath), counts=not weights_only):
            return save(filepath, weights_only, *args, **kwargs)  # returns when all ranks have saved

    def _save(self, _step: int) -> None:
        trainer = self._trainer
        folder = getattr(trainer.checkpoint_callback, "dirpath", None) or trainer.default_root_dir
        trainer.save_checkpoint(os.path.join(folder, f"rankwatch-step={trainer.global_step}.ckpt"))

    def __reduce__(self) -> Any:
        return _blank, (self._package,), self.__dict__


def _blank(package: str) -> Any:
    """A callback without attributes, which pickle adds: a launcher may hand it to another process."""
    return object.__new__(type("RankwatchCallback", (_Events, import_module(package).Callback), {}))
