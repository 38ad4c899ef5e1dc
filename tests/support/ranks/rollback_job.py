"""A small real training job in which everything that a rollback must restore decides the next step."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAMPLES = 64
BATCH = 4


class Job:
    """One rank: dropout draws from torch, jitter from NumPy, scales from Python; batches are shuffled."""

    def __init__(self, rank: int, seed: int = 7) -> None:
        self.rank = rank
        self.seed = seed
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 4))
        self.ddp = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        # Each rank its own random numbers from here on.
        torch.manual_seed(1000 * seed + rank)
        np.random.seed(1000 * seed + rank)
        random.seed(1000 * seed + rank)

    def batches(self, position: int) -> Iterator[torch.Tensor]:
        """This rank's batches, shuffled anew in each epoch, from `position` on."""
        samples = torch.randn(SAMPLES, 8, generator=torch.Generator().manual_seed(self.seed + self.rank))
        while True:
            epoch, at = divmod(position, SAMPLES // BATCH)
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            yield samples[order[at * BATCH : (at + 1) * BATCH]]
            position += 1

    def train_step(self, batch: torch.Tensor, spoil_gradients: bool = False) -> torch.Tensor:
        """One step; spoiled gradients are NaN on this rank alone until they are reduced."""
        self.optimizer.zero_grad()
        jitter = torch.from_numpy(np.random.standard_normal(tuple(batch.shape)).astype(np.float32))
        loss = self.ddp(batch + 0.1 * jitter).square().mean() * random.choice([0.5, 1.0, 2.0])
        spoiled = self.model[0].weight.register_hook(lambda grad: grad * (float("nan") if spoil_gradients else 1.0))
        loss.backward()
        spoiled.remove()
        self.optimizer.step()
        self.scheduler.step()
        return loss

    def flip_bit(self) -> None:
        """Flip a mantissa bit of one weight, as a failing memory cell does."""
        self.model[0].weight.data.view(torch.int32)[3, 5] ^= 1 << 18

    def digest(self) -> str:
        """Of all bits of the parameters."""
        bits = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return hashlib.sha256(bits).hexdigest()

    @property
    def objects(self) -> dict[str, Any]:
        """What `watch.state` registers, data apart."""
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
