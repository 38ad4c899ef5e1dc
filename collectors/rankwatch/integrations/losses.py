"""The loss of a step as its backward sees it: the scalar on which `backward` is called, before a loss scale."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

Loss = torch.Tensor | float


class Losses:
    """Watches what `torch.autograd.backward` is called on, which `Tensor.backward` calls too. Waits for no device.

    The losses of a step are added up: a loop that accumulates gradients divides each loss, so the sum is their mean.
    """

    def __init__(self, begins: Callable[[], bool], failed: Callable[[Exception], None]) -> None:
        """Replace two functions of torch, until `close`.

        Args:
            begins: called when a backward begins; returns whether it counts.
            failed: called with an error of ours; the backward itself goes on.
        """
        self.replaces = False
        """A further loss replaces the sum: a closure computes the loss of one step several times."""
        self._begins = begins
        self._failed = failed
        self._sum: Loss | None = None
        self._unscaled: torch.Tensor | None = None
        self._originals = torch.autograd.backward, torch.amp.GradScaler.scale
        torch.autograd.backward = self._watched_backward(torch.autograd.backward)
        torch.amp.GradScaler.scale = self._watched_scale(torch.amp.GradScaler.scale)  # type: ignore[method-assign]

    def take(self) -> Loss | None:
        """The loss since the last call, on its device; None without a backward of a scalar."""
        found, self._sum, self._unscaled = self._sum, None, None
        return found

    def close(self) -> None:
        """Give torch its functions back."""
        torch.autograd.backward, torch.amp.GradScaler.scale = self._originals  # type: ignore[method-assign]

    def _watched_backward(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                self._backward_begins(tensors, grad_tensors)
            return backward(tensors, grad_tensors, *args, **kwargs)

        return watched

    def _watched_scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(scale)
        def watched(self_: torch.amp.GradScaler, outputs: Any) -> Any:
            if isinstance(outputs, torch.Tensor) and outputs.requires_grad and self_.is_enabled():
                self._unscaled = outputs.detach()  # without its graph, which would stay in memory
            return scale(self_, outputs)

        return watched

    def _backward_begins(self, tensors: Any, gradients: Any) -> None:
        try:
            if not self._begins():
                return
            tensor = tensors if isinstance(tensors, torch.Tensor) else _sole(tensors)
            unscaled, self._unscaled = self._unscaled, None
            if gradients is None and tensor is not None and tensor.numel() == 1 and not hasattr(tensor, "to_local"):
                self._add(tensor.detach() if unscaled is None else unscaled)
        except Exception as error:  # noqa: BLE001 -- an error of ours must not end a user's backward
            self._failed(error)

    def _add(self, tensor: torch.Tensor) -> None:
        loss: Loss = float(tensor) if tensor.device.type == "cpu" else tensor
        self._sum = loss if self._sum is None or self.replaces else self._sum + loss


def _sole(tensors: Any) -> torch.Tensor | None:
    found = tuple(tensors)
    return found[0] if len(found) == 1 and isinstance(found[0], torch.Tensor) else None
