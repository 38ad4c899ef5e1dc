"""What scripts communicate within forward and backward, on a simulated accelerator: tensor and pipeline parallelism."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed import _functional_collectives

from rankwatch_service.demo.accelerator.simulated import SimulatedDevice


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
