"""Sharded models in real training on 4 gloo ranks: what each rank records, and what the service makes of it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from rankwatch.torch_probe import TorchProbe
from rankwatch_detectors.base import Kind
from rankwatch_service.job.topology_state import TopologyState
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.sink import FakeSink, Watched, introduced, reported_of

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(300)]

RANKS = 4
STEPS = 4
BAD_STEP, BAD_RANK = 2, 1
FLIP_STEP = 1
CLIP = 0.01


class Block(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.norm = nn.LayerNorm(4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(torch.tanh(self.up(x))))


class Experts(nn.Module):
    """Each rank computes with the experts that it holds."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(4, width, width) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        own = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return x + sum(torch.tanh(x @ expert) for expert in own)


def fsdp2(model: nn.Sequential, mesh: DeviceMesh | None = None) -> nn.Module:
    mesh = mesh or init_device_mesh("cpu", (RANKS,))
    for part in model:
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def hsdp(model: nn.Sequential) -> nn.Module:
    return fsdp2(model, init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard")))


def tp_dp(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": ColwiseParallel(output_layouts=Replicate()), "down": RowwiseParallel(input_layouts=Replicate())}
    for part in model[:2]:
        parallelize_module(part, mesh["tp"], plan)
        fully_shard(part, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def expert_parallel(model: nn.Sequential) -> nn.Module:
    """Experts over pairs of ranks and FSDP between the pairs; dense layers under FSDP over all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    model[1] = Experts()
    model[1].experts = nn.Parameter(distribute_tensor(model[1].experts.data, mesh["ep"], [Shard(0)]))
    fully_shard(model[1], mesh=mesh["dp"])
    return fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("fsdp",)))


def fsdp1(model: nn.Sequential, **how: Any) -> nn.Module:
    wrap = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=torch.device("cpu"), **how)


def fsdp1_original(model: nn.Sequential) -> nn.Module:
    return fsdp1(model, use_orig_params=True)


def fsdp1_hybrid(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2))
    return fsdp1(model, use_orig_params=True, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh)


WAYS = {"fsdp2": fsdp2, "hsdp": hsdp, "tp_dp": tp_dp, "fsdp1": fsdp1, "fsdp1_original": fsdp1_original}
WAYS |= {"fsdp1_hybrid": fsdp1_hybrid, "expert_parallel": expert_parallel}
REPLICATED = ("hsdp", "fsdp1_hybrid")
"""Ways in which each part of the model is on two ranks."""


def reference(model: nn.Module) -> float:
    """The norm as torch itself gives it, by collectives; clips the gradients."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(CLIP).item()
    whole = [parameter.grad.full_tensor() for parameter in model.parameters()]
    norm = torch.nn.utils.get_total_norm(whole).item()
    for parameter in model.parameters():
        parameter.grad.mul_(CLIP / norm)
    return norm


def flip(model: nn.Module, shown: str) -> None:
    """Flip one bit in a part of a parameter that another rank holds too."""
    for name, parameter in model.named_parameters():
        tensor = parameter.detach()
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if shown in name and own.numel():
            own.view(torch.int32).view(-1)[0] ^= 1 << 12
            return
    raise AssertionError(f"no rank's part of {shown}")


def train(rank: int, way: str, fault: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = WAYS[way](nn.Sequential(Block(), Block(), nn.Linear(12, 3)))
    watched = Watched(model, place=(False, 0, ""), fingerprint_every=1)
    sink = watched.sink
    data_rank = rank // 2 if way == "tp_dp" else rank
    steps, norms = [], []
    for step in range(STEPS):
        if fault == "flip" and (rank, step) == (BAD_RANK, FLIP_STEP):
            flip(model, "norm" if way == "tp_dp" else "")
        with watched.step(step):
            watched.optimizer.zero_grad()
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * step + data_rank))
            y = model(x)
            if fault == "nan" and (data_rank, step) == (BAD_RANK, BAD_STEP):
                # A gradient of the middle of the model: what is behind it gets one too, what is before it does not.
                y.register_hook(lambda gradient: gradient * math.nan)
            y.square().mean().backward()
            norms.append(reference(model))
        steps.append((dict(sink.values), dict(sink.exact)))
    restored = watched.probe.after_restore()
    watched.probe.close()
    return {
        "steps": steps,
        "norms": norms,
        "declared": sink.declared,
        "dropped": sink.dropped,
        "restored": restored,
        "refused": refused(model, watched.optimizer),
    }


def refused(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Why an update cannot be skipped by the rank's own norm."""
    try:
        TorchProbe(FakeSink(), model, optimizer, on_nonfinite="skip").close()
    except ValueError as error:
        return str(error)
    return ""


def everything(rank: int) -> dict[str, Any]:
    results: dict[str, Any] = {way: train(rank, way, "") for way in WAYS}
    results |= {f"{way} nan": train(rank, way, "nan") for way in WAYS}
    results |= {f"{way} flip": train(rank, way, "flip") for way in (*REPLICATED, "tp_dp")}
    return results | {"skipped": skipped(rank), "partial": partial(rank), "uneven": uneven(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return on_ranks(RANKS, everything)


def opened(findings: list[Any], kind: Kind) -> list[Any]:
    return [finding for finding in findings if finding.kind is kind]


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_the_whole_is_the_one_that_torch_computes_with_collectives(ranks, way):
    frames, findings = reported_of(ranks, way)
    for frame, expected in zip(frames, ranks[0][way]["norms"], strict=True):
        assert frame.values["grad_norm"] == pytest.approx([expected] * RANKS, rel=1e-5)
        assert not any(name.startswith("grad_norm.") for name in frame.values)
    assert findings == []
    assert [one[way]["dropped"] for one in ranks] == [{}] * RANKS


@pytest.mark.parametrize("way", WAYS)
def test_no_norm_is_measured_while_a_part_of_the_model_is_missing(ranks, way):
    step, absent = 1, [0, 2] if way in REPLICATED else [0, 1]
    frames, _ = reported_of(ranks, way, missing=[(rank, step) for rank in absent])
    seen = {frame.step: "grad_norm" in frame.values for frame in frames}
    assert seen == {0: True, 1: False, 2: True, 3: True}


@pytest.mark.parametrize("way", WAYS)
def test_a_nan_names_the_rank_whose_data_had_it_and_a_parameter(ranks, way):
    _, findings = reported_of(ranks, f"{way} nan")
    (finding,) = opened(findings, Kind.NONFINITE)[:1]
    assert finding.onset_step == BAD_STEP
    assert finding.ranks == ((2, 3) if way == "tp_dp" else (BAD_RANK,))
    assert finding.evidence["parameter"] in ("2.weight", "2.bias", "1.up.weight", "1.experts")


@pytest.mark.parametrize("way", [*REPLICATED, "tp_dp"])
def test_a_flipped_bit_is_found_among_the_ranks_that_hold_the_same_part(ranks, way):
    assert opened(reported_of(ranks, way)[1], Kind.CORRUPTION) == []
    _, findings = reported_of(ranks, f"{way} flip")
    (finding,) = opened(findings, Kind.CORRUPTION)
    assert finding.detected_step == FLIP_STEP
    assert finding.ranks == ((0, 1) if way == "tp_dp" else (1, 3))


def holders(ranks: list[dict[str, Any]], way: str) -> tuple[tuple[int, ...], ...]:
    """The ranks that the service compares after a rollback."""
    topology = TopologyState()
    topology.learn(introduced(rank, RANKS, one[way]["declared"]) for rank, one in enumerate(ranks))
    return topology.shared_slices


@pytest.mark.parametrize("way", [*REPLICATED, "tp_dp"])
def test_after_a_restore_the_ranks_that_hold_the_same_parts_answer_alike_and_only_they(ranks, way):
    expected = ((0, 1), (2, 3)) if way == "tp_dp" else ((0, 2), (1, 3))
    assert holders(ranks, way) == expected
    for group in expected:
        assert len({ranks[rank][way]["restored"] for rank in group}) == 1
    assert len({one[way]["restored"] for one in ranks} - {0}) == 2


@pytest.mark.parametrize("way", [*REPLICATED, "tp_dp"])
def test_a_restore_that_leaves_a_flipped_bit_is_seen_in_the_answers(ranks, way):
    spoiled = next(group for group in holders(ranks, way) if BAD_RANK in group)
    assert len({ranks[rank][f"{way} flip"]["restored"] for rank in spoiled}) == 2


@pytest.mark.parametrize("way", ["fsdp2", "fsdp1", "expert_parallel"])
def test_after_a_restore_nothing_is_compared_of_what_each_rank_holds_alone(ranks, way):
    assert holders(ranks, way) == ()
    assert [one[way]["restored"] for one in ranks] == [0] * RANKS


@pytest.mark.parametrize("way", WAYS)
def test_an_update_is_not_skipped_by_the_norm_of_a_part(ranks, way):
    assert ["ranks would not decide alike" in one[way]["refused"] for one in ranks] == [True] * RANKS


def skipped(rank: int) -> list[bool]:
    """Whether each update changed the parameters, by the norm of the whole, which is NaN in step 1 alone."""
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (RANKS,)))
    watched = Watched(model, on_nonfinite="skip", grad_norm=False)
    changed = []
    for step in range(3):
        before = model.weight.to_local().detach().clone()
        with watched.step(step):
            watched.optimizer.zero_grad()
            x = torch.ones(2, 4) * (math.nan if (rank, step) == (BAD_RANK, 1) else 1.0)
            model(x).square().sum().backward()
            watched.probe.log("grad_norm", torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor())
        changed.append(not torch.equal(before, model.weight.to_local()))
    return changed


def test_by_the_norm_that_the_script_logs_all_ranks_skip_alike(ranks):
    assert [one["skipped"] for one in ranks] == [[True, False, True]] * RANKS


def test_what_no_other_rank_holds_has_no_fingerprint(ranks):
    assert not any("fingerprint" in name for _, exact in ranks[0]["fsdp2"]["steps"] for name in exact)
    watched = ranks[0]["fsdp2"]["declared"]["watched"]
    assert "not watched: fingerprints (not comparable: no two ranks" in watched
    assert "gradient norm, local gradients" in watched


def test_the_place_of_a_rank_is_read_from_the_meshes(ranks):
    places = [{axis: one["tp_dp"]["declared"].get(axis) for axis in ("dp", "tp", "pp")} for one in ranks]
    assert places == [{"dp": dp, "tp": tp, "pp": None} for dp in range(2) for tp in range(2)]
    assert [one["hsdp"]["declared"]["dp"] for one in ranks] == [0, 1, 2, 3]


def partial(rank: int) -> dict[str, Any]:
    """A tensor-parallel weight whose gradient is left as sums of each rank."""
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    model = nn.Linear(4, 4, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))
    watched = Watched(model, torch.optim.SGD(model.parameters(), lr=0.0))
    sink = watched.sink
    with watched.step():
        model(DTensor.from_local(torch.randn(2, 4), mesh, [Shard(0)])).sum().backward()
        placements = model.weight.grad.placements
    return {"placements": str(placements), "values": sink.values, "watched": sink.declared.get("watched", "")}


def test_partial_gradients_are_not_measured_and_the_start_line_says_so(ranks):
    for rank, got in enumerate(one["partial"] for one in ranks):
        assert "Partial" in got["placements"]
        assert not any(name.startswith("grad_norm") for name in got["values"])
        assert ("gradients are Partial" in got["watched"]) == (rank == 0)


def uneven(rank: int) -> dict[str, Any]:
    """Fewer rows than ranks: some ranks hold nothing of the model."""
    model = fully_shard(nn.Linear(5, 2), mesh=init_device_mesh("cpu", (RANKS,)))
    watched = Watched(model)
    sink = watched.sink
    with watched.step():
        model(torch.ones(3, 5)).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor().item()
    return {"declared": sink.declared, "steps": [(dict(sink.values), dict(sink.exact))], "norm": norm}


def test_a_rank_that_holds_nothing_of_the_model_has_a_part_in_the_norm_of_the_whole(ranks):
    (frame,), _ = reported_of(ranks, "uneven")
    assert frame.values["grad_norm"][0] == pytest.approx(ranks[0]["uneven"]["norm"], rel=1e-5)
