"""Real ranks for a test: processes with a gloo process group between them."""

from __future__ import annotations

import importlib
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

RANKS_SECONDS_MAX = 200.0
"""A set of ranks that has not answered by then is ended and the test fails."""


def on_ranks(world_size: int, target: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `target(rank, *args)` in `world_size` processes of one gloo group; return what each returned, by rank.

    `target` and its arguments must be picklable. Each rank computes on one thread.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp"])
    ranks, pipes = [], []
    # A file to meet at instead of a port: nothing else on the machine can be there first.
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world_size, store, theirs, target, args), daemon=True)
            process.start()
            theirs.close()
            ranks.append(process)
            pipes.append(ours)
        try:
            return [_answer(rank, pipe) for rank, pipe in enumerate(pipes)]
        finally:
            for process in ranks:
                process.join(timeout=5)
                process.kill()


def _answer(rank: int, pipe: Connection) -> Any:
    if not wait([pipe], RANKS_SECONDS_MAX):
        raise AssertionError(f"rank {rank} did not answer within {RANKS_SECONDS_MAX:.0f} s")
    try:
        failure, result = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} ended without an answer") from None
    if failure:
        raise AssertionError(f"rank {rank} failed:\n{failure}")
    return result


def _rank(
    rank: int, world_size: int, meet: str, pipe: Connection, target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        store = dist.FileStore(meet, world_size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
        result = target(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        pipe.send((traceback.format_exc(), None))
    else:
        pipe.send((None, result))


class Framework:
    """A module that is imported with its first attribute. A test file that names a missing one is skipped."""

    def __init__(self, name: str) -> None:
        self._name = name
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)
