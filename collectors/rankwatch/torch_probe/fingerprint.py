"""One 64-bit number for the bits of all parameters: equal on equal replicas, different after any single flipped bit.

Memory is read as 64-bit words and the words are summed modulo 2**64. A flipped bit b changes one word by 2**b, and
with it the sum by the same amount, which is never 0 modulo 2**64. A sum does not depend on the order of tensors and
costs one pass over the bits. It does not detect two changes that cancel out, such as two words that swap places.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import torch

WORD_BYTES: Final = 8
SMALL_WORDS: Final = 2_048
"""Tensors of at most so many whole words are copied together and summed in one call: the calls for a tensor of its own
take 8 us, and on an accelerator one kernel."""


def fingerprint(tensors: Iterable[torch.Tensor]) -> int:
    """Sum the bits of `tensors` as signed 64-bit words, modulo 2**64; waits for their device."""
    total = bit_sum(list(tensors))
    return 0 if total is None else int(total.item())


@torch.no_grad()
def bit_sum(tensors: list[torch.Tensor]) -> torch.Tensor | None:
    """The fingerprint as a 0-d int64 tensor on the device of the first tensor, without waiting for the device.

    Returns:
        None if there is no tensor with elements.
    """
    together: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    alone = []
    for tensor in tensors:
        words, rest = divmod(tensor.numel() * tensor.element_size(), WORD_BYTES)
        if words <= SMALL_WORDS and not rest and tensor.is_contiguous():
            together.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        elif tensor.numel():
            alone.append(tensor)
    flatten: Callable[[list[torch.Tensor]], torch.Tensor] = torch._utils._flatten_dense_tensors
    alone += map(flatten, together.values())
    sums = [part for tensor in alone if tensor.numel() for part in _word_sums(tensor.detach())]
    if not sums:
        return None
    home = sums[0].device
    return torch.stack([part.to(home, non_blocking=True) for part in sums]).sum()


def _word_sums(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Sum one tensor's whole words, and the remaining bytes as one word padded with zeros."""
    flat = _in_memory_order(tensor)
    if flat.storage_offset() * flat.element_size() % WORD_BYTES:
        flat = flat.clone()  # a view that begins inside a word cannot be read as words
    per_word = max(1, WORD_BYTES // flat.element_size())
    whole = flat.numel() // per_word * per_word
    sums = [flat[:whole].view(torch.int64).sum()] if whole else []
    if whole < flat.numel():
        tail = flat[whole:].view(torch.uint8)
        sums.append(torch.nn.functional.pad(tail, (0, WORD_BYTES - tail.numel())).view(torch.int64)[0])
    return sums


def _in_memory_order(tensor: torch.Tensor) -> torch.Tensor:
    """Flatten, without a copy if the elements are dense in any order of dimensions (such as channels last)."""
    if not tensor.is_contiguous():
        tensor = tensor.permute(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))
    return tensor.contiguous().view(-1)
