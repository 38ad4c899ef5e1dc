"""torch.compile around DDP. The backend traces and partitions as the default one does, without a C++ compiler."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

STEPS = 120

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10)
)
model = torch.compile(DDP(model), backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in watch.steps(STEPS):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    watch.log(loss=loss)
dist.destroy_process_group()
