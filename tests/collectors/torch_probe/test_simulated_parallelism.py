"""Real ranks with tensor or pipeline parallelism on simulated accelerators: who waits for whom within the passes.

Four processes of one gloo group train with torch's own DTensor, pipeline schedule, FSDP and DDP.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.support.accelerator.torch_work import DeviceWork, gather_on, pipeline_on, reduce_on, tensor_parallel_on
from tests.support.detection.verdicts import findings
from tests.support.ranks.accelerated import LAYER_S, TRANSFER_S, WIDTH, Machine, Part, counted_reads, layers, train
from tests.support.ranks.gloo import on_ranks
from tests.support.values.presences import topology

STEPS = 9
AT = 5
SLOW = Part(rank=2, step=AT, device=1.5)
MICRO_BATCHES = 4
JUDGED_AT = 60
"""The step from which a device is slower by a tenth, once the detectors know what is usual."""


class Built(NamedTuple):
    """A model as the loop calls it, what runs one step of it, and what makes its communication take device time."""

    model: nn.Module
    step: Callable[[], None] | None
    communicating: contextlib.AbstractContextManager[None]


def mesh(inner: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", inner))


class _Reduced(torch.autograd.Function):
    """Megatron's way: a sum over the tensor-parallel group on the stream of the training, in a forward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        summed = values.clone()
        dist.all_reduce(summed, group=group)
        return summed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Reducing(nn.Module):
    def __init__(self, inner: nn.Module, group: Any) -> None:
        super().__init__()
        self.inner = inner
        self._group = [group]

    def forward(self, values: Tensor) -> Tensor:
        summed: Tensor = _Reduced.apply(self.inner(values), self._group[0])  # type: ignore[no-untyped-call]
        return summed


def tensor_parallel_with_ddp(machine: Machine) -> Built:
    ranks = mesh("tp")
    tp, dp = ranks.get_group("tp"), ranks.get_group("dp")
    inner = nn.Sequential(*(Reducing(layer, tp) for layer in layers(machine.device)))
    model = DistributedDataParallel(inner, process_group=dp)
    reduce_on(machine.device, model, TRANSFER_S)
    return Built(model, None, tensor_parallel_on(machine.device, tp, TRANSFER_S))


def tensor_parallel_with_fsdp(machine: Machine) -> Built:
    ranks = mesh("tp")
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), DeviceWork(machine.device, LAYER_S), nn.Linear(WIDTH, WIDTH))
            for _ in range(3)
        )
    )
    for layer in model:
        parallelize_module(layer, ranks["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(layer, mesh=ranks["dp"])
    fully_shard(model, mesh=ranks["dp"])
    gather_on(machine.device, model, model, TRANSFER_S, ranks.get_group("dp"))
    return Built(model, None, tensor_parallel_on(machine.device, ranks.get_group("tp"), TRANSFER_S))


def pipeline_with_ddp(machine: Machine) -> Built:
    ranks = mesh("pp")
    stage = ranks["pp"].get_local_rank()
    model = DistributedDataParallel(layers(machine.device, 1), process_group=ranks.get_group("dp"))
    reduce_on(machine.device, model, TRANSFER_S)
    cpu = torch.device("cpu")
    pipeline = PipelineStage(model, stage, 2, cpu, group=ranks.get_group("pp"))
    schedule = Schedule1F1B(pipeline, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
    values = torch.ones(2 * MICRO_BATCHES, WIDTH)

    def step() -> None:
        schedule.step(values) if stage == 0 else schedule.step(target=values)

    return Built(model, step, pipeline_on(machine.device, TRANSFER_S))


WAYS: dict[str, Callable[[Machine], Built]] = {
    "DDP and Megatron's layers": tensor_parallel_with_ddp,
    "FSDP2 and DTensor": tensor_parallel_with_fsdp,
    "DDP and pipeline stages": pipeline_with_ddp,
}


class Trained(NamedTuple):
    rows: list[dict[str, float]]
    waited: tuple[tuple[int, int], tuple[int, int]]
    """Waits for the device and reads of tensors, with the probe and without it."""
    errors: int
    restored: bool
    """Torch's functions are its own again."""


def trained(rank: int, world_size: int) -> dict[str, Trained]:
    found = {}
    for way, build in WAYS.items():
        answers = []
        for watched in (True, False):
            torch.manual_seed(0)
            machine = Machine(rank, world_size, SLOW, noise=0.0)
            built = build(machine)
            reads: Counter[str] = Counter()
            before = dist.Work.wait
            with built.communicating:
                during = counted_reads(reads)
                rows = train(machine, built.model, STEPS, watched=watched, step=built.step, during=during)
            answers.append((rows, (machine.device.synchronizations.total(), reads.total()), machine.sink.dropped))
        (rows, watched_counts, dropped), (_, unwatched_counts, _) = answers
        found[way] = Trained(
            rows, (watched_counts, unwatched_counts), dropped.get("probe_errors", 0), dist.Work.wait is before
        )
    return found


def judged_rows(rank: int, world_size: int) -> list[dict[str, float]]:
    """Enough steps for the detectors, on slightly noisy devices."""
    machine = Machine(rank, world_size, Part(rank=2, step=JUDGED_AT, device=1.1))
    built = tensor_parallel_with_ddp(machine)
    with built.communicating:
        return train(machine, built.model, JUDGED_AT + 30)


def both(rank: int, world_size: int) -> tuple[dict[str, Trained], list[dict[str, float]]]:
    return trained(rank, world_size), judged_rows(rank, world_size)


@pytest.fixture(scope="module")
def answers() -> list[tuple[dict[str, Trained], list[dict[str, float]]]]:
    return on_ranks(4, both, 4)


@pytest.fixture
def ranks(answers) -> list[dict[str, Trained]]:
    return [ways for ways, _ in answers]


def test_the_rank_with_a_slow_device_is_named_although_its_tensor_parallel_peer_takes_as_long(answers):
    two_by_two = dataclasses.replace(topology(4), dp=np.array([0, 0, 1, 1]), tp=np.array([0, 1, 0, 1]))
    (finding,) = findings([rows for _, rows in answers], two_by_two)
    assert (finding.ranks, finding.cause) == ((2,), "device")
    assert JUDGED_AT < (finding.detected_step or 0) <= JUDGED_AT + 30


def means(ranks: list[dict[str, Trained]], way: str, name: str, steps: slice) -> list[float]:
    """Of each rank, over these steps."""
    measured = [[row[name] for row in rank[way].rows[steps]] for rank in ranks]
    return [sum(values) / len(values) for values in measured]


@pytest.mark.parametrize("way", WAYS)
def test_a_slow_device_works_longer_and_all_other_ranks_wait(ranks, way):
    usual, slow = slice(2, AT), slice(AT + 1, STEPS - 1)
    for rank in range(4):
        work, wait, step = (
            [means(ranks, way, name, steps)[rank] for steps in (usual, slow)]
            for name in ("device_busy_s", "device_wait_s", "device_step_s")
        )
        assert work[1] / work[0] == pytest.approx(1.5 if rank == 2 else 1.0, rel=0.02)
        longer_s, waits_longer_s = step[1] - step[0], wait[1] - wait[0]
        assert longer_s > 0.2 * work[0]
        if rank == 2:  # a stage of a pipeline may wait less, as the others have caught up with it
            assert waits_longer_s < 0.1 * longer_s
        else:
            assert waits_longer_s == pytest.approx(longer_s, rel=0.15)


@pytest.mark.parametrize("way", WAYS)
def test_the_marks_make_no_host_wait_and_are_taken_back(ranks, way):
    for rank in ranks:
        watched, unwatched = rank[way].waited
        assert watched == unwatched
        assert (rank[way].errors, rank[way].restored) == (0, True)


@pytest.mark.parametrize("way", WAYS)
def test_work_and_waits_make_up_the_step(ranks, way):
    for rank in ranks:
        for row in rank[way].rows[2:-1]:
            assert row["device_busy_s"] + row["device_wait_s"] == pytest.approx(row["device_step_s"], rel=0.2)
