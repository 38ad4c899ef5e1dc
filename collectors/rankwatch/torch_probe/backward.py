"""Where a backward is: each local gradient as it is complete, the end of the rank's own work, the end of the reduction.

The autograd engine runs queued callbacks after the last gradient, in the order they were queued, and callbacks may
queue more. DistributedDataParallel queues the one that waits for its reduction while gradients are still computed, so
a callback queued before it sees local gradients, and one queued from there runs when the reduction is through.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class BackwardMarks:
    """Calls back at the marks of every backward through a model's parameters, on the thread that runs it.

    Known limit: reentrant activation checkpointing runs a backward of its own for each segment, and each one has
    its marks.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        *,
        gradient: Callable[[int, torch.Tensor], None],
        computed: Callable[[], None],
        reduced: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Place the hooks. DDP's own communication hook stays free for the job.

        Args:
            parameters: those that get gradients, in the order that indices mean.
            gradient: a parameter's gradient is complete on this rank and not reduced; index and gradient.
            computed: the rank has computed all its gradients; what follows is waiting for others.
            reduced: the gradients are what the optimizer will see.
            failed: takes what any of the three raises; the backward itself goes on.
        """
        self._gradient = gradient
        self._computed = computed
        self._reduced = reduced
        self._failed = failed
        self._under_way = False
        self._handles: list[RemovableHandle] = [
            parameter.register_post_accumulate_grad_hook(partial(self._accumulated, index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.requires_grad
        ]

    def reset(self) -> None:
        """Forget a backward that was cut off by an exception."""
        self._under_way = False

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        try:
            if not self._under_way:
                self._under_way = True
                _after_backward(self._end_of_computing)
            if parameter.grad is not None:
                self._gradient(index, parameter.grad)
        except Exception as error:  # noqa: BLE001 -- nothing of ours may end a user's backward
            self._failed(error)

    def _end_of_computing(self) -> None:
        self._under_way = False
        try:
            self._computed()
            # Twice behind the others: with a static graph DDP begins its first reduction in a callback of its own.
            _after_backward(partial(_after_backward, self._end_of_reduction))
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)

    def _end_of_reduction(self) -> None:
        try:
            self._reduced()
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)


def _after_backward(callback: Callable[[], Any]) -> None:
    """Queue `callback` behind the backward that runs on this thread."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
