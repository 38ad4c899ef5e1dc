"""The total norm is measured as often as its budget allows; what is never left out is this rank's own gradients."""

import math

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.gradients import SMALL_ELEMENTS, LocalGradients
from rankwatch.torch_probe.start import EVERY_MAX, Sampling
from tests.support.clock import FakeClock
from tests.support.ranks.sink import Watched, a_step


def run(clock: FakeClock, sampling: Sampling, steps: range, step_s: float, cost_s: float) -> list[int]:
    """Steps of a loop that measures when it is due; returns those in which it did."""
    measured = []
    for step in steps:
        sampling.step_begins(step)
        clock.advance(step_s)
        if sampling.due:
            measured.append(step)
            sampling.took(int(cost_s * 1e9))
    return measured


@pytest.mark.parametrize(
    ("cost_s", "every"), [(0.0005, 1), (0.0011, 2), (0.0021, 4), (0.0079, 8), (10.0, EVERY_MAX)], ids=str
)
def test_measurements_take_at_most_their_part_of_the_time_and_come_in_steps_that_all_ranks_share(cost_s, every):
    clock = FakeClock(10**9)
    sampling = Sampling(0.01, now=lambda: clock.now_ns)
    run(clock, sampling, range(100), 0.1, cost_s)
    measured = run(clock, sampling, range(100, 300), 0.1, cost_s)
    assert measured == [step for step in range(100, 300) if step % every == 0]


def test_the_interval_follows_longer_steps_but_not_one_slow_measurement():
    clock = FakeClock(10**9)
    sampling = Sampling(0.01, now=lambda: clock.now_ns)
    run(clock, sampling, range(40), 0.1, 0.0005)
    run(clock, sampling, range(40, 41), 0.1, 1.0)
    assert run(clock, sampling, range(41, 60), 0.1, 0.0005) == list(range(41, 60))
    run(clock, sampling, range(60, 200), 0.01, 0.0005)
    assert sampling.every == 8
    run(clock, sampling, range(200, 500), 0.1, 0.0005)
    assert sampling.every == 1


def test_the_line_says_how_often_the_norm_is_measured(sink, model, optimizer, probe, capsys):
    for step in range(4):
        probe._sampling.every = 1 if step < 2 else 8
        with a_step(probe, optimizer, step):
            model(torch.ones(5, 4)).sum().backward()
    assert "gradient norm every 8 steps" in sink.declared["watched"]
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("parts", [{}, {"local_gradients": False}, {"on_nonfinite": "skip"}], ids=str)
def test_only_a_norm_that_explains_nothing_else_is_left_out(sink, model, optimizer, parts):
    probe = TorchProbe(sink, model, optimizer, **parts)
    probe._sampling.due = False
    assert probe._takes_norm() is bool(parts)


def test_a_step_without_the_total_norm_still_names_the_parameter_that_is_not_finite(sink, model, optimizer, probe):
    model[0].bias.register_hook(lambda grad: grad * math.nan)
    with a_step(probe, optimizer, 1):
        probe._sampling.due = False
        model(torch.ones(5, 4)).sum().backward()
    assert sink.exact["nonfinite"] == 1
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]] == "0.bias"


def test_a_budget_of_nothing_is_a_clear_error(sink, model, optimizer):
    with pytest.raises(ValueError, match="overhead_max"):
        TorchProbe(sink, model, optimizer, overhead_max=0)


# ---- gradients that are read together --------------------------------------------------------------------------------


def norm_of(*tensors: torch.Tensor) -> float:
    return torch.linalg.vector_norm(torch.cat([tensor.flatten().double() for tensor in tensors])).item()


def gradients(count: int) -> dict[int, torch.Tensor]:
    """Small and large ones in turns."""
    generator = torch.Generator().manual_seed(0)
    sizes = [SMALL_ELEMENTS + 1 if number % 2 else 7 for number in range(count)]
    return {number: torch.randn(size, generator=generator) for number, size in enumerate(sizes)}


@pytest.mark.parametrize("again", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 2), (2, 3, 4, 5), (4, 5)], ids=str)
def test_a_gradient_that_is_read_again_replaces_what_was_read_of_it_before(again):
    local, first = LocalGradients(on_host=True), gradients(4)
    local.add(first)
    second = {index: gradients(6)[index] * 3 for index in again}
    local.add(second)
    found = local.result()
    assert found is not None
    assert found.norm == pytest.approx(norm_of(*(first | second).values()), rel=1e-6)


def test_non_finite_ones_are_found_among_small_and_large_ones_in_their_order_and_until_they_are_read_again():
    local, found = LocalGradients(on_host=True), gradients(6)
    found[3][5], found[2][0] = math.inf, math.nan
    local.add({index: found[index] for index in (5, 4, 3, 2, 1, 0)})
    assert local.result()[1:] == (2, 3)
    local.add({3: torch.ones(3)})
    assert local.result()[1:] == (1, 2)
    local.clear()
    assert local.result() is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.complex64], ids=str)
def test_types_may_be_mixed(dtype):
    mixed = {0: torch.randn(5), 1: torch.randn(5).to(dtype), 2: torch.full((SMALL_ELEMENTS + 1,), 2.0).to(dtype)}
    local = LocalGradients(on_host=True)
    local.add(mixed)
    expected = math.hypot(*(torch.linalg.vector_norm(tensor.to(torch.complex128)).item() for tensor in mixed.values()))
    assert local.result().norm == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "change", [torch.clone, torch.Tensor.half, torch.Tensor.double], ids=["none", "half", "double"]
)
@pytest.mark.parametrize("sparse", [False, True], ids=["strided", "sparse"])
def test_gradients_of_the_same_parameters_may_change_their_type_and_become_sparse(change, sparse):
    local, found = LocalGradients(on_host=True), gradients(4)
    local.add(found)
    local.clear()
    later = {index: change(tensor * 2) for index, tensor in found.items()}
    strided = list(later.values())[: 2 if sparse else 4]
    later = {index: tensor.to_sparse() if sparse and index > 1 else tensor for index, tensor in later.items()}
    local.add(later)
    assert local.result().norm == pytest.approx(norm_of(*strided), rel=1e-3)


def test_gradients_of_micro_batches_that_reach_different_parts_are_all_in_the_norm():
    parts = nn.ModuleList([nn.Linear(4, 2), nn.Linear(4, 2)])
    watched = Watched(parts)
    with watched.step():
        for part in (parts[0], parts[1], parts[0]):
            part(torch.ones(3, 4)).square().sum().backward()
    assert watched.sink.values["local_grad_norm"] == pytest.approx(
        norm_of(*(p.grad for p in parts.parameters())), rel=1e-6
    )
