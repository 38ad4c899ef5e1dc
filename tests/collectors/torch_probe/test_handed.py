"""What can be handed to `watch.torch`, in frameworks' wrappers and on meshes."""

from __future__ import annotations

import functools
import math
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import rankwatch
from rankwatch.torch_probe import TorchProbe, fingerprint
from rankwatch.torch_probe.topology import read_topology
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.recorders import Rank
from tests.support.ranks.sink import FakeSink, a_step

pytestmark = pytest.mark.torch


class Wrapper(torch.optim.Optimizer):
    """As Accelerate makes it: an Optimizer by its class, without anything that an Optimizer's constructor sets up."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)


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
    with a_step(probe):
        for optimizer, model in steps.items():
            optimizer.zero_grad()
            loss_of(model, factor).backward()
            optimizer.step()


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


def test_parameters_of_several_models_are_distinguished(sink):
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
    with a_step(probe, optimizers[1]):
        loss_of(critic).backward()
        of_critic = norm_of(critic)
        optimizers[0].step()
        loss_of(nn.Sequential(generator, critic), 1e3).backward()
        of_generator = norm_of(generator)
    assert sink.values["grad_norm"] == pytest.approx(math.hypot(of_critic, of_generator), rel=1e-6)


def test_what_a_spoilt_update_leaves_to_the_next_one_is_no_fault_of_the_rank_that_computes_it(sink):
    generator, critic = nn.Linear(4, 4), net()
    optimizers = [sgd(generator), sgd(critic)]
    probe = TorchProbe(sink, {"generator": generator, "critic": critic}, optimizers)

    def step(spoil_own_gradient: bool) -> tuple[int, int | None]:
        with a_step(probe):
            critic.zero_grad()
            loss_of(critic, math.nan if spoil_own_gradient else 1.0).backward()
            if not spoil_own_gradient:  # the other rank's, as the reduction brings it
                critic.bias.grad.fill_(math.nan)
                probe._shares[1].now.norm = math.nan
            optimizers[1].step()
            loss_of(nn.Sequential(generator, critic)).backward()
            optimizers[0].step()
            sink.exact.clear()
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

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    with a_step(TorchProbe(sink, model, optimizer)):
        optimizer.step(closure)
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
    with a_step(TorchProbe(sink, model, optimizer)):
        loss_of(model).backward()
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
    with a_step(probe):
        pass
    assert capsys.readouterr().err == ""
    for _ in range(3):
        train(probe, {optimizer: model})
    line = (
        "watching Linear (2 parameters), SGD: gradient norm, local gradients; not watched: fingerprints (switched off)"
    )
    assert capsys.readouterr().err == f"rankwatch: {line}\n"
    assert sink.declared["watched"] == line


def test_a_model_that_is_handed_over_later_is_a_change_and_those_before_it_are_idle(tmp_path, capsys):
    rank = Rank(tmp_path, 0)
    for _ in range(3):
        model = net()
        optimizer = sgd(model)
        rank.watch.torch(model, optimizer, fingerprint_every=0)
        for _ in range(12):
            with rank.watch.step():
                optimizer.zero_grad()
                loss_of(model).backward()
                optimizer.step()
        assert rank.identity["optimizers"] == 1
    assert [one["what"] for one in rank.notes("declared")] == ["another model: Linear, SGD"] * 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("; 2 earlier ones are idle")


def test_the_line_says_where_hooks_were_never_reached(sink, capsys):
    TorchProbe(sink, net(), sgd(net()))
    probe = TorchProbe(sink, net(), sgd(net()))
    for step in range(12):
        with a_step(probe, number=step):
            loss_of(net()).backward()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; not watched: gradients (no backward has reached these parameters)")


# ---- under DistributedDataParallel -----------------------------------------------------------------------------------


def wrapped(how: str) -> tuple[nn.Module, nn.Module]:
    """What the loop calls, and what is handed over."""
    model = net()
    if how == "ddp around what was handed over":  # as Hugging Face's callbacks get it
        return DistributedDataParallel(model), model
    wrap, around = DistributedDataParallel, functools.partial(torch.compile, backend="eager")
    called = around(wrap(model)) if how == "compiled ddp" else wrap(around(model))
    return called, called


def started(rank: int, world_size: int, directory: str, **how) -> rankwatch.Watch:
    env = {"RANKWATCH_DIR": directory}
    return rankwatch.start(
        job="j", launch="l", rank=rank, world_size=world_size, agent=False, stack_signal=None, env=env, **how
    )


def on_rank(rank: int, how: str, directory: str) -> dict:
    watch = started(rank, 2, directory)
    called, handed = wrapped(how)
    optimizer = sgd(handed)
    watch.torch(handed, optimizer, fingerprint_every=1)
    probe, sink = watch._loop.probe, FakeSink()
    probe._sink = sink
    probe._declare()
    for step in range(2):
        with a_step(probe, optimizer, step):
            optimizer.zero_grad()
            called(torch.full((3, 4), 1.0 + rank)).square().sum().backward()
            reduced = norm_of(handed)
            nn.utils.clip_grad_norm_(handed.parameters(), 1e-3)
    return {**sink.values, **sink.exact, **sink.declared, "reduced": reduced, "errors": sink.dropped}


HOW = ("compiled ddp", "ddp of compiled", "ddp around what was handed over")


def in_each_way(rank: int, directory: str) -> list[dict]:
    return [on_rank(rank, how, f"{directory}/{how}") for how in HOW]


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_replicas_are_compared_and_norms_taken_before_clipping_however_ddp_is_wrapped(tmp_path):
    for how, first, second in zip(HOW, *on_ranks(2, in_each_way, str(tmp_path)), strict=True):
        assert first["fingerprint"] == second["fingerprint"], how
        assert first["replicated"] is second["replicated"] is True
        assert first["parameters"] == ["weight", "bias"]
        assert first["grad_norm"] == pytest.approx(first["reduced"], rel=1e-5)
        assert first["local_grad_norm"] != pytest.approx(second["local_grad_norm"], rel=0.1)
        assert first["watched"].endswith("fingerprints every 1 steps")
        assert first["errors"] == second["errors"] == {}
        assert "watched" not in second


def on_part_of_the_job(rank: int, directory: str) -> list[bool]:
    """Whether replicas are compared, where nothing is told of places, and where they are."""
    pairs = [torch.distributed.new_group([0, 1]), torch.distributed.new_group([2, 3])]
    compared = []
    for name, topology in (("untold", None), ("told", {"pp": rank // 2, "dp": rank % 2})):
        watch = started(rank, 4, f"{directory}/{name}", topology=topology)
        model = DistributedDataParallel(net(), process_group=pairs[rank // 2])
        watch.torch(model, sgd(model))
        compared.append(watch._loop.probe._model.replicated)
    return compared


@pytest.mark.integration
@pytest.mark.timeout(240)
def test_replicas_within_a_part_of_the_job_are_compared_only_where_places_are_reported(tmp_path):
    assert on_ranks(4, on_part_of_the_job, str(tmp_path)) == [[False, True]] * 4


class FakeMesh:
    """A part of a DeviceMesh: names, shape and this rank's place."""

    def __init__(self, shape: dict[str, int], place: tuple[int, ...], root: FakeMesh | None = None) -> None:
        self.mesh_dim_names = tuple(shape)
        self._sizes = tuple(shape.values())
        self._place = place
        self._root = root

    def get_coordinate(self) -> list[int]:
        return list(self._place)

    def size(self, dimension: int) -> int:
        return self._sizes[dimension]

    def _get_root_mesh(self) -> FakeMesh:
        return self._root or self


def on(mesh: FakeMesh) -> Any:
    return SimpleNamespace(device_mesh=mesh)


def test_the_mesh_that_a_parameters_own_was_sliced_from_has_all_axes():
    root = FakeMesh({"pp": 2, "dp_replicate": 2, "dp_shard": 4, "tp": 8}, (1, 1, 3, 5))
    assert read_topology([on(FakeMesh({"tp": 8}, (5,), root))]) == {"pp": 1, "dp": 7, "tp": 5}


def test_experts_have_their_own_mesh_beside_that_of_dense_layers():
    dense, experts = FakeMesh({"dp": 4}, (3,)), FakeMesh({"efsdp": 2, "ep": 2}, (1, 1))
    assert read_topology([on(dense), on(experts)]) == {"dp": 3, "ep": 1}


def test_nothing_is_read_from_a_mesh_without_names_and_from_plain_parameters():
    mesh = FakeMesh({}, (2,))
    mesh.mesh_dim_names = None
    assert read_topology([on(mesh), torch.zeros(1)]) == {}


def test_megatron_is_asked_if_its_groups_exist(monkeypatch):
    state = ModuleType("megatron.core.parallel_state")
    ranks = {"data": 3, "tensor_model": 1, "pipeline_model": 2, "context": 0, "expert_model": 1}
    for name, rank in ranks.items():
        setattr(state, f"get_{name}_parallel_rank", lambda rank=rank: rank)
    state.model_parallel_is_initialized = lambda: False
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert read_topology([]) == {}
    state.model_parallel_is_initialized = lambda: True
    assert read_topology([]) == {"dp": 3, "tp": 1, "pp": 2, "cp": 0, "ep": 1}


def test_of_deepspeed_only_what_exists_is_read(monkeypatch):
    def creates_a_group() -> int:
        raise AssertionError("this would be a collective")

    groups = ModuleType("deepspeed.utils.groups")
    groups._get_data_parallel_rank = creates_a_group
    groups.mpu, groups.mesh_device, groups._EXPERT_PARALLEL_GROUP = None, None, {}
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
    assert read_topology([]) == {}
    groups.mpu = SimpleNamespace(get_data_parallel_rank=lambda: 1, get_model_parallel_rank=lambda: 3)
    groups._EXPERT_PARALLEL_GROUP = {"ep_size_2": SimpleNamespace(rank=lambda: 1)}
    assert read_topology([]) == {"dp": 1, "tp": 3, "ep": 1}


def test_a_getter_that_fails_leaves_its_axis_out(monkeypatch):
    state = ModuleType("megatron.core.parallel_state")
    state.model_parallel_is_initialized = lambda: True
    state.get_tensor_model_parallel_rank = lambda: 1

    def fails() -> int:
        raise AssertionError("data parallel group is not initialized")

    state.get_data_parallel_rank = fails
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert read_topology([]) == {"tp": 1}
