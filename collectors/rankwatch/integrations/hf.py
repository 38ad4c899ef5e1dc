"""Hugging Face's Trainer, and trainers that are made of it.

    rankwatch.hf(trainer)
    trainer.train()

A callback sees steps, evaluations and saves; methods are wrapped for data wait, losses, the resume and failed saves.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from rankwatch.integrations.framework_steps import FrameworkSteps, OpenPause
from rankwatch.integrations.started import Saves, advised, is_relaunch, started, wrap
from rankwatch.loop import Checkpoint
from rankwatch.watch import Watch

MARKER: Final = "trainer_state.json"
"""The last file that the Trainer writes into the folder of a checkpoint."""
_NOT_LOGGED: Final = re.compile(r"epoch|step|total_flos|learning_rate|train_.*|.*_(runtime|per_second)")
_IF_UNMEASURED: Final = ("loss", "grad_norm")
_GENERATES: Final = "_generate_and_score_completions"  # of those trainers of TRL that learn from rewards


def hf(trainer: Any, *, job: str | None = None, **options: Any) -> Watch:
    """Watch a Trainer of transformers, or one that is made of it, from its next `train` on.

    The job's name is `job`, else RANKWATCH_JOB, the scheduler's, `run_name`, or that of the output folder; `options`
    are further arguments of `rankwatch.start`.

    Raises:
        TypeError: this is no Trainer.
        ValueError: as `rankwatch.start`.
    """
    if not all(hasattr(trainer, name) for name in ("add_callback", "training_step", "args")):
        raise TypeError(f"rankwatch.hf takes a transformers.Trainer, not {type(trainer).__name__}")
    args = trainer.args
    watch = started(args.run_name or args.output_dir, args.output_dir, job, **options)
    base = import_module("transformers").TrainerCallback
    trainer.add_callback(type("RankwatchCallback", (_Events, base), {})(trainer, watch, is_relaunch(options)))
    return watch


class _Events:
    """What the events of a Trainer mean; each is called with the Trainer's arguments, state and control."""

    def __init__(self, trainer: Any, watch: Watch, resumes: bool) -> None:
        self._trainer, self._watch, self._resumes = trainer, watch, resumes
        self._resumed: Checkpoint | None = None
        self._steps, self._pause, self._saves = FrameworkSteps(watch), OpenPause(watch), Saves(watch)
        self._control: Any = None
        self._learning_rate: Any = 0.0
        self._loss = "surrogate_loss" if hasattr(trainer, _GENERATES) else "loss"  # the former need not fall
        watch.allow("stop")
        watch.on_checkpoint(self._save)
        wrap(trainer, "train", self._train)
        wrap(trainer, "training_step", self._training_step)
        wrap(trainer, "get_batch_samples", self._fetch)
        wrap(trainer, _GENERATES, self._generate)
        wrap(trainer, "_save_checkpoint", self._saves.saves)
        wrap(trainer, "_load_from_checkpoint", self._saves.loads)

    def _train(self, train: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint is None and self._resumes:
            share = import_module("accelerate.utils").broadcast_object_list
            self._resumed = share([advised(self._watch)])[0]
            resume_from_checkpoint = self._resumed.location if self._resumed is not None else None
        self._resumes = False
        return train(resume_from_checkpoint, *args, **kwargs)

    def _fetch(self, fetch: Any, *args: Any, **kwargs: Any) -> Any:
        self._pause.close()
        self._steps.begin()
        with self._watch.phase("data_wait"):
            return fetch(*args, **kwargs)

    def _training_step(self, train: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        tokens: Any = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
        if getattr(tokens, "ndim", 0) == 2:
            self._steps.add("tokens", tokens.numel())
            self._steps.add("tokens_squared", tokens.numel() * tokens.shape[1])
        loss = train(model, inputs, *args, **kwargs)
        self._steps.add(self._loss, loss)  # each is divided by their number
        return loss

    def _generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        with self._watch.phase("generation"):
            return generate(*args, **kwargs)

    def on_train_begin(self, _args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The model is wrapped, the optimizer made, and what is resumed from loaded."""
        trainer, resumed, self._resumed, self._control = self._trainer, self._resumed, None, control
        scaler = getattr(getattr(trainer, "accelerator", None), "scaler", None)
        self._steps.train(trainer.model_wrapped, kwargs.get("optimizer"), scaler, state.global_step, resumed)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._pause.close()
        self._steps.begin()

    def on_optimizer_step(self, *_: Any, optimizer: Any = None, **__: Any) -> None:
        self._learning_rate = optimizer.param_groups[0]["lr"]

    def on_step_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        self._control = control
        self._steps.end(learning_rate=self._learning_rate)
        if self._watch.should_stop:
            control.should_training_stop = True
        self._label(control)

    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        self._steps.abandon()
        self._label(control)

    def on_evaluate(self, args: Any, _state: Any, control: Any, **_: Any) -> None:
        """An evaluation is done; it may decide about a save."""
        self._pause.close()
        if self._trainer.is_in_train and (control.should_save or args.save_strategy == "best"):
            self._pause.open("checkpoint_save")

    def on_save(self, args: Any, state: Any, _control: Any, **_: Any) -> None:
        seconds, folder = self._pause.close(), os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        is_whole = not args.should_save or os.path.isfile(os.path.join(folder, MARKER))
        if is_whole and not args.save_only_model:  # from the model alone no training can be resumed
            self._saves.saved(self._steps.next, folder, seconds)
            self._saves.look()

    def on_log(self, *_: Any, logs: Mapping[str, Any] | None = None, **__: Any) -> None:
        """The Trainer logs means over its ranks and the steps since it last did so."""
        for name, value in (logs or {}).items():
            if not isinstance(value, int | float) or _NOT_LOGGED.fullmatch(name):
                continue
            if not self._steps.measured if name in _IF_UNMEASURED else math.isfinite(value):
                self._watch.log(**{self._loss if name == "loss" else name: value})

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._pause.close()
        self._watch.leave()

    def _label(self, control: Any) -> None:
        if control.should_evaluate or control.should_save:
            self._pause.open("eval" if control.should_evaluate else "checkpoint_save")

    def _save(self, _step: int) -> None:
        self._control.should_save = True  # the Trainer saves as soon as its callbacks have returned
