"""Steps are counted by the optimizer, and their losses and models found, in loops that know nothing of it."""

import copy
import gc
import math
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from rankwatch import layout
from rankwatch.integrations.optimizer_steps import OptimizerSteps, models_of
from rankwatch.integrations.started import started
from tests.support.ranks.recorders import Rank

pytestmark = pytest.mark.torch


class Job:
    """A model, its optimizer, and a rank that is watched by the optimizer's steps."""

    def __init__(self, folder, number=3, **how):
        self.rank = Rank(folder, number)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.steps = OptimizerSteps(lambda: self.rank.watch, **how)

    def loss(self, model=None):
        return (model or self.model)(torch.randn(16, 4)).square().mean()

    def train(self, steps: int = 1, optimizer=None) -> None:
        for _ in range(steps):
            (optimizer or self.optimizer).zero_grad()
            self.loss().backward()
            (optimizer or self.optimizer).step()

    def values(self, name: str):
        return [entry.values.get(name) for entry in self.rank.steps]


@pytest.fixture
def job(tmp_path):
    made = Job(tmp_path)
    yield made
    made.steps.close()
    assert made.rank.watch.errors == 0, made.rank.watch.last_error


def test_a_step_is_one_step_of_the_optimizer_with_its_loss_and_its_norm(job):
    job.train(4)
    assert [entry.step for entry in job.rank.steps] == [1, 2, 3]
    assert all(0 < loss < math.inf for loss in job.values("loss"))
    assert all(0 < norm < math.inf for norm in job.values("grad_norm"))


def test_accumulated_losses_are_added_up(job):
    job.train()
    parts = [job.loss() / 4 for _ in range(4)]
    for part in parts:
        part.backward()
    job.optimizer.step()
    (loss,) = job.values("loss")
    assert loss == pytest.approx(sum(part.item() for part in parts))


def test_a_closure_that_computes_its_loss_again_and_again_is_one_step_with_the_newest_loss(job):
    optimizer = torch.optim.LBFGS(job.model.parameters(), max_iter=5)
    losses = []

    def closure():
        optimizer.zero_grad()
        losses.append(job.loss())
        losses[-1].backward()
        return losses[-1]

    for _ in range(3):
        optimizer.step(closure)
    assert [entry.step for entry in job.rank.steps] == [1, 2]
    assert job.values("loss")[-1] == pytest.approx(losses[-1].item())


@pytest.mark.parametrize("rest", ["evaluates", "does nothing"])
def test_between_an_optimizer_step_and_the_next_work_the_rank_is_outside(job, rest):
    job.train(2)
    assert job.rank.outside_ns == job.rank.recorder.words[layout.STEP_ENTERED]
    if rest == "evaluates":
        with torch.no_grad():
            job.model.eval()(torch.randn(1, 4))
        job.model.train()
        assert job.rank.outside_ns
    job.model(torch.randn(1, 4))
    assert not job.rank.outside_ns
    job.train()
    assert job.rank.outside_ns


def test_a_process_that_ends_at_rest_has_left_its_loop_if_its_exit_status_says_so_too(job):
    job.train(3)
    job.steps._process_ends()
    job.rank.watch.at_exit()
    assert job.rank.state == "left"
    assert job.rank.notes("rank_left") == [{"reason": "break"}]
    assert [entry.step for entry in job.rank.steps] == [1, 2]


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_process_that_ends_within_its_step_has_not_left(job, where):
    job.train(3)
    loss = job.loss()
    if where == "backward":
        loss.backward()
    job.steps._process_ends()
    job.rank.watch.at_exit()
    assert job.rank.state == "running"


def test_a_process_that_an_exception_ends_at_rest_has_not_left(job):
    job.train(3)
    job.rank.watch.crashed(ZeroDivisionError("in the evaluation"), None)
    job.steps._process_ends()
    job.rank.watch.at_exit()
    assert job.rank.state == "running"
    (note,) = job.rank.notes("exception")
    assert note["left"] is False


def test_what_the_loss_scaler_skips_is_a_step_too_and_losses_have_no_scale(job):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    losses = []
    for number in range(4):
        job.optimizer.zero_grad()
        losses.append(job.loss() * (math.inf if number == 2 else 1.0))
        scaler.scale(losses[-1]).backward()
        scaler.step(job.optimizer)
        scaler.update()
    assert [entry.step for entry in job.rank.steps] == [1, 2, 3]
    assert job.values("loss")[0] == pytest.approx(losses[1].item())
    assert job.values("loss")[2] == pytest.approx(losses[3].item())


def test_of_two_optimizers_that_take_turns_the_last_one_ends_the_step(job):
    second = nn.Linear(4, 1)
    of_second = torch.optim.SGD(second.parameters(), lr=0.01)
    for _ in range(4):
        job.train()
        job.loss(second).backward()
        of_second.step()
    assert [entry.step for entry in job.rank.steps] == [1, 2, 3]
    norms = job.values("grad_norm")
    assert all(norm > 0 for norm in norms[1:])
    assert set(job.rank.watch._loop.probe._model.parameters) >= {second.weight}


def test_an_optimizer_that_steps_five_times_for_each_of_another_leads(job):
    second = nn.Linear(4, 1)
    of_second = torch.optim.SGD(second.parameters(), lr=0.01)
    for _ in range(3):
        job.train(5)
        job.loss(second).backward()
        of_second.step()
    assert [entry.step for entry in job.rank.steps] == list(range(1, 15))


def test_an_optimizer_that_replaces_another_leads_and_the_other_is_not_kept(job):
    job.train(3)
    gone = torch.optim.SGD(job.model.parameters(), lr=0.01)
    job.train(3, gone)
    kept = weakref.ref(gone)
    del gone
    job.train(4, torch.optim.AdamW(job.model.parameters(), lr=0.01))
    assert job.rank.steps[-1].step >= 6
    assert job.values("grad_norm")[-1] > 0
    gc.collect()
    assert kept() is None


def test_a_further_model_is_a_change_and_takes_the_place_of_one_that_is_idle(tmp_path, capsys):
    job = Job(tmp_path, number=0)
    folds = []
    for _ in range(4):
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.Adam(model.parameters())
        folds.append(weakref.ref(model))
        for _ in range(20):
            optimizer.zero_grad()
            job.loss(model).backward()
            optimizer.step()
    job.steps.close()
    reported = job.rank.notes("declared")
    assert [(one["kind"], one["what"]) for one in reported] == [("model", "another model: Sequential, Adam")] * 3
    assert capsys.readouterr().err.splitlines() == [
        "rankwatch: watching Sequential (4 parameters), Adam: gradient norm, local gradients",
        "rankwatch: watching Sequential (4 parameters), Adam: gradient norm, local gradients; 1 earlier one is idle",
    ]
    assert job.rank.identity["optimizers"] == 1
    gc.collect()
    assert [fold() is not None for fold in folds] == [False, False, True, True]


@pytest.mark.parametrize("block", [1, 5, 30])
def test_two_optimizers_in_turn_are_no_change_once_each_has_come_back(tmp_path, block):
    job = Job(tmp_path, number=0)
    second = nn.Linear(4, 1)
    of_second = torch.optim.SGD(second.parameters(), lr=0.01)
    for _ in range(12):
        job.train(block)
        for _ in range(block):
            job.loss(second).backward()
            of_second.step()
    job.steps.close()
    reported = [
        (entry.step, entry.fields["what"]) for entry in job.rank.entries if getattr(entry, "kind", "") == "declared"
    ]
    assert reported == ([] if block == 1 else [(block, "another model: Linear, SGD")])
    assert job.rank.identity["optimizers"] == 2


def test_layers_that_are_unfrozen_are_a_change_and_further_ones_are_measured(tmp_path):
    job = Job(tmp_path, number=0)
    for layer in job.model[0].parameters():
        layer.requires_grad_(False)
    job.train(10)
    for layer in job.model[0].parameters():
        layer.requires_grad_(True)
    job.train(10)
    head = nn.Linear(1, 1)
    job.optimizer.add_param_group({"params": head.parameters(), "lr": 0.5})
    job.train(10)
    job.steps.close()
    assert [one["what"] for one in job.rank.notes("declared")] == [
        "4 trained parameters instead of 2 (SGD)",
        "6 trained parameters instead of 4 (SGD)",
    ]
    assert job.values("lr") == [0.01] * 19 + [0.5] * 10
    assert job.rank.identity["parameters"][-2:] == ["Linear.weight", "Linear.bias"]


def test_more_backward_passes_a_step_than_before_are_a_change_and_a_shorter_last_one_is_none(tmp_path):
    job = Job(tmp_path, number=0)
    for passes in (1, 1, 1, 2, 2, 1, 2, 4, 4, 3):
        job.optimizer.zero_grad()
        for _ in range(passes):
            job.loss().backward()
        job.optimizer.step()
    job.steps.close()
    assert [
        (entry.step, entry.fields["what"]) for entry in job.rank.entries if getattr(entry, "kind", "") == "declared"
    ] == [(3, "2 backward passes a step instead of 1"), (7, "4 backward passes a step instead of 2")]


def test_an_optimizer_that_calls_another_makes_one_step(job):
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            self.inner = inner
            super().__init__(inner.param_groups, {})

        def step(self, closure=None):
            return self.inner.step(closure)

    job.train(4, Outer(job.optimizer))
    assert [entry.step for entry in job.rank.steps] == [1, 2, 3]


def test_an_exception_within_an_optimizer_step_hides_no_later_steps(job):
    def fail(*_):
        handle.remove()
        raise ZeroDivisionError

    job.train(2)
    handle = job.optimizer.register_step_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        job.train()
    job.train(2, torch.optim.SGD(job.model.parameters(), lr=0.01))
    job.train(2)
    assert job.rank.steps[-1].step >= 3


def test_steps_of_another_thread_do_not_count(job):
    job.train(2)
    other = nn.Linear(4, 1)

    def train():
        optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        for _ in range(5):
            job.loss(other).backward()
            optimizer.step()

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    job.train(1)
    assert [entry.step for entry in job.rank.steps] == [1, 2]


def test_a_restored_optimizer_goes_on_with_its_own_number(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(40):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    rank = Rank(tmp_path)
    steps = OptimizerSteps(lambda: rank.watch)
    for _ in range(3):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    steps.close()
    assert [entry.step for entry in rank.steps] == [41, 42]


def test_parameters_of_no_module_have_losses_and_times(tmp_path):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rank = Rank(tmp_path)
    steps = OptimizerSteps(lambda: rank.watch)
    for _ in range(3):
        optimizer.zero_grad()
        weight.square().sum().backward()
        optimizer.step()
    steps.close()
    entries = rank.steps
    assert [entry.step for entry in entries] == [1, 2]
    assert all(entry.values["loss"] > 0 for entry in entries)
    assert rank.watch.errors == 0


def test_without_a_watch_nothing_is_done(tmp_path):
    asked = []
    steps = OptimizerSteps(lambda: asked.append(1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    backward = torch.autograd.backward
    for _ in range(3):
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
    assert asked == [1]
    assert torch.autograd.backward is backward
    steps.close()


def test_torch_is_left_as_it_was(job):
    before = torch.amp.GradScaler.scale
    job.train(2)
    assert torch.amp.GradScaler.scale is not before
    job.steps.close()
    assert torch.amp.GradScaler.scale is before
    job.train(2)
    assert [entry.step for entry in job.rank.steps] == [1]
    assert job.rank.state == "left"


def test_the_models_of_an_optimizer_are_the_outermost_modules_that_hold_its_parameters():
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    wrapped = Wrapper(model)
    part = nn.Sequential(model[1])
    average = copy.deepcopy(model)
    head = nn.Linear(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
    assert models_of(optimizer) == [wrapped, head]
    del part, average


def test_a_copied_model_marks_nothing(job):
    job.train(2)
    copied = copy.deepcopy(job.model)
    copied(torch.randn(1, 4))
    assert job.rank.outside_ns


@pytest.mark.parametrize(
    ("name", "environment", "job"),
    [("/data/runs/llama-7b/", {}, "llama-7b"), ("", {}, "train_gpt"), ("", {"RANKWATCH_JOB": "told"}, "told")],
    ids=["the framework's", "the script's", "the environment's"],
)
def test_a_job_is_named_after_its_run_else_after_its_script(name, environment, job, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/train_gpt.py", "--steps", "10"])
    env = {"RANKWATCH_DIR": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path), **environment}
    watch = started(name, "", env=env, agent=False)
    assert watch.identity.job == job
    watch.close()


def test_where_no_script_runs_a_job_must_be_named(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["-c"])
    with pytest.raises(ValueError, match="the job has no name: pass job= "):
        started("", "", env={"RANKWATCH_DIR": str(tmp_path)}, agent=False)
