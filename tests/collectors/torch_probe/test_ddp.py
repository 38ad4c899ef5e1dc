"""The probe in real DistributedDataParallel training: its local values are local, its total norm is the reduced one."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rankwatch.torch_probe import TorchProbe, fingerprint
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.sink import FakeSink, Watched, a_step

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.timeout(240)]

RANKS = 2
STEPS = 3
WRAPPINGS = {
    "plain": {},
    "bucket views": {"gradient_as_bucket_view": True},
    "bucket views, gradients kept": {"gradient_as_bucket_view": True, "set_to_none": False},
    "static graph": {"static_graph": True},
    "static graph, bucket views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
}


class Model(nn.Module):
    def __init__(self, unused: bool):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        if unused:
            self.unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.body(x)


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(10 * step + rank)) * (1 + rank)


def norm(gradients) -> float:
    return torch.linalg.vector_norm(torch.cat([gradient.flatten() for gradient in gradients])).item()


def local_norm(model: Model, batches: list[torch.Tensor]) -> float:
    """What this rank's gradient is without DDP, from a copy that nobody watches."""
    twin = Model(unused=False)
    twin.load_state_dict({name: value for name, value in model.state_dict().items() if "unused" not in name})
    for batch in batches:
        twin(batch).square().mean().backward()
    return norm(p.grad for p in twin.parameters())


def record(sink: FakeSink, **expected: float) -> dict:
    return {**sink.values, **sink.exact, **{f"expected_{name}": value for name, value in expected.items()}}


def train(rank: int, wrapping: dict, faults: bool) -> list[dict]:
    model = Model("find_unused_parameters" in wrapping)
    wrapping = dict(wrapping)
    set_to_none = wrapping.pop("set_to_none", True)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, **wrapping)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01, momentum=0.9)
    watched = Watched(ddp, optimizer, fingerprint_every=1, on_nonfinite="skip")
    sink = watched.sink
    if faults:
        # Ahead of the accumulation: the gradient is bad on this rank alone until DDP has reduced it.
        model.body[0].weight.register_hook(lambda grad: grad * float("nan") if rank == 1 and sink.step == 1 else grad)
    records = []
    for step in range(STEPS):
        sink.step = step
        with watched.step(step):
            optimizer.zero_grad(set_to_none=set_to_none)
            local = local_norm(model, [data(rank, step)])
            ddp(data(rank, step)).square().mean().backward()
            reduced = norm(p.grad for p in model.parameters() if p.grad is not None)
            torch.nn.utils.clip_grad_norm_(ddp.parameters(), 0.1)
        records.append(record(sink, local=local, reduced=reduced, fingerprint=fingerprint(model.parameters())))
        records[-1]["after_restore"] = watched.probe.after_restore()
    assert sink.dropped == {}
    assert sink.collectives == STEPS
    assert sink.declared["replicated"] is True
    return records


def accumulate(rank: int, wrapping: dict) -> dict:
    model = Model(unused=False)
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5, **wrapping)
    watched = Watched(ddp)
    sink = watched.sink
    with watched.step():
        batches = [data(rank, step) for step in range(3)]
        local = local_norm(model, batches)
        with ddp.no_sync():
            for batch in batches[:2]:
                ddp(batch).square().mean().backward()
        ddp(batches[2]).square().mean().backward()
        reduced = norm(p.grad for p in model.parameters())
    return {**record(sink, local=local, reduced=reduced), "collectives": sink.collectives, "log": sink.log}


def by_hand(rank: int) -> dict:
    """Gradients averaged by the loop itself, without a wrapper."""
    model = Model(unused=False)
    watched = Watched(model, replicated=True)
    with watched.step():
        local = local_norm(model, [data(rank, 0)])
        model(data(rank, 0)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        reduced = norm(p.grad for p in model.parameters())
    return {**record(watched.sink, local=local, reduced=reduced), "after_restore": watched.probe.after_restore()}


def late_rank(rank: int) -> list[tuple[str, float]]:
    """How long each phase lasted when rank 1 is slow in its forward."""
    ddp = DistributedDataParallel(Model(unused=False))
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    sink = TimedSink()
    probe = TorchProbe(sink, ddp, optimizer)
    for step in range(2):
        dist.barrier()
        sink.seconds = {}
        with a_step(probe, optimizer, step):
            out = ddp(data(rank, step))
            time.sleep(0.3 * rank)
            out.square().mean().backward()
    return sink.seconds


class TimedSink(FakeSink):
    @contextlib.contextmanager
    def phase(self, name: str):
        begin_s = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - begin_s


def everything(rank: int) -> dict:
    results = {name: train(rank, wrapping, faults=False) for name, wrapping in WRAPPINGS.items()}
    results |= {f"{name}, faulty": train(rank, wrapping, faults=True) for name, wrapping in WRAPPINGS.items()}
    results |= {f"{name}, no_sync": accumulate(rank, WRAPPINGS[name]) for name in ("plain", "bucket views")}
    return {**results, "by hand": by_hand(rank), "late rank": late_rank(rank)}


@pytest.fixture(scope="module")
def ranks() -> list[dict]:
    return on_ranks(RANKS, everything)


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_the_local_norm_is_the_rank_s_own_and_the_total_norm_is_the_reduced_one(ranks, wrapping):
    for step in range(STEPS):
        first, second = (results[wrapping][step] for results in ranks)
        assert first["local_grad_norm"] != pytest.approx(second["local_grad_norm"], rel=0.01)
        for got in (first, second):
            assert got["local_grad_norm"] == pytest.approx(got["expected_local"], rel=1e-5)
            assert got["grad_norm"] == pytest.approx(got["expected_reduced"], rel=1e-5)
            assert got["nonfinite"] == 0


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_replicas_have_equal_fingerprints_at_every_step(ranks, wrapping):
    for step in range(STEPS):
        fingerprints = {results[wrapping][step]["fingerprint"] for results in ranks}
        assert fingerprints == {ranks[0][wrapping][step]["expected_fingerprint"]}
        assert {results[wrapping][step]["after_restore"] for results in ranks} == fingerprints


@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_a_nan_of_one_rank_is_reported_by_that_rank_only_and_all_ranks_skip_the_step_alike(ranks, wrapping):
    before, bad, after = zip(*[results[f"{wrapping}, faulty"] for results in ranks], strict=True)
    assert [got["nonfinite"] for got in before] == [0, 0]
    assert [got["nonfinite"] for got in bad] == [0, 1]
    assert [got.get("nonfinite_first") for got in bad] == [None, 0]
    assert [got["optimizer_skipped"] for got in bad] == [1.0, 1.0]
    assert {got["fingerprint"] for got in bad} == {got["fingerprint"] for got in before}
    assert len({got["fingerprint"] for got in after}) == 1
    assert {got["fingerprint"] for got in after} != {got["fingerprint"] for got in bad}
    assert [got["nonfinite"] for got in after] == [0, 0]


@pytest.mark.parametrize("wrapping", ["plain", "bucket views"])
def test_accumulated_gradients_are_local_until_the_backward_that_reduces(ranks, wrapping):
    for results in ranks:
        got = results[f"{wrapping}, no_sync"]
        assert got["local_grad_norm"] == pytest.approx(got["expected_local"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(got["expected_reduced"], rel=1e-5)
        assert got["collectives"] == 1
        assert got["log"].count("+collective") == got["log"].count("-collective") == 1


def test_gradients_reduced_by_the_loop_itself_are_read_before_the_update(ranks):
    for results in ranks:
        got = results["by hand"]
        assert got["fingerprint"] == got["after_restore"] == ranks[0]["by hand"]["fingerprint"] != 0
        assert got["local_grad_norm"] == pytest.approx(got["expected_local"], rel=1e-5)
        assert got["grad_norm"] == pytest.approx(got["expected_reduced"], rel=1e-5)


def test_the_wait_for_a_late_rank_is_collective_time_of_the_others(ranks):
    punctual, late = (results["late rank"] for results in ranks)
    assert punctual["collective"] > 0.2
    assert late["collective"] < 0.2
    assert punctual["backward"] < 0.2
