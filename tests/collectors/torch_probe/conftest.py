"""A small model, its optimizer, and the probe that watches them."""

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe
from tests.support.ranks.sink import FakeSink


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def probe(sink, model, optimizer) -> TorchProbe:
    return TorchProbe(sink, model, optimizer)
