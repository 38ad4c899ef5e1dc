"""Evaluations are a phase of their own, also where the loop does not say so."""

import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def train(probe, model, optimizer, step=0):
    probe.step_begin(step, 0)
    optimizer.zero_grad()
    model(batch()).sum().backward()
    optimizer.step()
    probe.step_end(step, 0)


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for seed in range(3):
            model(batch(seed))
    model.train()


TRAINED = ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"]


def test_an_evaluation_is_a_phase_until_training_goes_on(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    evaluate(model)
    assert sink.log == ["+eval"]
    model(batch()).sum().backward()
    assert sink.log == ["+eval", "-eval", "+forward", "-forward", "+backward", "-backward"]


def test_an_evaluation_at_the_end_of_a_step_ends_with_it_and_one_between_two_steps_with_the_next(
    sink, model, optimizer
):
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    model(batch()).sum().backward()
    evaluate(model)
    probe.step_end(0, 0)
    assert sink.log[-2:] == ["+eval", "-eval"]
    for step in (1, 2):
        train(probe, model, optimizer, step)
    sink.log.clear()
    evaluate(model)
    assert sink.log == ["+eval"]
    train(probe, model, optimizer, 3)
    assert sink.log == ["+eval", "-eval", *TRAINED]


def test_a_loop_that_generates_in_every_step_does_not_evaluate(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    for step in range(4):
        probe.step_begin(step, 0)
        sink.log.clear()
        evaluate(model)
        model(batch()).sum().backward()
        probe.step_end(step, 0)
        assert ("+eval" in sink.log) is (step == 0)


def test_a_frozen_model_that_trains_in_evaluation_mode_does_not_evaluate(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    model.eval()
    train(probe, model, optimizer)
    assert sink.log == TRAINED


def test_an_evaluation_that_calls_the_bare_model_is_one(sink, optimizer, model):
    compiled = torch.compile(model, backend="eager")
    probe = TorchProbe(sink, compiled, optimizer)
    probe.step_begin(0, 0)
    evaluate(model)
    assert sink.log == ["+eval"]
