"""The process group of a rank of the demo's jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Final

import torch
import torch.distributed as dist

from rankwatch_service.supervise import die_with_parent

COLLECTIVE_LIMIT: Final = timedelta(minutes=10)
"""torch's time-out for a hung rank: the usual value, far longer than the demo needs."""


@contextmanager
def joined_group(directory: Path) -> Iterator[tuple[int, int]]:
    """Join the gloo group of this launch, on one thread; yields rank and world size. The rank dies with its launcher.

    Ranks meet by a file in `directory`, since another program could take a port in between.
    """
    rank, world_size, launch = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["RANKWATCH_LAUNCH"]
    die_with_parent(os.getppid())()
    torch.set_num_threads(1)
    meet = f"file://{directory}/store-{launch}"
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=world_size, timeout=COLLECTIVE_LIMIT)
    try:
        yield rank, world_size
    finally:
        dist.destroy_process_group()
