"""What integrations of libraries have in common whose user writes the loop: steps, seen by what the loop calls.

A step begins where the loop asks a loader for a batch, or else with the forward of a model that trains. It ends where
the library's optimizer has stepped. What lies between is between two steps: the loop's scheduler, its saves, and its
question `watch.should_stop`, where orders are carried out. Nothing here raises into training.
"""

from __future__ import annotations

import atexit
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch

from rankwatch.integrations.framework_steps import FrameworkSteps
from rankwatch.loop import Checkpoint
from rankwatch.notices import say
from rankwatch.watch import Watch

Call: TypeAlias = Callable[..., Any]


class UserLoop:
    """The steps of one loop."""

    def __init__(self, watch: Watch, models: Sequence[torch.nn.Module], first: Callable[[], int]) -> None:
        """Place hooks on the models, before those of `watch.torch`.

        Args:
            watch: of this rank.
            models: as the loop calls them.
            first: returns the number of the first step; called when it begins.
        """
        self._watch = watch
        self._models = models
        self._first: Callable[[], int] | None = first
        self._steps = FrameworkSteps(watch)
        self._at_rest = False
        """The running step has begun with its batch, and its work has not."""
        self._loss: torch.Tensor | None = None
        self._losses = 0
        for model in models:
            model.register_forward_pre_hook(self._before_forward, prepend=True)
        atexit.register(self.leave)

    @property
    def next_step(self) -> int:
        """The number of the running or the next step: the one to go on from, where the state is saved now."""
        return self._steps.next

    def measure(self, model: Any, optimizer: Any, **parts: Any) -> None:
        """Call `watch.torch`; rank 0 prints a line if it cannot measure these."""
        try:
            self._watch.torch(model, optimizer, **parts)
        except (TypeError, ValueError) as error:
            if self._watch.identity.rank == 0:
                say(f"gradients and parameters are not watched: {error}")

    def load(self, checkpoint: Checkpoint | None, call: Callable[[], Any]) -> Any:
        """Call a load; `checkpoint` is what it loads, if that was advised."""
        begun_s = time.monotonic()
        with self._watch.pause("checkpoint_load"):
            result = call()
        if checkpoint is not None:
            self._watch.checkpoint_loaded(checkpoint, time.monotonic() - begun_s)
            self._first, self._steps.next = None, checkpoint.step
        return result

    def batches(self, iterate: Callable[[], Iterable[Any]]) -> Callable[[], Iterator[Any]]:
        """Wrap the `__iter__` of a loader of which every rank draws its own batches."""

        @functools.wraps(iterate)
        def iterated() -> Iterator[Any]:
            iterator = iter(iterate())
            while True:
                self._asks_for_batch()
                try:
                    with self._watch.phase("data_wait"):
                        batch = next(iterator)
                except StopIteration:
                    self._give_up()
                    return
                if self._at_rest:
                    self._watch._meter.outside()
                yield batch

        return iterated

    def backward(self, loss: Any) -> None:
        """The backward of a loss begins; the step's loss is the mean over its backwards."""
        self.work()
        with self._watch._faults:
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
                self._losses += 1

    def work(self) -> None:
        """The step computes."""
        self._begin()
        if self._at_rest:
            self._at_rest = False
            self._watch._meter.inside()

    def end(self, **values: Any) -> None:
        """The optimizer has stepped; `values` are logged with the loss."""
        if self._loss is not None:
            values["loss"] = self._loss / self._losses
            self._loss, self._losses = None, 0
        self._steps.end(**values)

    def leave(self) -> None:
        """End the loop. A step of which only the batch was drawn is discarded."""
        if self._give_up():
            self._watch._loop.exit.leave("break")  # what ends the process, if anything does, is told by its hooks

    def _begin(self) -> None:
        if self._first is not None:
            with self._watch._faults:
                self._steps.next = max(self._steps.next, self._first())
            self._first = None
        self._steps.begin()

    def _asks_for_batch(self) -> None:
        if not self._steps.runs and torch.is_grad_enabled() and all(model.training for model in self._models):
            self._begin()
            self._at_rest = True

    def _give_up(self) -> bool:
        was_at_rest, self._at_rest = self._at_rest, False
        if was_at_rest:
            self._steps.abandon()
        return was_at_rest

    def _before_forward(self, model: torch.nn.Module, *_: Any) -> None:
        if model.training and torch.is_grad_enabled():
            self.work()
