"""Real ranks whose device times come from CUDA: the rank with the slow device is named.

Four ranks of one gloo group share a GPU. Their work is a kernel that spins until a time has passed, also while the
device works for another process. A late host cannot be told here: it changes when the ranks meet on the device, and so
what each of them takes. `pytest -m gpu` runs it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.parallel import DistributedDataParallel

from rankwatch.torch_probe import TorchProbe
from tests.support.detection.device_rows import findings
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.sink import FakeSink
from tests.support.values.presences import topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine"),
]
WORLD_SIZE = 4
STEPS = 100
AT = 60
"""The step from which rank 2 differs."""
CYCLES = 20_000_000
"""Of the device's clock: about 11 ms, several times as long as a device works for one process before another."""
SLOWNESS = 1.5
Rows = list[dict[str, float]]


class _Spin(torch.autograd.Function):
    """Keeps the device busy in the forward, and as long in the backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx | Any, *gradients: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradients[0], None


class Spinning(nn.Module):
    """Layers whose work takes the device so many cycles in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.cycles = CYCLES

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = _Spin.apply(layer(values), self.cycles)
        return values


def measured(rank: int) -> tuple[Rows, dict[str, int]]:
    """The rows of one rank, and what its probe dropped."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    spinning = Spinning().cuda()
    model = DistributedDataParallel(spinning, device_ids=[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    sink = FakeSink()
    probe = TorchProbe(sink, model, optimizer, fingerprint_every=0)
    inputs = torch.ones(2, 64, device="cuda")
    for step in range(STEPS + 1):
        spinning.cycles = round(CYCLES * SLOWNESS) if rank == 2 and step >= AT else CYCLES
        probe.step_begin(step, 0)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
        probe.step_end(step, 0)
    probe.close()
    found: dict[int, dict[str, float]] = {}
    for step, _, values, _ in sink.late_values:
        found.setdefault(step, {}).update(values)
    return [found.get(step, {}) for step in range(STEPS)], sink.dropped


def test_the_rank_whose_device_keeps_the_others_waiting_is_named() -> None:
    ranks = on_ranks(WORLD_SIZE, measured)
    assert [dropped for _, dropped in ranks] == [{}] * WORLD_SIZE
    (finding,) = findings([rows for rows, _ in ranks], topology(WORLD_SIZE))
    assert (finding.ranks, finding.cause) == ((2,), "device")
    assert AT < (finding.detected_step or 0) <= AT + 30
