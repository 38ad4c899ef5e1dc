"""What a probe measures of a training, what it calls its phases, and what it leaves alone."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe, fingerprint
from rankwatch.torch_probe.gradients import STEPS_REMEMBERED, Updates
from tests.support.ranks.sink import Watched, a_step

pytestmark = pytest.mark.torch


TRAINED = ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"]


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def norm_of(model: nn.Module) -> float:
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.linalg.vector_norm(torch.cat(gradients)).item()


def train(probe, model, optimizer, step=0, data=None, clip=None, reach=slice(None)):
    """One step; `reach` is the part of the model that is used. Returns the norm as autograd left it."""
    with a_step(probe, optimizer, step):
        optimizer.zero_grad()
        part = model if reach == slice(None) else model[reach]
        part(batch() if data is None else data).square().sum().backward()
        norm = norm_of(model)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
    return norm


def test_what_follows_the_optimizers_step_is_outside_of_the_loops_step(sink, model, optimizer, probe):
    for step in range(3):
        sink.is_outside = False  # the loop's boundary
        train(probe, model, optimizer, step)
    assert sink.is_outside
    model(batch())  # an evaluation
    assert sink.is_outside


def test_how_much_a_step_has_to_do_is_recorded_once_steps_differ(sink, model, optimizer, probe):
    for step in range(3):
        train(probe, model, optimizer, step)
        with torch.no_grad():
            model(batch())  # no work of a step
    assert "step_work" not in sink.values
    train(probe, model, optimizer, 3, data=batch().repeat(3, 1))
    assert sink.values["step_work"] == 3.0
    with a_step(probe, optimizer, 4):
        for _ in range(2):
            model(input=batch()).square().sum().backward()
    assert sink.values["step_work"] == 2.0
    train(probe, model, optimizer, 5)
    assert sink.values["step_work"] == 1.0


def test_the_total_norm_is_recorded_as_it_was_before_clipping(sink, model, optimizer, probe):
    norm = train(probe, model, optimizer, clip=0.01)
    assert norm > 1
    assert sink.values["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert sink.values["local_grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert sink.exact["nonfinite"] == 0
    assert "nonfinite_first" not in sink.exact


@pytest.mark.parametrize("local", [True, False])
def test_each_part_can_be_left_out(sink, model, optimizer, local):
    probe = TorchProbe(
        sink, model, optimizer, grad_norm=not local, local_gradients=local, phases=False, fingerprint_every=0
    )
    train(probe, model, optimizer)
    assert set(sink.values) == {"lr", "local_grad_norm" if local else "grad_norm"}
    assert set(sink.exact) == ({"nonfinite"} if local else set())
    assert sink.log == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradients_are_counted_and_the_first_parameter_in_backward_order_is_named(
    sink, model, optimizer, probe, value
):
    model[0].bias.register_hook(lambda grad: grad * value)
    train(probe, model, optimizer)
    assert sink.exact["nonfinite"] == 1
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]] == "0.bias"
    assert not math.isfinite(sink.values["grad_norm"])


def test_a_nan_in_the_activations_is_named_at_the_layer_backward_met_it_first(sink, model, optimizer, probe):
    model[1].register_full_backward_hook(lambda module, before, after: (before[0] * math.nan,))
    train(probe, model, optimizer)
    assert sink.exact["nonfinite"] == 2  # weight and bias of layer 0; layer 2 came before
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]].startswith("0.")


def test_fingerprints_come_every_k_steps_and_are_those_of_the_updated_parameters(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer, fingerprint_every=3)
    seen = {}
    for step in range(7):
        sink.exact.clear()
        train(probe, model, optimizer, step)
        if "fingerprint" in sink.exact:
            seen[step] = sink.exact["fingerprint"] == fingerprint(model.parameters())
    assert seen == {0: True, 3: True, 6: True}


def test_skip_leaves_out_the_update_of_a_non_finite_step_and_takes_the_next_one(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer, on_nonfinite="skip")
    train(probe, model, optimizer)
    parameters, moments = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    train(probe, model, optimizer, 1, batch() * math.nan)
    assert sink.values.pop("optimizer_skipped") == 1.0
    assert math.isnan(sink.values["grad_norm"])
    torch.testing.assert_close(model.state_dict(), parameters, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], moments, rtol=0, atol=0)
    train(probe, model, optimizer, 2)
    assert "optimizer_skipped" not in sink.values
    assert any((model.state_dict()[name] != parameters[name]).any() for name in parameters)


def test_record_lets_the_non_finite_update_happen(sink, model, optimizer, probe):
    train(probe, model, optimizer, 0, batch() * math.nan)
    assert all(p.isnan().any() for p in model.parameters())
    assert "optimizer_skipped" not in sink.values


def test_accumulated_gradients_are_judged_as_their_sum(sink, model, optimizer, probe):
    with a_step(probe, optimizer):
        for seed in range(3):
            model(batch(seed)).square().sum().backward()
        expected = norm_of(model)
    assert sink.values["grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert sink.values["local_grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_parameters_that_backward_did_not_reach_are_no_part_of_the_norm(sink, model, optimizer):
    model.register_module("unused", nn.Linear(3, 3))
    probe = TorchProbe(sink, model, optimizer)
    norm = train(probe, model, optimizer, reach=slice(0, 3))
    assert sink.values["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert sink.exact["nonfinite"] == 0


def test_a_step_without_a_backward_has_no_gradient_values(sink, model, optimizer, probe):
    train(probe, model, optimizer)
    sink.values.clear()
    sink.exact.clear()
    probe.step_begin(1, 0)
    probe.step_end(1, 0)
    assert sink.values == {}
    assert sink.exact == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_other_types_neither_overflow_nor_lose_precision(dtype):
    watched = Watched(nn.Linear(64, 64, bias=False, dtype=dtype))
    with watched.step():
        (watched.model.weight * 2048).sum().backward()
    assert watched.sink.values["grad_norm"] == pytest.approx(2048 * 64, rel=1e-6)
    assert watched.sink.exact["nonfinite"] == 0


def test_huge_but_finite_gradients_are_finite(sink, model, optimizer, probe):
    model[0].weight.register_hook(lambda grad: torch.full_like(grad, 1e30))
    train(probe, model, optimizer)
    assert sink.exact["nonfinite"] == 0
    assert sink.values["grad_norm"] == pytest.approx(1e30 * 32**0.5, rel=1e-6)


def test_sparse_gradients_are_left_out():
    watched = Watched(nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1)))
    with watched.step():
        watched.model(torch.tensor([1, 2])).sum().backward()
    assert watched.sink.values["grad_norm"] == pytest.approx(norm_of(watched.model[1]), rel=1e-6)
    assert watched.sink.dropped == {}


def test_logged_tensors_are_read_at_once_and_not_kept(sink, model, optimizer, probe):
    loss = model(batch()).sum()
    probe.log("loss", loss)
    assert sink.values["loss"] == loss.item()
    probe.log("loss", torch.tensor(math.nan))
    assert math.isnan(sink.values["loss"])


def test_a_norm_that_the_loop_logs_is_not_measured_again_until_it_stops_logging(sink, model, optimizer, monkeypatch):
    probe = TorchProbe(sink, model, optimizer, local_gradients=False)
    measured = []
    monkeypatch.setattr("rankwatch.torch_probe.probe.total_norm", lambda *_, **__: measured.append(step) or 5.0)
    recorded = []
    for step in range(6):
        sink.values = {}
        with a_step(probe, optimizer, step):
            model(batch()).sum().backward()
            if step in (1, 2):
                probe.log("grad_norm", torch.tensor(7.0))
        recorded.append(sink.values.get("grad_norm"))
    assert measured == [0, 1, 4, 5]
    assert recorded == [5.0, 7.0, 7.0, None, 5.0, 5.0]


@pytest.mark.parametrize(
    "wrap", [lambda out: {"loss": out}, lambda out: (None, [out]), lambda out: out], ids=["mapping", "nested", "tensor"]
)
def test_backward_is_marked_for_any_shape_of_output(wrap):
    class Wrapped(nn.Linear):
        def forward(self, x):
            return wrap(super().forward(x))

    watched = Watched(Wrapped(4, 1))
    watched.probe.step_begin(0, 0)
    out = watched.model(batch())
    while not isinstance(out, torch.Tensor):
        out = out["loss"] if isinstance(out, dict) else out[-1]
    out.sum().backward()
    assert watched.sink.log[2:] == ["+backward", "-backward"]


def test_a_forward_that_raises_leaves_no_phase_open(sink, model, optimizer, probe):
    probe.step_begin(0, 0)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 99))
    assert sink.open == []
    train(probe, model, optimizer)
    assert sink.dropped == {}


def test_a_backward_that_raises_is_forgotten_at_the_next_step(sink, model, optimizer, probe):
    probe.step_begin(0, 0)

    def fail(grad):
        raise RuntimeError("boom")

    handle = model[0].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="boom"):
        model(batch()).sum().backward()
    handle.remove()
    norm = train(probe, model, optimizer, 1)
    assert sink.open == []
    assert sink.values["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert sink.log[-6:] == TRAINED


def test_a_hook_of_ours_that_fails_is_counted_and_training_goes_on(sink, model, optimizer, probe, caplog):
    sink.phase = lambda name: 1 / 0
    before = fingerprint(model.parameters())
    for step in range(3):
        train(probe, model, optimizer, step)
    assert fingerprint(model.parameters()) != before
    assert sink.dropped["probe_errors"] >= 3
    assert len(caplog.records) == 1


def test_a_watched_model_can_be_copied_and_pickled_and_its_copies_are_not_watched(sink, model, optimizer, probe):
    with a_step(probe):
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            twin(batch()).sum().backward()
        copy.deepcopy(optimizer).step()
        assert sink.log == []
    assert "grad_norm" not in sink.values


def test_close_takes_every_hook_away(sink, model, optimizer, probe):
    probe.close()
    train(probe, model, optimizer)
    assert set(sink.values) == set()
    assert sink.log == []


def test_after_a_restore_nothing_of_the_cut_off_step_is_reported(sink, model, optimizer, probe):
    probe.step_begin(7, 0)
    model(batch() * math.nan).sum().backward()
    assert probe.after_restore() == 0  # one rank has no replica to be equal to
    probe.step_end(7, 1)
    assert "nonfinite" not in sink.exact
    assert "grad_norm" not in sink.values


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fingerprint_every": -1}, "fingerprint_every"),
        ({"on_nonfinite": "abort"}, "on_nonfinite"),
        ({"overhead_max": 0}, "overhead_max"),
        ({"on_nonfinite": "skip", "grad_norm": False}, "grad_norm"),
    ],
)
def test_contradicting_arguments_are_a_clear_error(sink, model, optimizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        TorchProbe(sink, model, optimizer, **arguments)


def test_parameter_names_are_those_of_the_unwrapped_model_in_its_order(sink, model, optimizer):
    TorchProbe(sink, model, optimizer)
    assert sink.declared == {
        "parameters": ["0.weight", "0.bias", "2.weight", "2.bias"],
        "replicated": False,
        "optimizers": 1,
        "device_type": "cpu",
    }


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for seed in range(3):
            model(batch(seed))
    model.train()


def test_an_evaluation_is_a_phase_until_training_goes_on(sink, model, optimizer, probe):
    probe.step_begin(0, 0)
    evaluate(model)
    assert sink.log == ["+eval"]
    model(batch()).sum().backward()
    assert sink.log == ["+eval", "-eval", "+forward", "-forward", "+backward", "-backward"]


def test_an_evaluation_at_the_end_of_a_step_ends_with_it_and_one_between_two_steps_with_the_next(
    sink, model, optimizer, probe
):
    with a_step(probe):
        model(batch()).sum().backward()
        evaluate(model)
    assert sink.log[-2:] == ["+eval", "-eval"]
    for step in (1, 2):
        train(probe, model, optimizer, step)
    sink.log.clear()
    evaluate(model)
    assert sink.log == ["+eval"]
    train(probe, model, optimizer, 3)
    assert sink.log == ["+eval", "-eval", *TRAINED]


def test_a_loop_that_generates_in_every_step_does_not_evaluate(sink, model, optimizer, probe):
    for step in range(4):
        with a_step(probe, number=step):
            sink.log.clear()
            evaluate(model)
            model(batch()).sum().backward()
        assert ("+eval" in sink.log) is (step == 0)


def test_a_frozen_model_that_trains_in_evaluation_mode_does_not_evaluate(sink, model, optimizer, probe):
    model.eval()
    train(probe, model, optimizer)
    assert sink.log == TRAINED
    assert sink.collectives == 0  # nobody to wait for


def test_an_evaluation_that_calls_the_bare_model_is_one(sink, optimizer, model):
    compiled = torch.compile(model, backend="eager")
    probe = TorchProbe(sink, compiled, optimizer)
    probe.step_begin(0, 0)
    evaluate(model)
    assert sink.log == ["+eval"]


def test_what_a_fused_kernel_has_added_to_the_buffer_is_read_there_and_not_the_rest_that_it_leaves():
    model = nn.Linear(4, 1, bias=False)
    model.weight.main_grad, model.weight.grad_added_to_main_grad = torch.ones(1, 4), True
    watched = Watched(model, grad_norm=False)
    with watched.step():
        (model(torch.ones(2, 4)).sum() * math.nan).backward()
    assert watched.sink.values["local_grad_norm"] == 2.0
    assert watched.sink.exact["nonfinite"] == 0


def test_a_nan_in_one_of_several_backwards_is_seen_though_the_gradient_is_taken_each_time():
    model = nn.Linear(4, 1, bias=False)
    model.weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    watched = Watched(model, grad_norm=False)
    for step, factors in enumerate([(3.0, 4.0), (math.nan, 1.0), (1.0,)]):
        with watched.step(step):
            for factor in factors:
                (model(torch.full((1, 4), 0.5)).sum() * factor).backward()
        assert watched.sink.exact["nonfinite"] == (step == 1)
        if step == 0:
            assert watched.sink.values["local_grad_norm"] == pytest.approx(5.0)
    assert watched.sink.dropped == {}


def test_a_further_call_takes_over_from_the_probe_before():
    watched = Watched(nn.Linear(4, 1, bias=False))
    earlier, watched.probe = watched.probe, TorchProbe(watched.sink, watched.model, watched.optimizer)
    earlier.close()
    with watched.step():
        for _ in range(2):  # gradients accumulate, which a reading of each backward alone would miss
            watched.model(torch.full((1, 4), 0.5)).sum().backward()
    assert watched.sink.values["local_grad_norm"] == pytest.approx(2.0)


@pytest.fixture
def updates(sink) -> Updates:
    return Updates(sink)


def step(updates: Updates, times: int) -> None:
    """One step of the loop with so many backwards and updates."""
    updates.step_begins()
    for _ in range(times):
        update(updates)


def update(updates: Updates) -> None:
    updates.gradients_are_computed()
    updates.begins()
    updates.ends()


@pytest.mark.parametrize(
    ("updates_of_steps", "outside"),
    [((1,), False), ((1, 1), True), ((3, 2), False), ((3, 3), True), ((0, 0, 0, 1) * 3, True)],
    ids=["the first", "a later one", "one fewer than usual", "the last of several", "after micro-batches without one"],
)
def test_a_step_ends_with_its_usual_number_of_updates_and_the_first_is_one_piece(
    sink, updates, updates_of_steps, outside
):
    for times in updates_of_steps:
        step(updates, times)
    assert sink.is_outside is outside


def test_an_update_more_than_usual_goes_on_with_the_step_and_ends_it_again(sink, updates):
    step(updates, 1)
    step(updates, 1)
    updates.begins()
    assert not sink.is_outside
    updates.ends()
    assert sink.is_outside


def test_where_two_models_train_in_turns_a_pause_is_seen_after_either_and_no_work_is_taken_for_one(sink, updates):
    for times in (1, 1, 2) * 2:
        step(updates, times)
    step(updates, 1)
    assert sink.is_outside
    updates.gradients_are_computed()
    assert not sink.is_outside  # a hang in the reduction of the second model is one inside the step


def test_gradients_that_no_watched_optimizer_takes_are_no_step_where_all_steps_are_alike(sink, updates):
    step(updates, 1)
    step(updates, 1)
    updates.gradients_are_computed()
    assert sink.is_outside


def test_a_loop_that_changes_its_habits_is_learned_anew(sink, updates):
    step(updates, 1)
    for _ in range(STEPS_REMEMBERED):
        step(updates, 2)
    sink.is_outside = False
    step(updates, 1)
    assert not sink.is_outside
