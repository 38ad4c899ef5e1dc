"""Lightning Fabric around a loop of one's own, which evaluates and saves now and then."""

import os

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch

STEPS = int(os.environ.get("STEPS", "120"))

torch.manual_seed(0)
data = TensorDataset(torch.randn(16384, 64), torch.randint(0, 10, (16384,)))
held_out = TensorDataset(torch.randn(512, 64), torch.randint(0, 10, (512,)))
strategy = lightning.fabric.strategies.DDPStrategy(process_group_backend="gloo")
fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
watch = rankwatch.fabric(fabric)

net = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))
model, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=1e-3))
train_loader, held_out_loader = fabric.setup_dataloaders(DataLoader(data, 32, shuffle=True), DataLoader(held_out, 64))
state = {"model": model, "optimizer": optimizer, "step": 0}
if (checkpoint := watch.resume) is not None:
    fabric.load(checkpoint.location, state)

epoch = 0
while state["step"] < STEPS and not watch.should_stop:
    train_loader.sampler.set_epoch(epoch)
    epoch += 1
    for x, y in train_loader:
        loss = nn.functional.cross_entropy(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        state["step"] += 1
        if state["step"] % 40 == 0:
            with watch.pause("eval"), torch.no_grad():
                model.eval()
                for inputs, _ in held_out_loader:
                    model(inputs)
                model.train()
            fabric.save(f"out/step-{state['step']}.pt", state)
        if watch.should_stop or state["step"] == STEPS:
            break
torch.distributed.destroy_process_group()
