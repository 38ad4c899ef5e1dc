"""FSDP2 (`fully_shard`) with a small transformer, mixed precision off, the norm from clip_grad_norm_."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankwatch

STEPS = 120


class Transformer(nn.Module):
    def __init__(self, vocabulary=128, width=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
model = Transformer()
for layer in model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

watch = rankwatch.start()
watch.torch(model, optimizer)

generator = torch.Generator().manual_seed(rank)
for _ in watch.steps(STEPS):
    tokens = torch.randint(0, 128, (8, 33), generator=generator)
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    watch.log(loss=loss, grad_norm=norm.full_tensor())
dist.destroy_process_group()
