"""One rank of the demo's second job: DDP on a simulated accelerator, which a throttled device slows down."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from rankwatch_service.demo.accelerator.clocks import MachineClock
from rankwatch_service.demo.accelerator.simulated import SimulatedDevice
from rankwatch_service.demo.accelerator.torch_work import DeviceWork, reduce_on, store_of_ranks
from rankwatch_service.demo.job.process_group import joined_group

LAYERS: Final = 3
LAYER_S: Final = 0.04
"""Device time of a layer's forward; with the backward a step takes 0.36 s. The host needs some milliseconds of it."""
TRANSFER_S: Final = 0.005
WIDTH: Final = 32
BATCH: Final = 16
STEPS_MAX: Final = 1_000_000
"""Training ends by a stop command."""


class DeviceState:
    """How slow this rank's device is, from the file that the simulated driver reads too."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = str(rank)
        self.slowness = 1.0

    def look(self) -> None:
        """Read the file."""
        self.slowness = json.loads(self._path.read_text()).get("slowness", {}).get(self._rank, 1.0)


def main() -> None:
    """Train until a stop command."""
    parser = argparse.ArgumentParser(description="one rank of the demo's job on simulated accelerators")
    parser.add_argument("--job", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    options = parser.parse_args()
    with joined_group(options.directory) as (rank, world_size):
        train(options.job, DeviceState(Path(os.environ["SIMULATED_NVML"]), rank), rank, world_size)


def train(job: str, state: DeviceState, rank: int, world_size: int) -> None:
    """The training script. Only `device` would be missing on a real accelerator."""
    device = SimulatedDevice(
        f"GPU-{rank}", MachineClock(), store_of_ranks(rank, world_size), slowness=lambda: state.slowness
    )
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), DeviceWork(device, LAYER_S)) for _ in range(LAYERS)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    reduce_on(device, model, TRANSFER_S)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    watch = rankwatch.start(job=job)
    watch.torch(model, optimizer, device=device)
    torch.manual_seed(rank + 1)
    for _ in watch.steps(STEPS_MAX):
        state.look()
        inputs: Any = torch.randn(BATCH, WIDTH)
        loss = nn.functional.mse_loss(model(inputs), inputs.roll(1, dims=1))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        device.synchronize()  # reading the loss waits for the device
        watch.log(loss=float(loss))


if __name__ == "__main__":
    main()
