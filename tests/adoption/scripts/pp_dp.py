"""Two pipeline stages by hand, each with two data-parallel replicas; the second stage has the head and is heavier."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

STEPS, MICRO = 100, 4

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
pp, dp = mesh.get_local_rank("pp"), mesh.get_local_rank("dp")
other = dist.get_rank() + (2 if pp == 0 else -2)
torch.manual_seed(pp)
width = 128
stage = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
if pp == 1:
    stage.append(nn.LayerNorm(width))
    stage.append(nn.Linear(width, 512))
model = DDP(stage, process_group=mesh["dp"].get_group())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

watch = rankwatch.start(topology={"pp": pp, "dp": dp})
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dp)
for _ in watch.steps(STEPS):
    optimizer.zero_grad()
    total = 0.0
    for micro in range(MICRO):
        x, y = torch.randn(64, width, generator=generator), torch.randint(0, 512, (64,), generator=generator)
        model.require_backward_grad_sync = micro == MICRO - 1
        if pp == 0:
            out = model(x)
            dist.send(out.detach(), other)
            gradient = torch.empty_like(out)
            with watch.phase("collective"):
                dist.recv(gradient, other)
            out.backward(gradient)
        else:
            activation = torch.empty(64, width)
            with watch.phase("collective"):
                dist.recv(activation, other)
            activation.requires_grad_()
            loss = nn.functional.cross_entropy(model(activation), y) / MICRO
            loss.backward()
            dist.send(activation.grad, other)
            total += loss.item()
    optimizer.step()
    if pp == 1:
        watch.log(loss=total)
dist.destroy_process_group()
