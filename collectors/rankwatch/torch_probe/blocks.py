"""Marks the work of a sharded model's blocks on the device, without its waits for other ranks' parameters.

FSDP makes the device wait before a block's forward and backward, until its parameters are gathered, and where reduced
gradients are needed. In a forward its wait is over when a hook runs that follows its own. In a backward its wait is a
hook of the block's output, so a hook that is placed there after it runs when the wait is over; the block's work ends
where the gradient of its input is complete. Full backward hooks would run before the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.torch_probe.device_timer import BLOCKS_MAX, SPANS_MAX, DeviceTimer, TimedMoment
from rankwatch.torch_probe.fsdp import FsdpBlock, blocks
from rankwatch.torch_probe.phases import FORWARD, OUTPUTS_MAX, Mark, is_recomputed, with_graph

PASSES_MAX: Final = SPANS_MAX // (2 * BLOCKS_MAX)
"""Forwards of a block in a step that are all measured, and as many backwards."""


class BlockMarks:
    """The marks of evenly spaced blocks of all sharded models."""

    def __init__(
        self, modules: Iterable[torch.nn.Module], timer: DeviceTimer, failed: Callable[[Exception], None]
    ) -> None:
        """Register the hooks. `failed` gets what finding the blocks raises; then there are none."""
        self._count = 0
        self._marked: list[_MarkedBlock] = []
        self._sharded = False
        self.all_ranks = False
        """Whether the blocks are divided over all ranks of the job."""
        self.handles: list[RemovableHandle] = []
        try:
            found = [blocks(module) for module in modules]
        except Exception as error:  # noqa: BLE001 -- private names of a torch that is not known
            failed(error)
            found = []
            self._sharded = True
        self._sharded |= any(found)
        if not all(found):
            return  # where only some models are sharded, their work cannot be told from the others'
        together = [block for one in found for block in one]
        self._count = len(together)
        self.all_ranks = bool(together) and all(block.all_ranks for block in together)
        for block in _spread(together):
            marked = _MarkedBlock(timer, failed)
            self._marked.append(marked)
            self.handles += marked.watch(block)

    @property
    def measured(self) -> bool:
        """Whether all models are sharded, and some of their blocks are measured."""
        return bool(self._marked)

    @property
    def measures_now(self) -> bool:
        """Whether the device is given the work of a block that is measured."""
        return any(one.measures_now for one in self._marked)

    @property
    def each(self) -> float:
        """How many blocks each measured one stands for, in this step; 0: no model is sharded."""
        if not self._sharded:
            return 0.0
        measured = [one.sampling.each for one in self._marked if one.takes_part]
        passes = sum(measured) / len(measured) if measured else 1.0
        return max(self._count / max(len(measured) or len(self._marked), 1), 1.0) * passes


def _spread(blocks: Sequence[FsdpBlock]) -> Sequence[FsdpBlock]:
    """At most `BLOCKS_MAX` of them, evenly spaced."""
    if len(blocks) <= BLOCKS_MAX:
        return blocks
    return [blocks[number * len(blocks) // BLOCKS_MAX] for number in range(BLOCKS_MAX)]


class _MarkedBlock:
    """One block, in each micro-batch or in some. Recomputation in a backward is part of the backward."""

    def __init__(self, timer: DeviceTimer, failed: Callable[[Exception], None]) -> None:
        self._timer = timer
        self._failed = failed
        self.sampling = timer.sampling(PASSES_MAX)
        self.takes_part = False
        """In its newest forward its input had a gradient, where its backward ends; without, it is not measured."""
        self._forward: TimedMoment | None = None
        self._backward: TimedMoment | None = None

    @property
    def measures_now(self) -> bool:
        """Whether its forward or backward has begun, in a pass in which it is measured, and not ended."""
        return self._forward is not None or self._backward is not None

    def watch(self, block: FsdpBlock) -> list[RemovableHandle]:
        return [
            block.inner.register_forward_pre_hook(Mark(self._forward_begins, self._failed), with_kwargs=True),
            block.outer.register_forward_hook(Mark(self._forward_ends, self._failed)),
        ]

    def _forward_begins(self, _: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._forward = None
        if is_recomputed() or not torch.is_grad_enabled():
            return
        self._backward = None
        entering = next(with_graph((args, kwargs)), None)
        self.takes_part = entering is not None
        if entering is not None and self.sampling.takes():
            self._forward = self._timer.mark()
            entering.register_hook(Mark(self._backward_ends, self._failed))  # type: ignore[no-untyped-call]

    def _forward_ends(self, _module: torch.nn.Module, _args: Any, output: Any) -> None:
        begun, self._forward = self._forward, None
        if begun is None or is_recomputed():
            return
        self._timer.block_ends(FORWARD, begun)
        for tensor in islice(with_graph(output), OUTPUTS_MAX):
            tensor.register_hook(Mark(self._backward_begins, self._failed))  # type: ignore[no-untyped-call]

    def _backward_begins(self, *_: Any) -> None:
        if self._backward is None:
            self._backward = self._timer.mark()

    def _backward_ends(self, *_: Any) -> None:
        begun, self._backward = self._backward, None
        if begun is not None:
            self._timer.block_ends("backward", begun)
