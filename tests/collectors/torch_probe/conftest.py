"""A small model, its optimizer, and what a probe writes into."""

import pytest
import torch
from torch import nn

from tests.support.ranks.sink import FakeSink


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.fixture
def optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)
