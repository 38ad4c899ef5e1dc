"""Marks in a backward: each complete local gradient, the end of the rank's own work, and the end of the reduction.

The autograd engine runs queued callbacks after the last gradient, in the order in which they were queued, and callbacks
may queue more. DistributedDataParallel queues the callback that waits for its reduction while gradients are computed.
So a callback queued before it sees local gradients, and one queued by that callback runs after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle


class BackwardMarks:
    """Calls back at the marks of every backward through a model's parameters, on the thread that runs it.

    Known limit: reentrant activation checkpointing runs a separate backward for each segment, and each one is marked.
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
        """Register the hooks. DDP's own communication hook stays free for the job.

        Args:
            parameters: the parameters, in the order of the indices.
            gradient: called with index and gradient when a gradient is complete on this rank and not yet reduced.
            computed: called when the rank has computed all its gradients; from then on it waits for others.
            reduced: called when the gradients are final for the optimizer.
            failed: called with what any of the three raises; the backward itself goes on.
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
        """Discard a backward that an exception ended."""
        self._under_way = False

    def remove(self) -> None:
        """Remove the hooks."""
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
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end a user's backward
            self._failed(error)

    def _end_of_computing(self) -> None:
        self._under_way = False
        try:
            self._computed()
            # Queued from a queued callback, to run last: with a static graph DDP begins its first reduction in a
            # callback too, which is queued only now.
            _after_backward(partial(_after_backward, self._end_of_reduction))
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)

    def _end_of_reduction(self) -> None:
        try:
            self._reduced()
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)


def _after_backward(callback: Callable[[], Any]) -> None:
    """Run `callback` after the backward of this thread. Torch has no public way; DDP and FSDP use this one too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
