import copy
import math
import pickle

import pytest
import torch
from torch import nn

from rankwatch.torch_probe import TorchProbe, fingerprint


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def train(probe, model, optimizer, step=0, data=None, clip=None, reach=slice(None)):
    """One step; `reach` is the part of the model that is used. Returns the norm as autograd left it."""
    probe.step_begin(step, 0)
    optimizer.zero_grad()
    part = model if reach == slice(None) else model[reach]
    part(batch() if data is None else data).square().sum().backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.cat(gradients)).item()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    probe.step_end(step, 0)
    return norm


def test_what_follows_the_optimizers_step_is_outside_of_the_loops_step(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    for step in range(3):
        sink.is_outside = False  # the loop's boundary
        train(probe, model, optimizer, step)
    assert sink.is_outside
    model(batch())  # an evaluation
    assert sink.is_outside


def test_the_total_norm_is_recorded_as_it_was_before_clipping(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
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
    assert set(sink.values) == ({"local_grad_norm"} if local else {"grad_norm"})
    assert set(sink.exact) == ({"nonfinite"} if local else set())
    assert sink.log == []


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_non_finite_gradients_are_counted_and_the_first_parameter_in_backward_order_is_named(
    sink, model, optimizer, value
):
    probe = TorchProbe(sink, model, optimizer)
    model[0].bias.register_hook(lambda grad: grad * value)
    train(probe, model, optimizer)
    assert sink.exact["nonfinite"] == 1
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]] == "0.bias"
    assert not math.isfinite(sink.values["grad_norm"])


def test_a_nan_in_the_activations_is_named_at_the_layer_backward_met_it_first(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
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


def test_record_lets_the_non_finite_update_happen(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    train(probe, model, optimizer, 0, batch() * math.nan)
    assert all(p.isnan().any() for p in model.parameters())
    assert "optimizer_skipped" not in sink.values


def test_accumulated_gradients_are_judged_as_their_sum(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    for seed in range(3):
        model(batch(seed)).square().sum().backward()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in model.parameters()])).item()
    optimizer.step()
    probe.step_end(0, 0)
    assert sink.values["grad_norm"] == pytest.approx(expected, rel=1e-6)
    assert sink.values["local_grad_norm"] == pytest.approx(expected, rel=1e-6)


def test_parameters_that_backward_did_not_reach_are_no_part_of_the_norm(sink, model, optimizer):
    model.register_module("unused", nn.Linear(3, 3))
    probe = TorchProbe(sink, model, optimizer)
    norm = train(probe, model, optimizer, reach=slice(0, 3))
    assert sink.values["grad_norm"] == pytest.approx(norm, rel=1e-6)
    assert sink.exact["nonfinite"] == 0


def test_a_step_without_a_backward_has_no_gradient_values(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    train(probe, model, optimizer)
    sink.values.clear()
    sink.exact.clear()
    probe.step_begin(1, 0)
    probe.step_end(1, 0)
    assert sink.values == {}
    assert sink.exact == {}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_other_types_neither_overflow_nor_lose_precision(sink, dtype):
    model = nn.Linear(64, 64, bias=False, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    (model.weight * 2048).sum().backward()
    probe.step_end(0, 0)
    assert sink.values["grad_norm"] == pytest.approx(2048 * 64, rel=1e-6)
    assert sink.exact["nonfinite"] == 0


def test_huge_but_finite_gradients_are_finite(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    model[0].weight.register_hook(lambda grad: torch.full_like(grad, 1e30))
    train(probe, model, optimizer)
    assert sink.exact["nonfinite"] == 0
    assert sink.values["grad_norm"] == pytest.approx(1e30 * 32**0.5, rel=1e-6)


def test_sparse_gradients_are_left_out(sink):
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    model(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    probe.step_end(0, 0)
    dense = torch.cat([p.grad.flatten() for p in model[1].parameters()])
    assert sink.values["grad_norm"] == pytest.approx(torch.linalg.vector_norm(dense).item(), rel=1e-6)
    assert sink.dropped == {}


def test_logged_tensors_are_read_at_once_and_not_kept(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
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
        probe.step_begin(step, 0)
        model(batch()).sum().backward()
        if step in (1, 2):
            probe.log("grad_norm", torch.tensor(7.0))
        optimizer.step()
        probe.step_end(step, 0)
        recorded.append(sink.values.get("grad_norm"))
    assert measured == [0, 1, 4, 5]
    assert recorded == [5.0, 7.0, 7.0, None, 5.0, 5.0]


def test_phases_are_marked_in_order_and_the_optimizer_too(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    train(probe, model, optimizer)
    assert sink.log == ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"]
    assert sink.collectives == 0  # nobody to wait for


@pytest.mark.parametrize(
    "wrap", [lambda out: {"loss": out}, lambda out: (None, [out]), lambda out: out], ids=["mapping", "nested", "tensor"]
)
def test_backward_is_marked_for_any_shape_of_output(sink, wrap):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(4, 1)

        def forward(self, x):
            return wrap(self.inner(x))

    model = Wrapped()
    probe = TorchProbe(sink, model, torch.optim.SGD(model.parameters()))
    probe.step_begin(0, 0)
    out = model(batch())
    while not isinstance(out, torch.Tensor):
        out = out["loss"] if isinstance(out, dict) else out[-1]
    out.sum().backward()
    assert sink.log[2:] == ["+backward", "-backward"]


def test_a_forward_that_raises_leaves_no_phase_open(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 99))
    assert sink.open == []
    train(probe, model, optimizer)
    assert sink.dropped == {}


def test_a_backward_that_raises_is_forgotten_at_the_next_step(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
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
    assert sink.log[-6:] == ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"]


def test_a_hook_of_ours_that_fails_is_counted_and_training_goes_on(sink, model, optimizer, caplog):
    probe = TorchProbe(sink, model, optimizer)
    sink.phase = lambda name: 1 / 0
    before = fingerprint(model.parameters())
    for step in range(3):
        train(probe, model, optimizer, step)
    assert fingerprint(model.parameters()) != before
    assert sink.dropped["probe_errors"] >= 3
    assert len(caplog.records) == 1


def test_a_watched_model_can_be_copied_and_pickled_and_its_copies_are_not_watched(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(batch()).sum().backward()
    copy.deepcopy(optimizer).step()
    assert sink.log == []
    probe.step_end(0, 0)
    assert "grad_norm" not in sink.values


def test_close_takes_every_hook_away(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
    probe.close()
    train(probe, model, optimizer)
    assert set(sink.values) == set()
    assert sink.log == []


def test_after_a_restore_nothing_of_the_cut_off_step_is_told(sink, model, optimizer):
    probe = TorchProbe(sink, model, optimizer)
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
