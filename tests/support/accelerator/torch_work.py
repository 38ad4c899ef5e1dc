"""What a torch model gives a simulated accelerator: the work of layers, and the collectives of DDP, FSDP, tensor and
pipeline parallelism."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.nn.parallel import DistributedDataParallel

from tests.support.accelerator.simulated import SimulatedDevice

KERNELS: Final = 4
"""Pieces of work in one layer's forward; a backward has twice as many."""


class StoreMeeting:
    """Ranks that meet in a store of torch.distributed, which no other thread uses."""

    def __init__(self, store: Any, rank: int, world_size: int) -> None:
        self.ranks: Sequence[int] = range(world_size)
        self._store = store
        self._rank = rank

    def tell(self, name: str, at_s: float) -> None:
        self._store.set(f"{name}/{self._rank}", repr(at_s))

    def last_s(self, name: str, ranks: Sequence[int]) -> float:
        """When the last of these ranks is there; waits until all have told."""
        return max(float(self._store.get(f"{name}/{rank}")) for rank in ranks)


def store_of_ranks(rank: int, world_size: int) -> StoreMeeting:
    """A meeting of all ranks of the default group, in a store of its own, which the first one serves."""
    port: list[Any] = [None]
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        port[0] = store.port
    dist.broadcast_object_list(port, src=0)
    if rank:
        store = dist.TCPStore("127.0.0.1", port[0], world_size, is_master=False)  # type: ignore[attr-defined]
    return StoreMeeting(store, rank, world_size)


class DeviceWork(nn.Module):
    """A layer that changes nothing, and gives the device work of this length in forward and twice that in backward."""

    def __init__(self, device: SimulatedDevice, seconds: float) -> None:
        super().__init__()
        self._device = [device]  # no part of the module's state
        self._seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        """Return the values as they are."""
        done: Tensor = _Work.apply(values, self._device[0], self._seconds)  # type: ignore[no-untyped-call]
        return done

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceWork:
        return DeviceWork(self._device[0], self._seconds)


class _Work(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, device: SimulatedDevice, seconds: float) -> Tensor:
        ctx.device, ctx.seconds = device, seconds
        for _ in range(KERNELS):
            device.launch(seconds / KERNELS)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        for _ in range(2 * KERNELS):
            ctx.device.launch(ctx.seconds / KERNELS)
        return gradients[0], None, None


def reduce_on(device: SimulatedDevice, replica: DistributedDataParallel, seconds: float) -> None:
    """Let DDP's reductions take place on the device too, which waits for them where DDP lets a GPU wait."""
    group = replica.process_group
    name, ranks = group.group_name, dist.get_process_group_ranks(group)

    def reduce(bucket: Any) -> torch.futures.Future[Tensor]:
        device.collective(seconds, name, ranks)
        if bucket.is_last():
            _after_backward(lambda: device.wait_for_communication(name))
        reduction = dist.all_reduce(bucket.buffer().div_(len(ranks)), group=group, async_op=True)
        assert reduction is not None
        reduced: torch.futures.Future[Tensor] = reduction.get_future().then(lambda done: done.value()[0])
        return reduced

    replica.register_comm_hook(None, lambda _, bucket: reduce(bucket))


def gather_on(
    device: SimulatedDevice, root: nn.Module, blocks: Iterable[nn.Module], seconds: float, group: Any = None
) -> None:
    """Let the gathers and reductions of FSDP's blocks take place on the device too, with FSDP's waits.

    Call it after the blocks are wrapped, and before `watch.torch`.
    """
    name, ranks = _name_and_ranks(group)

    def gathered(*_: Any) -> None:
        device.collective(seconds, name, ranks)
        device.wait_for_communication(name)

    def watched(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(gathered)  # type: ignore[no-untyped-call]

    def reduced(_module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].requires_grad:
            args[0].register_hook(lambda _: device.collective(seconds, name, ranks))  # type: ignore[no-untyped-call]

    def ends(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: _after_backward(lambda: device.wait_for_communication(name)))  # type: ignore[no-untyped-call]

    root.register_forward_hook(ends)
    for block in blocks:
        block.register_forward_pre_hook(gathered, prepend=True)
        block.register_forward_pre_hook(reduced)
        block.register_forward_hook(watched)


def _after_backward(callback: Any) -> None:
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _name_and_ranks(group: Any) -> tuple[str, Sequence[int]]:
    return ("", ()) if group is None else (group.group_name, dist.get_process_group_ranks(group))


@contextmanager
def tensor_parallel_on(device: SimulatedDevice, group: Any, seconds: float) -> Iterator[None]:
    """Let a tensor-parallel group's all_reduces, and what DTensor waits for, take place on the device, which waits."""
    name, ranks = group.group_name, dist.get_process_group_ranks(group)

    def meet() -> None:
        device.collective(seconds, name, ranks)
        device.wait_for_communication(name)

    def all_reduce(original: Callable[..., Any], reducing: Any, *args: Any, **kwargs: Any) -> Any:
        if reducing is group:
            meet()
        return original(reducing, *args, **kwargs)

    def wait_tensor(original: Callable[..., Any], tensor: Any) -> Any:
        meet()
        return original(tensor)

    with (
        _around(dist.ProcessGroup, "allreduce", all_reduce),
        _around(_functional_collectives, "wait_tensor", wait_tensor),
    ):
        yield


@contextmanager
def pipeline_on(device: SimulatedDevice, seconds: float) -> Iterator[None]:
    """Let the messages between pipeline stages take place on the device, which waits for those that it receives."""
    sent: Counter[tuple[int, int]] = Counter()
    expected: dict[int, tuple[Any, str, int]] = {}
    """By the id of what the script waits for: that itself, so that its id stays its own; the message; who sends it."""

    def message(sender: int, receiver: int) -> str:
        sent[sender, receiver] += 1
        return f"message-{sender}-{receiver}-{sent[sender, receiver]}"

    def send(original: Callable[..., Any], group: Any, tensors: Any, receiver: int, *args: Any) -> Any:
        ranks = dist.get_process_group_ranks(group)
        device.send(message(dist.get_rank(), ranks[receiver]))
        return original(group, tensors, receiver, *args)

    def receive(original: Callable[..., Any], group: Any, tensors: Any, sender: int, *args: Any) -> Any:
        work = original(group, tensors, sender, *args)
        rank = dist.get_process_group_ranks(group)[sender]
        expected[id(work)] = work, message(rank, dist.get_rank()), rank
        return work

    def wait(original: Callable[..., Any], work: Any, *args: Any) -> Any:
        if id(work) in expected:
            _, name, rank = expected.pop(id(work))
            device.receive(name, rank, seconds)
        return original(work, *args)

    with (
        _around(dist.ProcessGroup, "send", send),
        _around(dist.ProcessGroup, "recv", receive),
        _around(dist.Work, "wait", wait),
    ):
        yield


@contextmanager
def _around(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a function of a class or module; the replacement gets the original first."""
    original, kept = getattr(owner, name), inspect.getattr_static(owner, name)
    setattr(owner, name, lambda *args, **kwargs: replacement(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, kept)
