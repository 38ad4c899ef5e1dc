"""What the calls to DeepSpeed's engine mean, with a double that has the engine's public methods.

The real engine trains in tests/adoption and tests/integration; here it is about what a real one does seldom.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import rankwatch
from rankwatch.integrations.deepspeed import MARKER, EngineLoop
from rankwatch.layout import resume_path
from tests.support.ranks.recorders import Rank

pytestmark = pytest.mark.torch


class Engine(nn.Module):
    """Accumulates two batches, as DeepSpeed 0.19 does with one process."""

    has_moe_layers = False
    loss_scale = 1.0
    mp_world_size = 1

    def __init__(self, decoupled=False, loss_scale=1.0):
        super().__init__()
        self.loss_scale = loss_scale
        self.module = nn.Linear(4, 1)
        self.basic_optimizer = torch.optim.AdamW(self.module.parameters())
        self.global_steps = self.micro_steps = 0
        self.overflow = False
        self.decoupled = decoupled
        self.loaded = None

    def forward(self, x):
        return self.module(x)

    def backward(self, loss):
        loss.backward()
        if self.is_gradient_accumulation_boundary():
            self.allreduce_gradients()

    allreduce_gradients = staticmethod(lambda: None)
    get_global_grad_norm = staticmethod(lambda: torch.tensor(0.5))

    def is_gradient_accumulation_boundary(self):
        return self.micro_steps % 2 == 1

    zero_optimization_stage = staticmethod(lambda: 1)
    optimizer = property(lambda self: self)

    def fp16_enabled(self):
        return self.loss_scale > 1

    def step(self):
        if self.is_gradient_accumulation_boundary():
            if not self.overflow:
                self.basic_optimizer.step()
            self.module.zero_grad()
            self.global_steps += 1
        self.micro_steps += 1

    def save_checkpoint(self, save_dir, tag=None):
        Path(save_dir, tag).mkdir(parents=True)
        if not self.decoupled:
            self.commit(save_dir, tag)
        return True

    def commit(self, save_dir, tag):
        Path(save_dir, MARKER).write_text(tag)

    def load_checkpoint(self, load_dir, tag=None):
        self.loaded = load_dir, tag
        self.global_steps = 7


class Loop:
    def __init__(self, folder, number=0, **how):
        self.rank = Rank(folder, number)
        self.engine = Engine(**how)
        self.loop = EngineLoop(self.engine, self.rank.watch)

    def train(self, batches):
        for _ in range(batches):
            self.engine.backward(self.engine(torch.randn(8, 4)).square().mean())
            self.engine.step()

    @property
    def saved(self):
        return [note["location"] for note in self.rank.notes("checkpoint_saved")]


@pytest.fixture
def loop(tmp_path):
    made = Loop(tmp_path)
    yield made
    assert made.rank.watch.errors == 0, made.rank.watch.last_error


def test_a_step_is_what_the_engine_counts_with_its_loss_and_its_norm(loop):
    loop.train(6)
    assert [entry.step for entry in loop.rank.steps] == [0, 1, 2]
    assert all(entry.values["loss"] > 0 and entry.values["grad_norm"] == 0.5 for entry in loop.rank.steps)
    assert all("collective" in entry.phases for entry in loop.rank.steps)


def test_an_overflow_that_the_loss_scale_explains_is_a_skipped_update_and_no_fault(tmp_path):
    loop = Loop(tmp_path, loss_scale=1024.0)
    loop.train(2)
    loop.engine.overflow = True
    loop.engine.module.weight.register_hook(lambda gradient: gradient * torch.inf)
    loop.train(2)
    plain, overflowed = (entry.values for entry in loop.rank.steps)
    assert plain["nonfinite"] == overflowed["nonfinite"] == 0
    assert "optimizer_skipped" not in plain
    assert overflowed["optimizer_skipped"] == 1.0
    assert plain["loss_scale"] == 1024.0
    assert loop.rank.watch.errors == 0, loop.rank.watch.last_error


def test_a_checkpoint_is_in_the_ledger_when_the_marker_names_it(loop, tmp_path):
    loop.train(4)
    loop.engine.save_checkpoint(str(tmp_path / "out"))
    assert loop.saved == [str(tmp_path / "out" / "global_step2")]
    (noted,) = loop.rank.notes("checkpoint_saved")
    assert noted["checkpoint"] == "local:l.0:2"


def test_one_that_the_engine_commits_later_is_in_the_ledger_then(tmp_path):
    loop = Loop(tmp_path, decoupled=True)
    loop.train(2)
    loop.engine.save_checkpoint(str(tmp_path / "out"), "first")
    loop.train(2)
    assert loop.saved == []
    loop.engine.commit(tmp_path / "out", "first")
    loop.train(2)
    assert loop.saved == [str(tmp_path / "out" / "first")]
    assert [note["checkpoint"] for note in loop.rank.notes("checkpoint_saved")] == ["local:l.0:1"]


def test_without_a_tag_what_is_advised_is_loaded_and_the_steps_go_on_there(loop, tmp_path):
    location = tmp_path / "out" / "global_step40"
    location.mkdir(parents=True)
    advice = {"job": "gpt", "checkpoint": "local:l.0:40", "location": str(location), "step": 40}
    Path(resume_path(str(tmp_path), "gpt")).write_text(json.dumps(advice))
    loop.engine.load_checkpoint("elsewhere")
    assert loop.engine.loaded == (str(tmp_path / "out"), "global_step40")
    loop.train(2)
    assert [entry.step for entry in loop.rank.steps] == [40]


def test_a_tag_that_the_script_names_is_loaded_and_the_engine_counts_on(loop):
    loop.engine.load_checkpoint("out", "global_step7")
    assert loop.engine.loaded == ("out", "global_step7")
    loop.train(2)
    assert [entry.step for entry in loop.rank.steps] == [7]


def test_a_checkpoint_can_be_ordered_once_the_script_has_saved_one(loop, tmp_path):
    loop.train(2)
    assert loop.rank.watch._loop.save is None
    loop.engine.save_checkpoint(str(tmp_path / "out"))
    assert loop.rank.watch._loop.save(9) == str(tmp_path / "out" / "global_step9")
    assert (tmp_path / "out" / MARKER).read_text() == "global_step9"


def test_what_is_no_engine_or_one_of_a_pipeline_is_refused():
    with pytest.raises(TypeError, match="takes the engine"):
        rankwatch.deepspeed(nn.Linear(1, 1))
    pipeline = Engine()
    pipeline.train_batch = lambda: None
    with pytest.raises(TypeError, match="pipeline engine"):
        rankwatch.deepspeed(pipeline)
