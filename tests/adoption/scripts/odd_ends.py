"""A loop that stops early, by `break`; rank 0 goes on to write a report; another leaves by os._exit."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

PATIENCE = 100

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in watch.steps(100_000):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    watch.log(loss=loss)
    if step == PATIENCE:
        break
dist.barrier()
if dist.get_rank() == 0:
    time.sleep(2.0)
    torch.save(model.state_dict(), "report.pt")
    sys.exit(0)
sys.stdout.flush()
os._exit(0)
