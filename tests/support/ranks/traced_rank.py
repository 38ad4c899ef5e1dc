"""A rank of a real DDP job over gloo, until it is killed: `python traced_rank.py FOLDER`.

Beside DDP's reduction it calls a collective of a group of its own. While there is a file `profile` in the folder, it
runs its own profiler.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import rankwatch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    pair = dist.new_group([0, 1], group_desc="pair")
    watch = rankwatch.start(job="traced")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    )
    optimizer = torch.optim.Adam(model.parameters())
    watch.torch(model, optimizer)
    own: profile | None = None
    for _ in watch.steps(1_000_000):
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(torch.ones(10), group=pair)
        time.sleep(0.02)
        if (folder / "profile").exists() and own is None:
            own = profile()
            own.start()
            (folder / f"profiling-{rank}").touch()
        elif own is not None and not (folder / "profile").exists():
            own.stop()
            own = None


if __name__ == "__main__":
    main(Path(sys.argv[1]))
