"""Elastic torchrun: whatever ends a rank, the launcher starts all again and they go on from what was saved."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

STEPS, SAVE_EVERY = 120, 20

# After a restart gloo now and then waits for a connection of the start before: then the launcher starts all once more.
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
start = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt", weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    start = snapshot["step"]

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in watch.steps(STEPS, start):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    watch.log(loss=loss)
    if (step + 1) % SAVE_EVERY == 0:
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, "snapshot.new")
            os.replace("snapshot.new", "snapshot.pt")
        dist.barrier()
dist.destroy_process_group()
