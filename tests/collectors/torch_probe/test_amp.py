"""Loss scaling: gradients are told as those of the true loss, and a scaler's skip is no fault."""

import math

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.share import SKIPS_MAX
from tests.support.ranks.sink import FakeSink, Watched, a_step


def fused(parameters, lr: float) -> torch.optim.Optimizer:
    """Fused optimizers are called for every step and leave out the update by themselves."""
    return torch.optim.SGD(parameters, lr=lr, fused=True)


class Job(Watched):
    def __init__(self, scale: float, optimizer=torch.optim.SGD, *, told: bool = True, **arguments):
        torch.manual_seed(0)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10**6)
        model = nn.Linear(4, 2)
        super().__init__(
            model, optimizer(model.parameters(), lr=0.01), scaler=self.scaler if told else None, **arguments
        )

    def train(self, step: int, factor: float = 1.0, clip: float | None = None) -> float:
        """Train one step with the loss times `factor`; return the norm of the true gradient."""
        self.sink.values, self.sink.exact = {}, {}
        with a_step(self.probe, number=step):
            self.optimizer.zero_grad()
            loss = self.model(torch.ones(3, 4)).square().sum() * factor
            true = torch.autograd.grad(loss, list(self.model.parameters()), retain_graph=True)
            self.scaler.scale(loss).backward()
            if clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in true])).item()


KINDS = pytest.mark.parametrize("optimizer", [torch.optim.SGD, fused], ids=["plain", "fused"])


TOLD = pytest.mark.parametrize("told", [True, False], ids=["told", "found"])


@KINDS
@TOLD
@pytest.mark.parametrize("clip", [None, 0.001])
@pytest.mark.parametrize("local", [True, False])
def test_norms_are_those_of_the_true_loss(optimizer, clip, local, told):
    job = Job(2.0**16, optimizer, told=told, local_gradients=local)
    norm = job.train(0, clip=clip)
    assert job.sink.values["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert job.sink.values.get("local_grad_norm", job.sink.values["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    assert job.sink.dropped == {}


@KINDS
@TOLD
def test_an_overflow_of_the_scaled_loss_is_a_skip_and_no_non_finite_gradient(optimizer, told):
    job = Job(2.0**127, optimizer, told=told)
    for step in range(2):
        assert math.isfinite(job.train(step, factor=10.0))
        assert job.sink.values.pop("loss_scale", 2.0 ** (127 - step)) == 2.0 ** (127 - step)
        assert job.sink.values == {"optimizer_skipped": 1.0}
        assert job.sink.exact["nonfinite"] == 0
        assert "nonfinite_first" not in job.sink.exact
    assert job.scaler.get_scale() == 2.0**125  # it did overflow


@KINDS
@TOLD
def test_after_the_skip_the_step_is_told_as_usual(optimizer, told):
    job = Job(2.0**127, optimizer, told=told)
    for step in range(20):
        norm = job.train(step, factor=10.0)
        if "optimizer_skipped" not in job.sink.values:
            break
    assert job.sink.values["grad_norm"] == pytest.approx(norm, rel=1e-5)


@KINDS
@TOLD
def test_a_nan_that_no_scale_can_cure_is_told_once_the_scale_is_spent(optimizer, told):
    job = Job(4.0, optimizer, told=told)
    job.train(0)  # in which a scaler that was not told is found
    nonfinite = []
    for step in range(1, 6):
        job.train(step, factor=math.nan)
        nonfinite.append(job.sink.exact["nonfinite"])
    assert nonfinite == [0, 0, 2, 2, 2]  # scales 4, 2, 1, ½, ¼
    assert math.isnan(job.sink.values["grad_norm"])


def test_a_scaler_that_is_switched_off_changes_nothing():
    job = Job(1.0)
    job.scaler = torch.amp.GradScaler("cpu", enabled=False)
    job.probe.close()
    job.probe = TorchProbe(job.sink, job.model, job.optimizer, scaler=job.scaler)
    job.train(0, factor=math.nan)
    assert job.sink.exact["nonfinite"] == 2


def test_a_scaler_that_was_not_told_is_known_from_its_first_update_on():
    job = Job(2.0**16, told=False)
    job.train(0)
    job.sink.values.clear()
    job.train(1, factor=2.0**120)
    assert job.sink.values == {"optimizer_skipped": 1.0, "loss_scale": 2.0**16}
    job.train(2)
    assert job.sink.values["loss_scale"] == 2.0**15
    assert "optimizer_skipped" not in job.sink.values


def test_a_nan_from_the_first_step_on_is_told_when_no_scaler_explains_it_any_more():
    job = Job(2.0**16, told=False)
    told = []
    for step in range(SKIPS_MAX + 1):
        job.train(step, factor=math.nan)
        told.append(job.sink.exact["nonfinite"])
    assert told == [0] * (SKIPS_MAX - 1) + [2, 2]
    assert job.sink.exact["nonfinite_first"] >= 0


@pytest.mark.parametrize("guarded", [False, True])
def test_without_a_scaler_a_nan_is_told_in_its_step_whether_or_not_the_loop_leaves_the_update_out(guarded):
    job = Job(1.0, told=False)
    for step, factor in enumerate((1.0, math.nan)):
        with a_step(job.probe, number=step):
            job.optimizer.zero_grad()
            loss = job.model(torch.ones(3, 4)).sum() * factor
            loss.backward()
            if not guarded or loss.isfinite():
                job.optimizer.step()
    assert job.sink.exact["nonfinite"] == 2
    assert math.isnan(job.sink.values["grad_norm"])


def test_each_of_two_optimizers_under_one_scaler_is_judged_by_itself():
    torch.manual_seed(0)
    sink, scaler = FakeSink(), torch.amp.GradScaler("cpu", init_scale=2.0**16)
    models = [nn.Linear(4, 2), nn.Linear(4, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    probe = TorchProbe(sink, models, optimizers)
    recorded = []
    for step, factors in enumerate([(1.0, 1.0), (1.0, 2.0**120), (1.0, 1.0)]):
        sink.values, sink.exact = {}, {}
        with a_step(probe, number=step):
            for model, optimizer, factor in zip(models, optimizers, factors, strict=True):
                optimizer.zero_grad()
                scaler.scale(model(torch.ones(3, 4)).square().sum() * factor).backward()
                scaler.step(optimizer)
            scaler.update()
        recorded.append((set(sink.values), sink.exact["nonfinite"], sink.values["loss_scale"]))
    usual = {"grad_norm", "local_grad_norm", "loss_scale"}
    assert recorded == [(usual, 0, 2.0**16), ({"optimizer_skipped", "loss_scale"}, 0, 2.0**16), (usual, 0, 2.0**15)]
