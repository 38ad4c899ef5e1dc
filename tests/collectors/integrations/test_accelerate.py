"""Loops around a real Accelerator, in one process: what is a step of them, and what becomes of their states."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rankwatch
from rankwatch.integrations.accelerate import ALONE_MAX, AcceleratedLoop
from rankwatch.layout import resume_path
from tests.support.ranks.gloo import Framework
from tests.support.ranks.recorders import Rank

pytestmark = pytest.mark.torch
accelerate = Framework("accelerate")

BATCHES = 8


class Loop:
    """A script's objects after `prepare`, and the watch of its rank."""

    def __init__(self, folder, *, optimizers=1, accumulate=1, **how):
        self.rank = Rank(folder)
        self.watch = self.rank.watch
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=accumulate, **how)
        nets = [nn.Linear(4, 1) for _ in range(optimizers)]
        self.models = [self.accelerator.prepare(net) for net in nets]
        self.optimizers = [self.accelerator.prepare(torch.optim.AdamW(net.parameters(), lr=0.01)) for net in nets]
        data = TensorDataset(torch.randn(4 * BATCHES, 4), torch.randn(4 * BATCHES, 1))
        self.loader = self.accelerator.prepare(DataLoader(data, 4))
        self.loop = AcceleratedLoop(self.accelerator, self.watch)

    def update(self, x, y, which=0):
        with self.accelerator.accumulate(self.models[which]):
            self.accelerator.backward((self.models[which](x) - y).square().mean())
            self.optimizers[which].step()
            self.optimizers[which].zero_grad()

    @property
    def steps(self):
        return [entry.step for entry in self.rank.steps]


@pytest.fixture
def made(tmp_path):
    loops = []

    def make(**how):
        loops.append(Loop(tmp_path, **how))
        return loops[-1]

    yield make
    for loop in loops:
        assert loop.watch.errors == 0, loop.watch.last_error
        loop.watch.close()


def test_each_update_is_a_step_with_its_loss_and_norm_and_the_wait_for_its_batch(made):
    loop = made()
    for x, y in loop.loader:
        loop.update(x, y)
    assert loop.steps == list(range(BATCHES))
    assert all(entry.values["loss"] > 0 and entry.values["grad_norm"] > 0 for entry in loop.rank.steps)
    assert all("data_wait" in entry.phases for entry in loop.rank.steps[:-2])  # two are drawn before the first step


def test_batches_whose_gradients_are_not_synchronized_belong_to_the_step_that_follows(made):
    loop = made(accumulate=4)
    for x, y in loop.loader:
        loop.update(x, y)
    assert loop.steps == [0, 1]


def test_of_several_optimizers_each_makes_one_step_in_a_step_of_the_job(made):
    loop = made(optimizers=2)
    for x, y in loop.loader:
        loop.update(x, y, 0)
        loop.update(x, y, 1)
    assert loop.steps == list(range(BATCHES))


def test_an_optimizer_that_goes_on_alone_still_ends_steps(made):
    loop = made(optimizers=2)
    x, y = next(iter(loop.loader))
    for _ in range(ALONE_MAX + 5):
        loop.update(x, y)
    assert len(loop.steps) == 5


def test_an_evaluation_is_no_step(made):
    loop = made()
    for model in loop.models:
        model.eval()
    with torch.no_grad():
        for x, _ in loop.loader:
            loop.models[0](x)
    assert loop.steps == []
    assert not loop.watch._loop.in_step


def test_a_loop_that_ends_with_a_batch_in_its_hands_has_ended_in_order(made):
    loop = made()
    for number, (x, y) in enumerate(loop.loader):
        if number == 3:
            break
        loop.update(x, y)
    assert loop.watch._loop.in_step
    loop.loop._loop.leave()
    assert loop.steps == [0, 1, 2]
    assert not loop.watch._loop.in_step
    assert loop.rank.state == "left"


def test_a_stop_is_obeyed_where_the_loop_asks(made):
    loop = made()
    stopped_at = None
    for number, (x, y) in enumerate(loop.loader):
        loop.update(x, y)
        if number == 2:
            loop.rank.order("stop", 3)
        if loop.watch.should_stop:
            stopped_at = number
            break
    assert stopped_at == 2
    assert loop.steps == [0, 1, 2]
    assert loop.rank.state == "left"


def test_a_saved_state_is_in_the_ledger_with_the_step_to_go_on_from(made, tmp_path):
    loop = made()
    for x, y in loop.loader:
        loop.update(x, y)
    loop.accelerator.save_state(tmp_path / "state")
    (noted,) = loop.rank.notes("checkpoint_saved")
    assert noted["checkpoint"] == f"local:l.0:{BATCHES}"
    assert noted["location"] == str(tmp_path / "state")


def test_a_state_without_its_last_file_is_not_in_the_ledger(made, tmp_path):
    loop = made()
    loop.loop._around_save_state(lambda folder: folder, str(tmp_path))
    assert loop.rank.notes("checkpoint_saved") == []


def test_without_a_folder_what_is_advised_is_loaded_and_the_steps_go_on_there(made, tmp_path):
    first = made()
    for x, y in first.loader:
        first.update(x, y)
    first.accelerator.save_state(tmp_path / "state")
    weights = first.models[0].weight.detach().clone()
    advice = {"job": "gpt", "checkpoint": "local:l.0:8", "location": str(tmp_path / "state"), "step": BATCHES}
    (tmp_path / "second").mkdir()
    Path(resume_path(str(tmp_path / "second"), "gpt")).write_text(json.dumps(advice))

    second = Loop(tmp_path / "second")
    second.accelerator.load_state()
    assert torch.equal(second.models[0].weight, weights)
    assert [note["checkpoint"] for note in second.rank.notes("checkpoint_loaded")] == ["local:l.0:8"]
    second.update(*next(iter(second.loader)))
    assert second.steps == [BATCHES]
    second.watch.close()


def test_a_checkpoint_is_ordered_where_the_script_keeps_its_own(made, tmp_path):
    loop = made(project_dir=str(tmp_path / "project"))
    loop.update(*next(iter(loop.loader)))
    location = loop.watch._loop.save(1)
    assert location == str(tmp_path / "project" / "step-1")
    assert (Path(location) / "random_states_0.pkl").exists()


def test_what_is_no_accelerator_or_has_nothing_prepared_is_refused():
    with pytest.raises(TypeError, match=r"takes an accelerate.Accelerator, not int"):
        rankwatch.accelerate(1)
    with pytest.raises(ValueError, match=r"after accelerator.prepare"):
        rankwatch.accelerate(accelerate.Accelerator(cpu=True))
