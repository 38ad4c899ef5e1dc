"""A job that would go on for hours, and that somebody ends with Ctrl-C."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in watch.steps(1_000_000):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    watch.log(loss=loss)
    if step == 60 and dist.get_rank() == 0:
        print("sixty steps are done", flush=True)
