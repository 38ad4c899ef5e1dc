"""DistributedDataParallel with gradient accumulation, as in PyTorch's DDP tutorial."""

import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import rankwatch

ACCUMULATE, UPDATES = 4, 120

dist.init_process_group("gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randn(4096, 64), torch.randint(0, 10, (4096,)))
sampler = DistributedSampler(data, seed=0)
loader = DataLoader(data, batch_size=32, sampler=sampler, drop_last=True)
model = DDP(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

watch = rankwatch.start()
watch.torch(model, optimizer)


def batches():
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


stream = batches()
for _ in watch.steps(UPDATES):
    optimizer.zero_grad()
    for micro in range(ACCUMULATE):
        x, y = next(stream)
        with contextlib.nullcontext() if micro == ACCUMULATE - 1 else model.no_sync():
            loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
            loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    watch.log(loss=loss * ACCUMULATE)
dist.destroy_process_group()
