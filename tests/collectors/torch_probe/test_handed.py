"""What can be handed to `watch.torch`: several models and optimizers, in one call or two, in frameworks' wrappers."""

import math

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from rankwatch.torch_probe import TorchProbe, fingerprint
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.recorders import Rank
from tests.support.ranks.sink import FakeSink

pytestmark = pytest.mark.torch


class Wrapper(torch.optim.Optimizer):
    """As Accelerate makes it: an Optimizer by its class, without anything that an Optimizer's constructor sets up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 2)


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.01)


def loss_of(model: nn.Module, factor: float = 1.0) -> torch.Tensor:
    return model(torch.ones(3, 4)).square().sum() * factor


def norm_of(*models: nn.Module) -> float:
    return torch.linalg.vector_norm(torch.cat([p.grad.flatten() for m in models for p in m.parameters()])).item()


def train(probe: TorchProbe, steps: dict[torch.optim.Optimizer, nn.Module], factor: float = 1.0) -> None:
    """One step in which each optimizer updates its model."""
    probe.step_begin(0, 0)
    for optimizer, model in steps.items():
        optimizer.zero_grad()
        loss_of(model, factor).backward()
        optimizer.step()
    probe.step_end(0, 0)


def test_an_optimizer_is_looked_for_within_whatever_wraps_it(sink):
    model = net()
    optimizer = Wrapper(Wrapper(sgd(model)))
    probe = TorchProbe(sink, model, optimizer)
    train(probe, {optimizer: model})
    assert sink.log[-2:] == ["+optimizer", "-optimizer"]
    assert sink.values["grad_norm"] == pytest.approx(norm_of(model), rel=1e-6)


@pytest.mark.parametrize(
    "several", [list, tuple, lambda pair: dict(zip("ab", pair, strict=True))], ids=["list", "tuple", "dict"]
)
def test_lists_and_dicts_of_models_and_optimizers_are_taken(sink, several):
    models = [net(), net()]
    optimizers = [sgd(models[0]), Wrapper(sgd(models[1]))]
    probe = TorchProbe(sink, several(models), several(optimizers))
    train(probe, dict(zip(optimizers, models, strict=True)))
    assert sink.values["grad_norm"] == pytest.approx(norm_of(*models), rel=1e-6)
    assert sink.exact["nonfinite"] == 0
    assert sink.exact["fingerprint"] == fingerprint(p for model in models for p in model.parameters())
    assert sink.declared["optimizers"] == 2


def test_parameters_of_several_models_are_told_apart(sink):
    TorchProbe(sink, {"encoder": net(), "head": net()}, sgd(net()))
    assert sink.declared["parameters"] == ["encoder.weight", "encoder.bias", "head.weight", "head.bias"]
    TorchProbe(sink, [net(), net(), nn.Sequential(net())], sgd(net()))
    assert sink.declared["parameters"][::2] == ["Linear0.weight", "Linear1.weight", "Sequential.0.weight"]


def test_the_parameter_that_was_not_finite_first_is_named_with_its_model(sink):
    models = {"generator": net(), "critic": net()}
    optimizers = [sgd(model) for model in models.values()]
    probe = TorchProbe(sink, models, optimizers)
    models["critic"].bias.register_hook(lambda gradient: gradient * math.nan)
    train(probe, dict(zip(optimizers, models.values(), strict=True)))
    assert sink.exact["nonfinite"] == 1
    assert sink.declared["parameters"][sink.exact["nonfinite_first"]] == "critic.bias"


def test_what_the_generators_backward_leaves_in_the_critic_is_no_part_of_the_critics_update(sink):
    generator, critic = nn.Linear(4, 4), net()
    optimizers = [sgd(critic), sgd(generator)]
    probe = TorchProbe(sink, [critic, generator], optimizers)
    probe.step_begin(0, 0)
    loss_of(critic).backward()
    of_critic = norm_of(critic)
    optimizers[0].step()
    loss_of(nn.Sequential(generator, critic), 1e3).backward()
    of_generator = norm_of(generator)
    optimizers[1].step()
    probe.step_end(0, 0)
    assert sink.values["grad_norm"] == pytest.approx(math.hypot(of_critic, of_generator), rel=1e-6)


def test_what_a_spoilt_update_leaves_to_the_next_one_is_no_fault_of_the_rank_that_computes_it(sink):
    generator, critic = nn.Linear(4, 4), net()
    optimizers = [sgd(generator), sgd(critic)]
    probe = TorchProbe(sink, {"generator": generator, "critic": critic}, optimizers)

    def step(spoil_own_gradient: bool) -> tuple[int, int | None]:
        probe.step_begin(0, 0)
        critic.zero_grad()
        loss_of(critic, math.nan if spoil_own_gradient else 1.0).backward()
        if not spoil_own_gradient:  # the other rank's, as the reduction brings it
            critic.bias.grad.fill_(math.nan)
            probe._shares[1].now.norm = math.nan
        optimizers[1].step()
        loss_of(nn.Sequential(generator, critic)).backward()
        optimizers[0].step()
        sink.exact.clear()
        probe.step_end(0, 0)
        return sink.exact["nonfinite"], sink.exact.get("nonfinite_first")

    assert step(spoil_own_gradient=False) == (0, None)
    critic.load_state_dict(net().state_dict())
    generator.load_state_dict(nn.Linear(4, 4).state_dict())
    count, first = step(spoil_own_gradient=True)
    assert count == 2
    assert sink.declared["parameters"][first].startswith("critic.")


def test_an_optimizer_that_calls_the_model_by_itself_is_measured_at_its_end(sink):
    model = net()
    optimizer = sgd(model)
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    optimizer.step(closure)
    probe.step_end(0, 0)
    assert sink.values["grad_norm"] == pytest.approx(norm_of(model), rel=1e-6)
    assert sink.log == ["+forward", "-forward", "+backward", "-backward", "+optimizer", "-optimizer"]


@pytest.mark.parametrize(
    ("model", "optimizer", "message"),
    [
        (lambda: net().forward, lambda: sgd(net()), "the model must be .* not method"),
        (lambda: sgd(net()), net, "the model must be .* not SGD"),
        (lambda: [net(), None], lambda: sgd(net()), "the model must be .* not NoneType"),
        (list, lambda: sgd(net()), "the model must be .* not nothing"),
        (net, lambda: None, "the optimizer must be .* not NoneType"),
        (net, lambda: "sgd", "the optimizer must be .* not str"),
        (net, lambda: {"a": 1}, "the optimizer must be .* not int"),
    ],
)
def test_what_is_no_model_or_no_optimizer_is_a_clear_error(sink, model, optimizer, message):
    with pytest.raises(TypeError, match=message):
        TorchProbe(sink, model(), optimizer())
    assert sink.declared == {}


def test_an_optimizer_whose_hooks_cannot_be_had_is_counted_and_its_gradients_are_watched(sink):
    model = net()
    optimizer = sgd(model)
    del optimizer._optimizer_step_pre_hooks
    probe = TorchProbe(sink, model, optimizer)
    probe.step_begin(0, 0)
    loss_of(model).backward()
    probe.step_end(0, 0)
    assert sink.dropped == {"probe_errors": 1}
    assert sink.values["grad_norm"] == pytest.approx(norm_of(model), rel=1e-6)


def test_a_second_call_adds_to_what_is_watched_and_a_repeated_one_does_not_double_it(tmp_path):
    watch = Rank(tmp_path).watch
    models = [net(), net()]
    optimizers = [sgd(model) for model in models]
    watch.torch(models[0], optimizers[0], fingerprint_every=1)
    watch.torch(models[1], optimizers[1])
    watch.torch(models[1], optimizers[1])
    sink = FakeSink()
    probe = watch._loop.probe
    probe._sink = probe._phases._sink = probe._updates._sink = sink
    train(probe, dict(zip(optimizers, models, strict=True)))
    assert len(probe._shares) == 2
    assert sink.values["grad_norm"] == pytest.approx(norm_of(*models), rel=1e-6)
    assert sink.log.count("+optimizer") == 2
    watch.close()
    train(probe, dict(zip(optimizers, models, strict=True)))
    assert sink.log.count("+optimizer") == 2


def test_one_line_says_what_is_watched_once_every_optimizer_has_made_an_update(sink, capsys):
    model = net()
    optimizer = sgd(model)
    probe = TorchProbe(sink, model, optimizer, fingerprint_every=0)
    probe.step_begin(0, 0)
    probe.step_end(0, 0)
    assert capsys.readouterr().err == ""
    for _ in range(3):
        train(probe, {optimizer: model})
    line = (
        "watching Linear (2 parameters), SGD: gradient norm, local gradients; not watched: fingerprints (switched off)"
    )
    assert capsys.readouterr().err == f"rankwatch: {line}\n"
    assert sink.declared["watched"] == line


def test_the_line_says_where_hooks_were_never_reached(sink, capsys):
    TorchProbe(sink, net(), sgd(net()))
    probe = TorchProbe(sink, net(), sgd(net()))
    for step in range(12):
        probe.step_begin(step, 0)
        loss_of(net()).backward()
        probe.step_end(step, 0)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; not watched: gradients (no backward has reached these parameters)")


# ---- under DistributedDataParallel -----------------------------------------------------------------------------------


def wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    """What the loop calls, and what is handed over."""
    model = net()
    if how == "compiled ddp":
        called = torch.compile(DistributedDataParallel(model), backend="eager")
        return called, called
    if how == "ddp of compiled":
        called = DistributedDataParallel(torch.compile(model, backend="eager"))
        return called, called
    called = DistributedDataParallel(model)
    return called, model  # as Hugging Face's callbacks get it


def on_rank(rank: int, how: str, directory: str) -> dict:
    watch = rankwatch.start(
        job="j", launch="l", rank=rank, world_size=2, agent=False, stack_signal=None, env={"RANKWATCH_DIR": directory}
    )
    called, handed = wrapped(how)
    optimizer = sgd(handed)
    watch.torch(handed, optimizer, fingerprint_every=1)
    probe, sink = watch._loop.probe, FakeSink()
    probe._sink = sink
    probe._declare()
    for step in range(2):
        probe.step_begin(step, 0)
        optimizer.zero_grad()
        called(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
        reduced = norm_of(handed)
        nn.utils.clip_grad_norm_(handed.parameters(), 1e-3)
        optimizer.step()
        probe.step_end(step, 0)
    return {**sink.values, **sink.exact, **sink.declared, "reduced": reduced, "errors": sink.dropped}


@pytest.mark.integration
@pytest.mark.timeout(240)
@pytest.mark.parametrize("how", ["compiled ddp", "ddp of compiled", "ddp around what was handed over"])
def test_replicas_are_compared_and_norms_taken_before_clipping_however_ddp_is_wrapped(how, tmp_path):
    first, second = on_ranks(2, on_rank, how, str(tmp_path))
    assert first["fingerprint"] == second["fingerprint"]
    assert first["replicated"] is second["replicated"] is True
    assert first["parameters"] == ["weight", "bias"]
    assert first["grad_norm"] == pytest.approx(first["reduced"], rel=1e-5)
    assert first["local_grad_norm"] != pytest.approx(second["local_grad_norm"], rel=0.1)
    assert first["watched"].endswith("fingerprints every 1 steps")
    assert first["errors"] == second["errors"] == {}
    assert "watched" not in second


def on_part_of_the_job(rank: int, directory: str, topology: dict | None) -> dict:
    watch = rankwatch.start(
        job="j",
        launch="l",
        rank=rank,
        world_size=4,
        topology=topology and {name: places[rank] for name, places in topology.items()},
        agent=False,
        stack_signal=None,
        env={"RANKWATCH_DIR": directory},
    )
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    model = DistributedDataParallel(net(), process_group=pairs[rank // 2])
    watch.torch(model, sgd(model))
    return {"replicated": watch._loop.probe._model.replicated}


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_replicas_within_a_part_of_the_job_are_compared_only_where_places_are_told(tmp_path):
    untold = on_ranks(4, on_part_of_the_job, str(tmp_path / "untold"), None)
    assert untold == [{"replicated": False}] * 4
    told = on_ranks(4, on_part_of_the_job, str(tmp_path / "told"), {"pp": [0, 0, 1, 1], "dp": [0, 1, 0, 1]})
    assert told == [{"replicated": True}] * 4
