"""Norms of gradients: this rank's own before any reduction, and the total one after it.

A gradient counts as non-finite if its norm is not finite: an `isfinite` for each gradient would cost ten times as much.
On the host, norms become numbers at once. On an accelerator they stay tensors, and elements beyond 1e19, whose squares
overflow, count as non-finite too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)

Scalar = torch.Tensor | float
"""A number, or a 0-d tensor on an accelerator."""


class LocalResult(NamedTuple):
    """Summary of a rank's own gradients."""

    norm: Scalar
    nonfinite: Scalar
    """How many parameters have a non-finite local gradient."""
    first: Scalar
    """Index of the first such parameter, in the order in which backward reached them; -1 if none."""


class LocalGradients:
    """Norms of the gradients that this rank computed, taken while a backward runs.

    Call `add` when a parameter's gradient is complete on this rank and not yet reduced.
    """

    def __init__(self, *, at_once: bool, on_host: bool) -> None:
        """Begin without gradients.

        Args:
            at_once: read each gradient in `add`. Otherwise `flush` reads all of them together, which costs less, but
                is correct only if they are still local by then.
            on_host: the gradients are in host memory.
        """
        self.at_once = at_once
        self._on_host = on_host
        self._waiting: dict[int, torch.Tensor] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._order: list[int] = []
        self._order_tensor = torch.empty(0, dtype=torch.int64)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the local gradient of one parameter; replaces an earlier one of this step."""
        if gradient.layout is not torch.strided:
            return  # a sparse gradient has no norm before it is coalesced, which would wait for the device
        self._waiting[index] = gradient
        if self.at_once:
            self.flush()

    def flush(self) -> None:
        """Compute the norms of the gradients added since the last flush."""
        if not self._waiting:
            return
        for index, norm in zip(self._waiting, norms(list(self._waiting.values())), strict=True):
            self._norms.pop(index, None)  # so that the order is that of the newest backward when gradients accumulate
            self._norms[index] = norm
        self._waiting.clear()

    def result(self) -> LocalResult | None:
        """Summary of the gradients since `clear`; None if there were none."""
        if not self._norms:
            return None
        if self._on_host:
            numbers = {index: norm.item() for index, norm in self._norms.items()}
            bad = [index for index, number in numbers.items() if not math.isfinite(number)]
            return LocalResult(math.hypot(*numbers.values()), len(bad), bad[0] if bad else -1)
        return self._device_result()

    def clear(self) -> None:
        """Forget the step's gradients."""
        self._waiting.clear()
        self._norms.clear()

    @torch.no_grad()
    def _device_result(self) -> LocalResult:
        stacked = _stacked(list(self._norms.values()))
        bad = ~stacked.isfinite()
        position = bad.to(torch.uint8).argmax().reshape(1)
        first = self._indices(stacked.device).gather(0, position)[0]
        none = first.new_full((), -1)
        return LocalResult(torch.linalg.vector_norm(stacked), bad.sum(), torch.where(bad.any(), first, none))

    def _indices(self, device: torch.device) -> torch.Tensor:
        """The parameters' indices in the order of their gradients, on the device; cached, since it rarely changes."""
        order = list(self._norms)
        if order != self._order or self._order_tensor.device != device:
            on_host = torch.tensor(order)
            # A copy from memory that is not pinned would wait for the device.
            pinned = on_host.pin_memory() if device.type == "cuda" else on_host
            self._order, self._order_tensor = order, pinned.to(device, non_blocking=True)
        return self._order_tensor


def total_norm(gradients: Iterable[torch.Tensor], *, on_host: bool) -> Scalar | None:
    """The 2-norm over all gradients; None if there are none."""
    strided = [gradient for gradient in gradients if gradient.layout is torch.strided]
    if not strided:
        return None
    parts = norms(strided)
    return math.hypot(*(part.item() for part in parts)) if on_host else torch.linalg.vector_norm(_stacked(parts))


@torch.no_grad()
def norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """2-norms of the tensors, in their order, one foreach call for each device and type."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append(place)
    found: list[torch.Tensor] = [tensors[0]] * len(tensors)
    for (device, dtype), places in groups.items():
        members = [tensors[place] for place in places]
        # Without a wider type, a norm overflows at 65,504 in float16 and has 8 bits of precision in bfloat16.
        group = torch._foreach_norm(members, 2, torch.float32 if dtype in _HALF else None)
        taken = map(_settled, members, group) if device.type == "cpu" else group
        for place, norm in zip(places, taken, strict=True):
            found[place] = norm
    return found


def _settled(tensor: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """The norm, computed again in float64 if it is not finite: squares overflow before elements do."""
    return norm if math.isfinite(norm.item()) else torch.linalg.vector_norm(tensor, dtype=torch.float64)


def _stacked(scalars: list[torch.Tensor]) -> torch.Tensor:
    home = scalars[0].device
    near = [scalar if scalar.device == home else scalar.to(home, non_blocking=True) for scalar in scalars]
    return torch.stack(near).to(torch.float64)
