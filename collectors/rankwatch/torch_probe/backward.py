"""Marks in a backward: each complete local gradient, the end of the rank's own work, and the end of the reduction.

The autograd engine runs queued callbacks after the last gradient, in the order in which they were queued, and callbacks
may queue more. DistributedDataParallel queues the callback that waits for its reduction while gradients are computed.
So a callback queued before it sees local gradients, and one queued by that callback runs after the reduction.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
        leaves: Iterable[tuple[int, torch.Tensor]],
        *,
        gradients: Callable[[dict[int, torch.Tensor]], None],
        summands: Callable[[dict[int, torch.Tensor]], None],
        computed: Callable[[], None],
        reduced: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        """Register the hooks. DDP's own communication hook stays free for the job.

        Args:
            leaves: tensors whose gradients are accumulated, each with its index.
            gradients: called with gradients by index, complete on this rank and not yet reduced, in the order in which
                backward reached them.
            summands: called instead with gradients of this backward alone, which others take once they are accumulated.
            computed: called when the rank has computed all its gradients; from then on it waits for others.
            reduced: called when the gradients are final for the optimizer.
            failed: called with what any of the three raises; the backward itself goes on.
        """
        self.at_once = False
        """Pass on each gradient when it is complete. Otherwise all are passed on together when the last one is, which
        costs less, but is correct only if they are still local by then."""
        self._gradients = gradients
        self._summands = summands
        self._buffered: set[int] = set()
        """Parameters whose gradients Megatron may have added to its own buffers already."""
        self._found: dict[int, torch.Tensor] = {}
        self._computed = computed
        self._reduced = reduced
        self._failed = failed
        self._under_way = False
        self._handles: list[RemovableHandle] = []
        for index, leaf in leaves:
            self.mark(index, leaf)

    def mark(self, index: int, leaf: torch.Tensor) -> None:
        """Register the hook of one tensor whose gradient is accumulated, if it has one."""
        if not leaf.requires_grad:
            return
        if hasattr(leaf, "main_grad"):
            self._buffered.add(index)
        elif _is_taken(leaf):
            self._handles.append(leaf.register_hook(partial(self._arrives, index)))  # type: ignore[no-untyped-call]
            return
        hook = partial(self._accumulated, index)
        self._handles.append(leaf.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def reset(self) -> None:
        """Discard a backward that an exception ended."""
        self._under_way = False
        self._found = {}

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrives(self, index: int, gradient: torch.Tensor) -> None:
        try:
            self._begin()
            self._summands({index: gradient.detach()})
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end a user's backward
            self._failed(error)

    def _accumulated(self, index: int, parameter: torch.Tensor) -> None:
        # Called for each parameter, so what is done for all of them together is done later.
        gradient = parameter.grad
        if gradient is None or (index in self._buffered and getattr(parameter, "grad_added_to_main_grad", False)):
            gradient = getattr(parameter, "main_grad", None)
            self.at_once |= gradient is not None  # it may be reduced before the end
        if gradient is not None:
            self._found[index] = gradient
        if self._under_way and not self.at_once:
            return
        try:
            self._begin()
            if self.at_once:
                self._pass_on()
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end a user's backward
            self._failed(error)

    def _begin(self) -> None:
        if not self._under_way:
            self._under_way = True
            _after_backward(self._end_of_computing)

    def _pass_on(self) -> None:
        found, self._found = self._found, {}
        if found:
            self._gradients(found)

    def _end_of_computing(self) -> None:
        self._under_way = False
        try:
            self._pass_on()
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


def _is_taken(leaf: torch.Tensor) -> bool:
    """Whether others, such as DeepSpeed, take the gradient in a hook of their own, which runs before a new one."""
    hooks = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks.values()]
    return not all(isinstance(owner, BackwardMarks) for owner in owners)


def _after_backward(callback: Callable[[], Any]) -> None:
    """Run `callback` after the backward of this thread. Torch has no public way; DDP and FSDP use this one too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)
