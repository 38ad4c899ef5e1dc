"""Real ranks on simulated accelerators: their measurements name a slow device or a late host, and make nobody wait.

Ranks are processes of one gloo group, with torch's own DDP and FSDP; only their devices' work is simulated.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from rankwatch.torch_probe.device import SPANS_MAX
from tests.support.accelerator.torch_work import gather_on, reduce_on
from tests.support.detection.verdicts import findings
from tests.support.ranks.accelerated import (
    LAYER_S,
    NOTHING,
    TRANSFER_S,
    WIDTH,
    Checkpointed,
    Machine,
    Part,
    counted_reads,
    layers,
    loss_of,
    train,
)
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.sink import Watched
from tests.support.values.presences import topology

WORLD_SIZE = 4
STEPS = 95
AT = 60
"""The step from which one rank differs."""
Build = Callable[[Machine], nn.Module]


def replicated(machine: Machine, inner: nn.Module) -> nn.Module:
    model = DistributedDataParallel(inner)
    reduce_on(machine.device, model, TRANSFER_S)
    return model


def with_ddp(machine: Machine) -> nn.Module:
    return replicated(machine, layers(machine.device))


def with_fsdp2(machine: Machine, count: int = 3) -> nn.Module:
    model = layers(machine.device, count)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    gather_on(machine.device, model, model, TRANSFER_S)
    return model


def with_fsdp1(machine: Machine) -> nn.Module:
    model = layers(machine.device)
    wrapped = nn.Sequential(*(FullyShardedDataParallel(layer, device_id=torch.device("cpu")) for layer in model))
    return FullyShardedDataParallel(wrapped, device_id=torch.device("cpu"))


def with_checkpoints(machine: Machine) -> nn.Module:
    return replicated(machine, Checkpointed(layers(machine.device)))


def compiled(machine: Machine) -> nn.Module:
    inner = nn.Sequential(
        layers(machine.device), torch.compile(nn.Linear(WIDTH, WIDTH), backend="aot_eager"), layers(machine.device)
    )
    return replicated(machine, inner)


PARTS = {
    "nothing": NOTHING,
    "a device slower by a tenth": Part(2, AT, device=1.1),
    "launches that take longer than the work": Part(2, AT, launch=60.0),
    "a host that is busy before it gives work": Part(2, AT, host_s=0.01),
}
CAUSES = {name: "device" if part.device > 1 else "host" for name, part in PARTS.items() if part is not NOTHING}
Rows = list[dict[str, float]]


def measured(rank: int, world_size: int, build: Build) -> dict[str, Rows]:
    """The rows of one rank, for each part."""
    rows = {}
    for name, part in PARTS.items():
        torch.manual_seed(0)
        machine = Machine(rank, world_size, part)
        rows[name] = train(machine, build(machine), STEPS)
    return rows


@pytest.fixture(scope="module", params=[with_ddp, with_fsdp2])
def trained(request: pytest.FixtureRequest) -> list[dict[str, Rows]]:
    """What the ranks measured, by rank."""
    return on_ranks(WORLD_SIZE, measured, WORLD_SIZE, request.param)


@pytest.mark.parametrize("part", CAUSES)
def test_the_rank_that_keeps_the_others_waiting_is_named_with_the_cause(trained, part):
    (finding,) = findings([rank[part] for rank in trained], topology(WORLD_SIZE))
    assert (finding.ranks, finding.cause) == ((2,), CAUSES[part])
    assert AT < (finding.detected_step or 0) <= AT + 30


def test_equal_ranks_name_nobody(trained: list[dict[str, Rows]]) -> None:
    assert findings([rank["nothing"] for rank in trained], topology(WORLD_SIZE)) == []


def accumulate(passes: int) -> dict[str, Any]:
    """How gradients are added up over so many passes."""

    def before(model: DistributedDataParallel, number: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if number == passes - 1 else model.no_sync()

    return {"passes": passes, "before": before}


WAYS: dict[str, tuple[Build, dict[str, Any]]] = {
    "DDP": (with_ddp, {}),
    "FSDP1": (with_fsdp1, {}),
    "FSDP2": (with_fsdp2, {}),
    "gradients accumulated over 8 passes": (with_ddp, accumulate(8)),
    "checkpoints": (with_checkpoints, {}),
    "torch.compile": (compiled, {}),
    "the script never waits": (with_ddp, {"synchronizes": False}),
}


def waits(rank: int, world_size: int) -> dict[str, list[tuple[int, int, Rows, int]]]:
    """With a probe and without it: waits for the device, reads of tensors, rows, and errors of the probe."""
    answers: dict[str, list[tuple[int, int, Rows, int]]] = {}
    for way, (build, how) in WAYS.items():
        for watched in (True, False):
            torch.manual_seed(0)
            machine = Machine(rank, world_size)
            model = build(machine)
            reads: Counter[str] = Counter()
            rows = train(machine, model, 8, watched=watched, during=counted_reads(reads), **how)
            errors = machine.sink.dropped.get("probe_errors", 0)
            counted = machine.device.synchronizations.total(), reads.total()
            answers.setdefault(way, []).append((*counted, rows, errors))
    return answers


def waits_and_many_passes(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    return waits(rank, world_size), trained_in_many_passes(rank, world_size)


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return on_ranks(2, waits_and_many_passes, 2)


@pytest.mark.parametrize("way", WAYS)
def test_the_probe_makes_no_host_wait_for_its_device(two_ranks, way):
    watched, unwatched = two_ranks[1][0][way]
    assert watched[:2] == unwatched[:2]
    assert watched[3] == 0
    assert all("device_step_s" in row and row["device_busy_s"] > 0 for row in watched[2][2:6])


class Transformer(nn.Module):
    """As torchtitan shards one: each layer, then the root, which gathers the embedding and the head itself."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self.embedding, *inner, self.head = layers(machine.device, 5)
        self.layers = nn.ModuleDict({str(number): layer for number, layer in enumerate(inner)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        values = self.embedding(values)
        for layer in self.layers.values():
            values = layer(values)
        output: torch.Tensor = self.head(values)
        return output


def nested(rank: int) -> Rows:
    machine = Machine(rank, 1, noise=0.0)
    model = Transformer(machine)
    for layer in model.layers.values():
        fully_shard(layer)
    fully_shard(model)
    gather_on(machine.device, model, model.layers.values(), TRANSFER_S)
    return train(machine, model, 4)


def test_what_the_root_of_a_sharded_model_computes_itself_is_work_too() -> None:
    (rows,) = on_ranks(1, nested)
    work_s, waits_s = 5 * 3 * LAYER_S, 3 * 2 * TRANSFER_S  # a backward takes twice as long as a forward
    assert rows[2]["device_busy_s"] == pytest.approx(work_s, rel=0.05)
    assert rows[2]["device_wait_s"] == pytest.approx(waits_s, rel=0.5)


class Many(NamedTuple):
    """A step with more parts than are measured, and one with so few that all are."""

    build: Build
    passes: int
    few: int
    parts: int
    """Of the step with many. DDP: three in each pass (also the wait for buffers), the wait for gradients, and the
    optimizer. FSDP2: two in each pass of the 7 blocks whose input has a gradient."""
    how: dict[str, Any]


MANY = {
    "DDP": Many(with_ddp, 200, 30, 602, accumulate(200)),
    "FSDP2": Many(lambda machine: with_fsdp2(machine, 8), 40, 20, 560, {}),
}


def trained_in_many_passes(rank: int, world_size: int) -> dict[str, tuple[float, Rows, dict[str, int]]]:
    """By way: the own work of a pass where all are measured, the rows of steps with many, and what was dropped."""
    found = {}
    for way, many in MANY.items():
        few = Machine(rank, world_size)
        each_s = train(few, many.build(few), 3, **many.how | {"passes": many.few})[2]["device_busy_s"] / many.few
        machine = Machine(rank, world_size)
        rows = train(machine, many.build(machine), 3, **many.how | {"passes": many.passes})
        found[way] = each_s, rows, dict(machine.sink.dropped)
    return found


def test_of_a_step_with_many_parts_some_are_measured_for_all_from_the_second_one_on(two_ranks):
    for _, found in two_ranks:
        for way, (each_s, (first, *later), dropped) in found.items():
            many = MANY[way]
            assert "device_busy_s" not in first
            assert [row["device_busy_s"] for row in later] == pytest.approx([many.passes * each_s] * 2, rel=0.03)
            assert dropped["spans"] == many.parts - SPANS_MAX  # those of the first step


def test_in_a_capture_nothing_is_recorded_or_asked_and_a_replay_is_timed_as_a_step() -> None:
    """Training whose forward and backward are captured once and replayed, as with CUDA graphs."""
    machine = Machine(0, 1)
    watched = Watched(layers(machine.device), device=machine.device)
    graph: list[float] = []
    for step in range(7):
        with watched.step(step):
            machine.host_work()
            if step == 2:
                with machine.device.capture() as graph:
                    loss_of(watched.model(torch.ones(2, WIDTH))).backward()
            elif step > 2:
                machine.device.replay(graph)
            else:
                loss_of(watched.model(torch.ones(2, WIDTH))).backward()
        if step == 5:
            machine.device.synchronize()
    watched.probe.close()
    rows = [values for _, _, values, _ in watched.sink.late_values]
    assert watched.sink.dropped.get("probe_errors", 0) == 0
    assert "device.forward" in rows[0]
    assert "device.forward" not in rows[2]
    assert rows[4]["device_step_s"] == pytest.approx(rows[1]["device_step_s"], rel=0.2)
