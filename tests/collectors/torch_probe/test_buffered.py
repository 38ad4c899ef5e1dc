"""Gradients that others take: into buffers as Megatron does, or in a hook of their own as DeepSpeed does."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe

pytestmark = pytest.mark.torch


def test_what_a_fused_kernel_has_added_to_the_buffer_is_read_there_and_not_the_rest_that_it_leaves(sink):
    model = nn.Linear(4, 1, bias=False)
    model.weight.main_grad, model.weight.grad_added_to_main_grad = torch.ones(1, 4), True
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = TorchProbe(sink, model, optimizer, grad_norm=False)
    probe.step_begin(0, 0)
    (model(torch.ones(2, 4)).sum() * math.nan).backward()
    probe.step_end(0, 0)
    assert sink.values["local_grad_norm"] == 2.0
    assert sink.exact["nonfinite"] == 0


def test_a_nan_in_one_of_several_backwards_is_seen_though_the_gradient_is_taken_each_time(sink):
    model = nn.Linear(4, 1, bias=False)
    model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    probe = TorchProbe(sink, model, optimizer, grad_norm=False)
    for step, factors in enumerate([(3.0, 4.0), (math.nan, 1.0), (1.0,)]):
        probe.step_begin(step, 0)
        for factor in factors:
            (model(torch.full((1, 4), 0.5)).sum() * factor).backward()
        optimizer.step()
        probe.step_end(step, 0)
        assert sink.exact["nonfinite"] == (step == 1)
        if step == 0:
            assert sink.values["local_grad_norm"] == pytest.approx(5.0)
    assert sink.dropped == {}


def test_a_further_call_takes_over_from_the_probe_before(sink):
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    earlier = TorchProbe(sink, model, optimizer)
    probe = TorchProbe(sink, model, optimizer)
    earlier.close()
    probe.step_begin(0, 0)
    for _ in range(2):  # gradients accumulate, which a reading of each backward alone would miss
        model(torch.full((1, 4), 0.5)).sum().backward()
    optimizer.step()
    probe.step_end(0, 0)
    assert sink.values["local_grad_norm"] == pytest.approx(2.0)
