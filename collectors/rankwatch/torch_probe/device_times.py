"""What the device of a rank is measured by: the timer of its steps, the marks of blocks, and those of collectives.

Marks the work of a sharded model's blocks on the device, without its waits for other ranks' parameters.

FSDP makes the device wait before a block's forward and backward, until its parameters are gathered, and where reduced
gradients are needed. In a forward its wait is over when a hook runs that follows its own. In a backward its wait is a
hook of the block's output, so a hook that is placed there after it runs when the wait is over; the block's work ends
where the gradient of its input is complete. Full backward hooks would run before the wait.

Marks where a device waits for other ranks in what a script communicates, as with tensor and pipeline parallelism.

Torch has no hooks there. All that Python communicates goes through the methods of a process group, and waits for it in
`Work.wait` or, for DTensor, in `wait_tensor`. These functions are replaced while the probe is open, and only in jobs
whose waits are not known otherwise. In each of them the stream of the training may be made to wait: in the first ones
where the communication takes place on that stream itself.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from threading import get_ident
from typing import Any, Final

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.sink import Sink
from rankwatch.torch_probe.device import (
    BLOCK,
    BLOCKS_MAX,
    PASSES,
    SPANS_MAX,
    WAIT,
    Device,
    DeviceTimer,
    StepSpans,
    TimedMoment,
)
from rankwatch.torch_probe.phases import FORWARD, OUTPUTS_MAX, Mark, is_recomputed, with_graph
from rankwatch.torch_probe.watched_model import FsdpBlock, WatchedModels, blocks, is_distributed

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
        """Whether the input of its newest forward had a gradient, which marks the end of its backward; else it is not
        measured."""
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


_OF_GROUPS: Final = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "all_gather_single",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_single",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "send",
    "recv",
    "barrier",
)
"""Methods of a process group that communicate. Not every version of torch has all of them."""


class CollectiveWaits:
    """The marks of one training thread, from when it is made until `remove`."""

    def __init__(
        self, device: Device, timer: DeviceTimer, part: Callable[[], str | None], failed: Callable[[Exception], None]
    ) -> None:
        """Replace torch's functions. Call it on the thread that trains, with its usual stream.

        Args:
            device: of the rank.
            timer: gets the marks.
            part: the part of the step in which the device is given work now (see `StepSpans.waits`); None: waits in it
                are not measured.
            failed: gets what a mark raises.
        """
        self._device = device
        self._timer = timer
        self._part = part
        self._failed = failed
        self._thread = get_ident()
        self._stream = device.stream()
        self._within = False
        """One of the functions is running for the training, and may call others of them."""
        self._removed = False
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        """What was replaced and by what, by owner and name."""
        group, work = torch.distributed.ProcessGroup, torch.distributed.Work
        of_dtensor = sys.modules.get("torch.distributed._functional_collectives")  # not imported: not used
        places = [*((group, name) for name in _OF_GROUPS), (work, "wait"), (of_dtensor, "wait_tensor")]
        for owner, name in places:
            if hasattr(owner, name):
                self._replace(owner, name)

    def remove(self) -> None:
        """Restore torch's functions. Where others have replaced one since, ours stays in theirs and does nothing."""
        self._removed = True
        for owner, name, original, ours in self._replaced:
            if getattr(owner, name) is ours:
                setattr(owner, name, original)
        self._replaced = []
        self._part = lambda: None  # it holds the models, which what stays in theirs must not keep alive

    def _replace(self, owner: Any, name: str) -> None:
        original, kept = getattr(owner, name), inspect.getattr_static(owner, name)  # of a class: a function, a method

        @functools.wraps(original)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling() or self._removed or self._within or not self._trains():
                return original(*args, **kwargs)
            begun = None
            try:  # a signal's handler may raise anywhere, and the script may go on after it
                self._within = True
                begun = self._begins()
                return original(*args, **kwargs)
            finally:
                self._within = False
                if begun is not None:
                    self._ends(*begun)

        setattr(owner, name, marked)
        self._replaced.append((owner, name, kept, marked))

    def _trains(self) -> bool:
        """Whether the training calls, and not another thread, such as one that saves a checkpoint."""
        return get_ident() == self._thread or is_recomputed()

    def _begins(self) -> tuple[str, TimedMoment] | None:
        """The part in which a wait begins, and its start; None: it is not measured."""
        try:
            part = self._part()
            if part is None or self._device.stream() != self._stream:  # what another stream waits for overlaps
                return None
            begin = self._timer.wait_begins(part)
        except Exception as error:  # noqa: BLE001 -- an error of the probe must not end the user's communication
            self._failed(error)
            return None
        return None if begin is None else (part, begin)

    def _ends(self, part: str, begin: TimedMoment) -> None:
        try:
            self._timer.wait_ends(part, begin)
        except Exception as error:  # noqa: BLE001 -- the same
            self._failed(error)


class DeviceTimes:
    """The timer of the watched models, and the marks between phases' own."""

    def __init__(self, device: Device, models: WatchedModels, sink: Sink, failed: Callable[[Exception], None]) -> None:
        """Register the hooks of blocks; `failed` gets what one of them raises."""
        self.timer = DeviceTimer(device, sink)
        self._device = device
        self._models = models
        self._failed = failed
        self._blocks = BlockMarks([model.module for model in models.each], self.timer, failed)
        self._collectives: CollectiveWaits | None = None
        self._compiled = False

    def take(self) -> StepSpans:
        """What was marked in the step that ends now.

        After the first step it is known how gradients are reduced. If that does not hold all waits of the job, the
        other ones are marked from then on.
        """
        reductions_are_all = self._blocks.all_ranks or self._models.waits_in_ddp
        knows_waits = reductions_are_all or self._collectives_are_known
        taken = self.timer.take(blocks_each=self._blocks.each, knows_waits=knows_waits)
        if self._collectives is None and not reductions_are_all and is_distributed():
            self._collectives = CollectiveWaits(self._device, self.timer, self._part, self._failed)
            self._compiled = self._models.compiled
        return taken

    def remove(self) -> None:
        """Remove the hooks, and restore torch's functions."""
        for handle in self._blocks.handles:
            handle.remove()
        if self._collectives is not None:
            self._collectives.remove()

    @property
    def _collectives_are_known(self) -> bool:
        """Whether all waits of this step are marked: DDP's or FSDP's, and those in collectives of the model.

        What a compiled part communicates is not seen, nor what a library does without torch.distributed; so none is
        taken for known in a step without any mark.
        """
        reductions_are_known = self._models.all_in_ddp or self._blocks.measured
        return reductions_are_known and self.timer.waits_seen and not self._compiled

    def _part(self) -> str | None:
        """The part of the step in which the device is given work now; None: waits in it are not measured.

        Where blocks are measured, the rest of a pass counts as waiting as a whole, as does all of `WAIT`.
        """
        if self.timer.phase == WAIT:
            return None
        if self.timer.phase in PASSES and self._blocks.each:
            return BLOCK if self._blocks.measures_now else None
        return self.timer.phase
