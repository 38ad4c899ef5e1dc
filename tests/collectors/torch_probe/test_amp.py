"""Loss scaling: gradients are told as those of the true loss, and a scaler's skip is no fault."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe
from tests.support.sink import FakeSink


def fused(parameters, lr: float) -> torch.optim.Optimizer:
    """Fused optimizers are called for every step and leave out the update by themselves."""
    return torch.optim.SGD(parameters, lr=lr, fused=True)


class Job:
    def __init__(self, scale: float, optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, **arguments):
        torch.manual_seed(0)
        self.sink = FakeSink()
        self.model = nn.Linear(4, 2)
        self.optimizer = optimizer(self.model.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        self.probe = TorchProbe(self.sink, self.model, self.optimizer, scaler=self.scaler, **arguments)

    def step(self, step: int, factor: float = 1.0, clip: float | None = None) -> float:
        """Train one step with the loss times `factor`; return the norm of the true gradient."""
        self.sink.values, self.sink.exact = {}, {}
        self.probe.step_begin(step, 0)
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(3, 4)).square().sum() * factor
        true = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
        self.scaler.scale(loss).backward()
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.probe.step_end(step, 0)
        return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in true])).item()


KINDS = pytest.mark.parametrize("optimizer", [torch.optim.SGD, fused], ids=["plain", "fused"])


@KINDS
@pytest.mark.parametrize("clip", [None, 0.001])
@pytest.mark.parametrize("local", [True, False])
def test_norms_are_those_of_the_true_loss(optimizer, clip, local):
    job = Job(2.0**16, optimizer, local_gradients=local)
    norm = job.step(0, clip=clip)
    assert job.sink.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert job.sink.values.get("local_grad_norm", job.sink.values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert job.sink.dropped == {}


@KINDS
def test_an_overflow_of_the_scaled_loss_is_a_skip_and_no_non_finite_gradient(optimizer):
    job = Job(2.0**127, optimizer)
    for step in range(2):
        assert math.isfinite(job.step(step, factor=10.0))
        assert job.sink.values == {"optimizer_skipped": 1.0}
        assert job.sink.exact["nonfinite"] == 0
        assert "nonfinite_first" not in job.sink.exact
    assert job.scaler.get_scale() == 2.0**125  # it did overflow


@KINDS
def test_after_the_skip_the_step_is_told_as_usual(optimizer):
    job = Job(2.0**127, optimizer)
    for step in range(20):
        norm = job.step(step, factor=10.0)
        if "optimizer_skipped" not in job.sink.values:
            break
    assert job.sink.values["grad_norm"] == pytest.approx(norm, rel=1e-5)


@KINDS
def test_a_nan_that_no_scale_can_cure_is_told_once_the_scale_is_spent(optimizer):
    job = Job(4.0, optimizer)
    told = []
    for step in range(5):
        job.step(step, factor=math.nan)
        told.append(job.sink.exact["nonfinite"])
    assert told == [0, 0, 2, 2, 2]  # scales 4, 2, 1, ½, ¼
    assert math.isnan(job.sink.values["grad_norm"])


def test_a_scaler_that_is_switched_off_changes_nothing():
    job = Job(1.0)
    job.scaler = torch.amp.GradScaler("cpu", enabled=False)
    job.probe.close()
    job.probe = TorchProbe(job.sink, job.model, job.optimizer, scaler=job.scaler)
    job.step(0, factor=math.nan)
    assert job.sink.exact["nonfinite"] == 2
