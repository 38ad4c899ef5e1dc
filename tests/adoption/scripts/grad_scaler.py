"""Automatic mixed precision with a GradScaler whose first scales overflow, as they do; nobody tells rankwatch of it."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

STEPS = 150

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=40)

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for _ in watch.steps(STEPS):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    watch.log(loss=loss)
dist.destroy_process_group()
