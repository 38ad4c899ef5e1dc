"""Accelerate: everything is prepared, and the loop uses what came back. It evaluates, saves, and can go on."""

import os

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch

STEPS, ACCUMULATE = int(os.environ.get("STEPS", "120")), 2

torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
held_out = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=ACCUMULATE, project_dir="out")
model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
    model, optimizer, DataLoader(data, 32, shuffle=True), DataLoader(held_out, 64), scheduler
)
watch = rankwatch.accelerate(accelerator)

made = 0
if watch.resume:
    accelerator.load_state()
    made = watch.resume.step


def evaluate():
    model.eval()
    with torch.no_grad():
        for x, _ in test_loader:
            accelerator.gather_for_metrics(model(x).argmax(1))
    model.train()


def train(updates):
    while True:
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            updates += accelerator.sync_gradients
            if accelerator.sync_gradients and updates % 40 == 0:
                evaluate()
                accelerator.save_state(f"out/step-{updates}")
            if watch.should_stop or updates >= STEPS:
                return


train(made)
accelerator.end_training()
