"""Norms of gradients: this rank's own before any reduction, and the total one after it.

A gradient counts as non-finite if its norm is not finite: an `isfinite` for each gradient would cost ten times as much.
On the host, norms become numbers at once. On an accelerator they stay tensors, and elements beyond 1e19, whose squares
overflow, count as non-finite too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

import torch

_HALF = (torch.float16, torch.bfloat16)
SMALL_ELEMENTS: Final = 16_384
"""Tensors on the host of at most so many elements are copied together and read in one call, which takes 0.5 us for each
instead of 1.3 us; larger ones are read where they are. A rank keeps at most 128 KiB of copies for each of them."""

Scalar = torch.Tensor | float
"""A number, or a 0-d tensor on an accelerator."""


class LocalResult(NamedTuple):
    """Summary of a rank's own gradients."""

    norm: Scalar
    nonfinite: Scalar
    """How many parameters have a non-finite local gradient."""
    first: Scalar
    """Index of the first such parameter, in the order in which backward reached them; without one, any."""


class LocalGradients:
    """Norms of the gradients that this rank computed, taken while a backward runs."""

    def __init__(self, *, on_host: bool) -> None:
        """Begin without gradients.

        Args:
            on_host: the gradients are in host memory.
        """
        self._on_host = on_host
        self._batches: dict[tuple[int, ...], HostNorms] = {}
        self._before: tuple[tuple[int, ...], Grouping] | None = None
        """The newest gradients that were read together, and how."""
        self._known: set[int] = set()
        self._bad: dict[int, None] = {}
        self._norms: dict[int, torch.Tensor] = {}
        self._order: list[int] = []
        self._order_tensor = torch.empty(0, dtype=torch.int64)

    def add(self, gradients: Mapping[int, torch.Tensor], *, summands: bool = False) -> None:
        """Read local gradients, by the index of their parameter; each replaces an earlier one of this step.

        Args:
            gradients: complete on this rank and not yet reduced, in the order in which backward reached them.
            summands: they are of one backward alone, and replace nothing: the norm is that of all backwards' gradients
                as one vector. Each call has the same parameters as an earlier one, or others.
        """
        if self._on_host:
            self._add_on_host(gradients, summands=summands)
            return
        strided = _strided(gradients)
        if not strided:
            return
        for index, norm in zip(strided, norms(list(strided.values())), strict=True):
            # So that the order is that of the newest backward when gradients accumulate.
            before = self._norms.pop(index, None)
            self._norms[index] = torch.hypot(before, norm) if summands and before is not None else norm

    def _add_on_host(self, gradients: Mapping[int, torch.Tensor], *, summands: bool) -> None:
        indices = tuple(gradients)
        read = self._read_as_before(indices, gradients)
        if read is None:
            strided = _strided(gradients)
            if not strided:
                return
            grouping = Grouping.of(strided)
            self._before = (indices, grouping) if grouping is not None and len(strided) == len(indices) else None
            read, indices = HostNorms(strided, grouping), tuple(strided)
        if summands and indices in self._batches:
            before = self._batches[indices].each()
            read = HostNorms.known({index: math.hypot(before[index], norm) for index, norm in read.each().items()})
        if not self._known.isdisjoint(indices):
            self._forget(indices)
        self._known.update(indices)
        self._batches[indices] = read
        if not math.isfinite(read.total):
            self._bad |= {index: None for index, norm in read.each().items() if not math.isfinite(norm)}

    def _read_as_before(self, indices: tuple[int, ...], gradients: Mapping[int, torch.Tensor]) -> HostNorms | None:
        """Read gradients of the same parameters as the last time, which have the same sizes; None if they differ."""
        if self._before is None or self._before[0] != indices:
            return None
        grouping = self._before[1]
        try:
            return HostNorms(gradients, grouping) if gradients[indices[0]].dtype == grouping.dtype else None
        except RuntimeError:  # one of them is sparse now
            return None

    def _forget(self, again: tuple[int, ...]) -> None:
        """Gradients are read again: drop what was read of them, and keep the rest of their batches."""
        for index in again:
            self._bad.pop(index, None)
        if self._batches.pop(again, None) is not None:
            return
        for indices, read in list(self._batches.items()):
            if not set(again).isdisjoint(indices):
                del self._batches[indices]
                rest = {index: norm for index, norm in read.each().items() if index not in again}
                if rest:
                    self._batches[tuple(rest)] = HostNorms.known(rest)

    def result(self) -> LocalResult | None:
        """Summary of the gradients since `clear`; None if there were none."""
        if self._batches:
            total = math.hypot(*(read.total for read in self._batches.values()))
            return LocalResult(total, len(self._bad), next(iter(self._bad), -1))
        return self._device_result() if self._norms else None

    def clear(self) -> None:
        """Forget the step's gradients."""
        self._batches.clear()
        self._known.clear()
        self._bad.clear()
        self._norms.clear()

    @torch.no_grad()
    def _device_result(self) -> LocalResult:
        # Each operation is a launch. Norms are never negative, so those below infinity are the finite ones.
        all_norms = stacked(list(self._norms.values()))
        bad = (all_norms < math.inf).logical_not_()
        position = bad.view(torch.uint8).argmax().reshape(1)
        first = self._indices(all_norms.device).gather(0, position)[0]
        return LocalResult(torch.linalg.vector_norm(all_norms), bad.sum(), first)

    def _indices(self, device: torch.device) -> torch.Tensor:
        """The parameters' indices in the order of their gradients, on the device; cached, since it rarely changes."""
        order = list(self._norms)
        if order != self._order or self._order_tensor.device != device:
            on_host = torch.tensor(order)
            # A copy from memory that is not pinned would wait for the device.
            pinned = on_host.pin_memory() if device.type == "cuda" else on_host
            self._order, self._order_tensor = order, pinned.to(device, non_blocking=True)
        return self._order_tensor


class Grouping(NamedTuple):
    """How tensors in host memory are read together, by their indices."""

    dtype: torch.dtype
    small: dict[int, int]
    """Number of elements of each tensor that is copied."""
    large: tuple[int, ...]
    """The other tensors."""

    @classmethod
    def of(cls, tensors: Mapping[int, torch.Tensor]) -> Grouping | None:
        """How to read these tensors, at least one, all strided.

        Returns:
            None if they are of several types, or in half precision, whose squares overflow.
        """
        (dtype, *others) = {tensor.dtype for tensor in tensors.values()}
        if others or dtype in _HALF:
            return None
        sizes = {index: tensor.numel() for index, tensor in tensors.items()}
        small = {index: size for index, size in sizes.items() if size <= SMALL_ELEMENTS} if len(sizes) > 1 else {}
        return cls(dtype, small, tuple(index for index in sizes if index not in small))


class HostNorms:
    """2-norms of tensors in host memory: `total` over all of them, and of each one on request."""

    @torch.no_grad()
    def __init__(self, tensors: Mapping[int, torch.Tensor], grouping: Grouping | None) -> None:
        """Read the tensors, at least one, all strided and as the grouping says; they are not kept."""
        self._each: dict[int, float] | None = None
        self._grouping = grouping
        self._copies: torch.Tensor | None = None
        self._norms: list[torch.Tensor] = []
        """Of the large tensors."""
        self.total = math.nan if grouping is None else self._read_together(tensors, grouping)
        if not math.isfinite(self.total):
            found = norms(list(tensors.values()))
            self._each = {index: norm.item() for index, norm in zip(tensors, found, strict=True)}
            self.total = math.hypot(*self._each.values())

    @classmethod
    def known(cls, each: dict[int, float]) -> HostNorms:
        """Norms that were read before."""
        read = cls.__new__(cls)
        read._each, read.total = each, math.hypot(*each.values())
        return read

    def each(self) -> dict[int, float]:
        """The norm of each tensor, in their order, the small ones first."""
        if self._each is None:
            assert self._grouping is not None
            _, small, large = self._grouping
            parts = [] if self._copies is None else list(torch.split(self._copies, list(small.values())))
            found = [*(torch._foreach_norm(parts, 2) if parts else ()), *self._norms]
            self._each = {index: norm.item() for index, norm in zip([*small, *large], found, strict=True)}
        return self._each

    def _read_together(self, tensors: Mapping[int, torch.Tensor], grouping: Grouping) -> float:
        _, small, large = grouping
        if large:
            self._norms = list(torch._foreach_norm([tensors[index] for index in large], 2))
        found = self._norms
        if small:
            copied = [tensors[index] for index in small] if large else list(tensors.values())
            self._copies = torch._utils._flatten_dense_tensors(copied)  # type: ignore[no-untyped-call]
            found = [*found, torch.linalg.vector_norm(self._copies)]
        return float((found[0] if len(found) == 1 else torch.linalg.vector_norm(torch.stack(found))).item())


def total_norm(gradients: Iterable[torch.Tensor], *, on_host: bool) -> Scalar | None:
    """The 2-norm over all gradients; None if there are none."""
    strided = _strided(dict(enumerate(gradients)))
    if not strided:
        return None
    return (
        HostNorms(strided, Grouping.of(strided)).total
        if on_host
        else torch.linalg.vector_norm(stacked(norms([*strided.values()])))
    )


def _strided(gradients: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Without sparse gradients: these have no norm before they are coalesced, which would wait for the device."""
    return {index: gradient for index, gradient in gradients.items() if gradient.layout is torch.strided}


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


def stacked(scalars: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of these 0-d tensors, in float64 on the device of the first."""
    home = scalars[0].device
    near = [scalar if scalar.device == home else scalar.to(home, non_blocking=True) for scalar in scalars]
    return torch.stack(near).to(torch.float64)
