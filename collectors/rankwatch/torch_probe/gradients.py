"""Norms of gradients: this rank's own before any reduction, and the total one after it.

Everything stays a tensor on the gradients' device. A gradient counts as non-finite when its norm is not finite: an
`isfinite` for each gradient would cost ten times as much. On an accelerator elements beyond 1e19 count as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)


class LocalResult(NamedTuple):
    """0-d tensors on the device of the gradients."""

    norm: torch.Tensor
    nonfinite: torch.Tensor
    """How many parameters have a non-finite local gradient."""
    first: torch.Tensor
    """Index of the parameter that had one first, in the order in which backward reached them; -1 without one."""


class LocalGradients:
    """Norms of the gradients as this rank computed them, taken while a backward runs.

    `add` is for the moment when a parameter's gradient is complete on this rank and nobody has reduced it yet.
    """

    def __init__(self, at_once: bool) -> None:
        """Begin without gradients.

        Args:
            at_once: read each gradient in `add`. Otherwise `flush` reads all of them in one go, which takes fewer
                kernel launches, but only works if they are still local by then.
        """
        self._at_once = at_once
        self._waiting: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._order: list[int] = []
        self._order_tensor = torch.empty(0, dtype=torch.int64)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Note the local gradient of one parameter; one that came before in this step is replaced."""
        if gradient.layout is not torch.strided:
            return  # a sparse gradient has no norm before it is coalesced, which would wait for the device
        self._waiting[index] = gradient
        if self._at_once:
            self.flush()

    @torch.no_grad()
    def flush(self) -> None:
        """Read the gradients that wait."""
        if not self._waiting:
            return
        for index, norm in zip(self._waiting, norms(list(self._waiting.values())), strict=True):
            self._norms.pop(index, None)  # with accumulated gradients the order is that of the newest backward
            self._norms[index] = norm
        self._waiting.clear()

    @torch.no_grad()
    def result(self) -> LocalResult | None:
        """What the gradients since `clear` say; None without any."""
        if not self._norms:
            return None
        stacked = _stack(list(self._norms.values()))
        bad = ~stacked.isfinite()
        position = bad.to(torch.uint8).argmax().reshape(1)
        first = self._indices(stacked.device).gather(0, position)[0]
        return LocalResult(
            torch.linalg.vector_norm(stacked), bad.sum(), torch.where(bad.any(), first, first.new_full((), -1))
        )

    def clear(self) -> None:
        """Forget the step's gradients."""
        self._waiting.clear()
        self._norms.clear()

    def _indices(self, device: torch.device) -> torch.Tensor:
        """The parameters' indices in the order they came, on the device; it rarely changes, so it is kept there."""
        order = list(self._norms)
        if order != self._order or self._order_tensor.device != device:
            on_host = torch.tensor(order)
            # From ordinary memory the copy would wait for the device.
            pinned = on_host.pin_memory() if device.type == "cuda" else on_host
            self._order, self._order_tensor = order, pinned.to(device, non_blocking=True)
        return self._order_tensor


@torch.no_grad()
def total_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """Return the 2-norm over all gradients, as a 0-d tensor; None without any."""
    strided = [gradient for gradient in gradients if gradient.layout is torch.strided]
    return torch.linalg.vector_norm(_stack(norms(strided))) if strided else None


def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """2-norms of the tensors, in their order, one foreach call for each device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: list[torch.Tensor] = [tensors[0]] * len(tensors)
    for (_, dtype), places in groups.items():
        # A norm of 16-bit numbers that is itself a 16-bit number overflows at 65,504 or has 8 bits of precision.
        widened = torch.float32 if dtype in _HALF else None
        for place, norm in zip(places, torch._foreach_norm([tensors[i] for i in places], 2, widened), strict=True):
            found[place] = norm if _is_settled(norm) else torch.linalg.vector_norm(tensors[place], dtype=torch.float64)
    return found


def _is_settled(norm: torch.Tensor) -> bool:
    """Whether a norm cannot be told better: squares of large float32 numbers overflow where the numbers do not.

    A device would have to be waited for to know.
    """
    return norm.device.type != "cpu" or math.isfinite(norm.item())


def _stack(scalars: list[torch.Tensor]) -> torch.Tensor:
    home = scalars[0].device
    near = [scalar if scalar.device == home else scalar.to(home, non_blocking=True) for scalar in scalars]
    return torch.stack(near).to(torch.float64)
