"""Tensor parallel within a pair of ranks, FSDP2 across the pairs: a two-dimensional mesh, as in PyTorch's tutorial."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import rankwatch

STEPS = 80


class FeedForward(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
torch.manual_seed(0)
model = nn.Sequential(FeedForward(), FeedForward())
for block in model:
    parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(block, mesh=mesh["dp"])
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(mesh.get_local_rank("dp"))
for _ in watch.steps(STEPS):
    x = torch.randn(64, 64, generator=generator)
    optimizer.zero_grad()
    loss = (model(x) - x.roll(1, 1)).square().mean()
    loss.backward()
    optimizer.step()
    watch.log(loss=loss)
dist.destroy_process_group()
