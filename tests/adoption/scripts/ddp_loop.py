"""The plain loop of DistributedDataParallel, as `VARIANT` says:

`compiled` by torch.compile, whose backend here traces and partitions as the default one does, without a C++ compiler;
`grad_scaler`, mixed precision with a scaler whose first scales overflow, as they do, and nobody tells rankwatch of it;
`elastic`: whatever ends a rank, torchrun starts all again and they go on from what was saved;
`ctrl_c`, a job that would go on for hours, and that somebody ends with Ctrl-C;
`odd_ends`: it stops early, by `break`, then rank 0 goes on to write a report, and another leaves by os._exit.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import rankwatch

variant = os.environ["VARIANT"]
steps = {"grad_scaler": 150, "ctrl_c": 1_000_000, "odd_ends": 100_000}.get(variant, 120)
mixed, width = variant == "grad_scaler", 256 if variant == "grad_scaler" else 512

# After a restart gloo now and then waits for a connection of the start before: then the launcher starts all once more.
dist.init_process_group("gloo", timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)))
if variant == "compiled":
    model = torch.compile(model, backend="aot_eager")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=40, enabled=mixed)
start = 0
if os.path.exists("snapshot.pt"):
    snapshot = torch.load("snapshot.pt", weights_only=True)
    model.load_state_dict(snapshot["model"])
    optimizer.load_state_dict(snapshot["optimizer"])
    start = snapshot["step"]

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(dist.get_rank())
for step in watch.steps(steps, start):
    x, y = torch.randn(128, 64, generator=generator), torch.randint(0, 10, (128,), generator=generator)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16, enabled=mixed):
        loss = nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    watch.log(loss=loss)
    if variant == "elastic" and (step + 1) % 20 == 0:
        if dist.get_rank() == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(state, "snapshot.new")
            os.replace("snapshot.new", "snapshot.pt")
        dist.barrier()
    if variant == "ctrl_c" and step == 60 and dist.get_rank() == 0:
        print("sixty steps are done", flush=True)
    if variant == "odd_ends" and step == 100:
        break
if variant == "odd_ends":
    dist.barrier()
    if dist.get_rank() == 0:
        time.sleep(2.0)
        torch.save(model.state_dict(), "report.pt")
        sys.exit(0)
    sys.stdout.flush()
    os._exit(0)
dist.destroy_process_group()
