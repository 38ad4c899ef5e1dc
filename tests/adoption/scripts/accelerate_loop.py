"""Accelerate: everything is prepared, and the loop uses what came back."""

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch

STEPS = 120

torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, DataLoader(data, 32), scheduler)

watch = rankwatch.start()
watch.torch(model, optimizer)

stream = iter(loader)
for _ in watch.steps(STEPS):
    for _ in range(2):
        x, y = next(stream)
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    watch.log(loss=loss, lr=scheduler.get_last_lr()[0])
accelerator.end_training()
