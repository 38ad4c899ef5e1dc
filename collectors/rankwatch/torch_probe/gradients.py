"""Norms of gradients: this rank's own before any reduction, and the total one after it.

A gradient counts as non-finite if its norm is not finite: an `isfinite` for each gradient would cost ten times as much.
On the host, norms become numbers at once. On an accelerator they stay tensors, and elements beyond 1e19, whose squares
overflow, count as non-finite too.

Marks in a backward: each complete local gradient, the end of the rank's own work, and the end of the reduction.

The autograd engine runs queued callbacks after the last gradient, in the order in which they were queued, and callbacks
may queue more. DistributedDataParallel queues the callback that waits for its reduction while gradients are computed.
So a callback queued before it sees local gradients, and one queued by that callback runs after the reduction.

Finds where a step's work ends: after the usual number of optimizer steps, the loop is outside of the step.

A loop over `watch.steps()` reaches its boundary only after it has evaluated, saved and logged. The optimizer steps show
earlier that the step itself is done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch.utils.hooks import RemovableHandle

from rankwatch.sink import Sink

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
        """Norms of the large tensors."""
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
    """The gradients without sparse ones, which have no norm before they are coalesced, and that would wait for the
    device.
    """
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
            summands: called instead with gradients of this backward alone, which others remove once they are
                accumulated.
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
    """Whether others, such as DeepSpeed, remove the gradient in their own hook, which runs before a new one."""
    hooks = getattr(leaf, "_post_accumulate_grad_hooks", None) or {}
    owners = [getattr(getattr(hook, "func", None), "__self__", None) for hook in hooks.values()]
    return not all(isinstance(owner, BackwardMarks) for owner in owners)


def _after_backward(callback: Callable[[], Any]) -> None:
    """Run `callback` after the backward of this thread. Torch has no public way; DDP and FSDP use this one too."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


STEPS_REMEMBERED: Final = 32
"""Steps with an update whose number of updates is remembered: enough for a loop that alternates between two models, one
of them five times as often."""


class Updates:
    """Counts the optimizer steps of each step of the loop, and calls `outside` of the sink after the last one.

    The smallest remembered count is the usual one, so that a pause after any step is seen. If steps differ, a step that
    goes on after the usual count is taken up again with its next backward.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._seen: deque[int] = deque(maxlen=STEPS_REMEMBERED)
        self._count = 0
        self._usual = 0
        self._vary = False

    def step_begins(self) -> None:
        """The next step of the loop begins. Steps without an update (accumulation, overflow) are not counted."""
        if self._count:
            self._seen.append(self._count)
            self._usual = min(self._seen)
            self._vary = self._usual < max(self._seen)
            self._count = 0

    def begins(self) -> None:
        """An optimizer step begins, so the step's work goes on."""
        if self._outside:
            self._sink.inside()

    def ends(self) -> None:
        """An optimizer step is done."""
        self._count += 1
        if self._outside:
            self._sink.outside()

    def gradients_are_computed(self) -> None:
        """A backward has computed its gradients: in a loop whose steps differ, another update follows."""
        if self._outside and self._vary:
            self._sink.inside()

    @property
    def _outside(self) -> bool:
        return 0 < self._usual <= self._count
