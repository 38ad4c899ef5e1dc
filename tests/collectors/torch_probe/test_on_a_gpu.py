"""What only a real GPU shows: device times against a profiler's trace, no added wait, captures.

`pytest -m gpu` runs them. Without a GPU they are skipped.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.tracing import StepProfiler
from tests.support.detection.verdicts import findings
from tests.support.ranks.accelerated import Checkpointed
from tests.support.ranks.gloo import on_ranks
from tests.support.ranks.sink import FakeSink, Watched, a_step
from tests.support.values.presences import topology

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine"),
]
STEPS = 12
WIDTH = 2048
ROWS, MANY_ROWS = 256, 2048
"""With many rows the device is slower than its host in every form, and what a form does beside its layers is little."""
KERNELS_AND_CALLS = (ProfilerActivity.CPU, ProfilerActivity.CUDA)
SYNCHRONIZATIONS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
"""Calls of the CUDA runtime in which the host waits for the device."""


class Training:
    """A model that keeps a GPU busy for some milliseconds a step, and its probe."""

    def __init__(
        self, form: str = "plain", watched: bool = True, rows: int = ROWS, graphed: bool = False, **arguments: Any
    ) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8)]
        self.model: nn.Module = FORMS[form](nn.Sequential(*layers).cuda())
        self.inputs = torch.randn(rows, WIDTH, device="cuda")
        if graphed:
            self.model = torch.cuda.make_graphed_callables(self.model, (self.inputs,))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler("cuda") if form == "GradScaler" else None
        self.passes = 4 if form == "gradients accumulated over 4 passes" else 1
        self.precision = torch.float16 if self.scaler else torch.bfloat16 if form == "bf16" else None
        self.sink = FakeSink()
        arguments.setdefault("fingerprint_every", 0)
        self.probe = TorchProbe(self.sink, self.model, self.optimizer, **arguments) if watched else None
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            if self.probe:
                self.probe.step_begin(self.step, 0)
            self.optimizer.zero_grad()
            for number in range(self.passes):
                self._pass(number == self.passes - 1)
            if self.scaler:
                self.scaler.step(self.optimizer)
                self.scaler.update()
            else:
                self.optimizer.step()
            if self.probe:
                self.probe.step_end(self.step, 0)
            self.step += 1

    def _pass(self, is_last: bool) -> None:
        accumulates = isinstance(self.model, DistributedDataParallel) and not is_last
        with self.model.no_sync() if accumulates else contextlib.nullcontext():
            with torch.autocast("cuda", self.precision, enabled=self.precision is not None):
                loss = self.model(self.inputs).square().mean()
            (self.scaler.scale(loss) if self.scaler else loss).backward()

    def close(self) -> None:
        if self.probe:
            self.probe.close()

    def times(self, name: str) -> list[float]:
        torch.cuda.synchronize()
        self.train(1)
        return [values[name] for _, _, values, _ in self.sink.late_values if name in values]


def sharded(layers: nn.Sequential) -> nn.Module:
    for layer in layers:
        fully_shard(layer)
    return fully_shard(layers)


FORMS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "plain": lambda layers: layers,
    "bf16": lambda layers: layers,
    "GradScaler": lambda layers: layers,
    "DDP": DistributedDataParallel,
    "gradients accumulated over 4 passes": DistributedDataParallel,
    "checkpoints": Checkpointed,
    "FSDP2": sharded,
    "torch.compile": torch.compile,
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of NCCL, of this process alone."""
    store: Path = tmp_path_factory.mktemp("meeting") / "store"
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def trainings() -> Iterator[Callable[..., Training]]:
    """Makes trainings, and gives their memory back at the end."""
    made = []

    def make(*args: Any, **arguments: Any) -> Training:
        made.append(Training(*args, **arguments))
        return made[-1]

    yield make
    for training in made:
        training.close()
        vars(training).clear()
    gc.collect()
    torch.cuda.empty_cache()


def busy_s(trace: profile) -> float:
    """Seconds in which kernels other than those of collectives ran."""
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in trace.events()
        if event.device_type.name == "CUDA" and not event.is_user_annotation and "nccl" not in event.name.lower()
    )
    covered_us, until_us = 0.0, 0.0
    for begin_us, end_us in spans:
        covered_us += max(end_us - max(begin_us, until_us), 0.0)
        until_us = max(until_us, end_us)
    return covered_us / 1e6


@pytest.mark.parametrize("form", FORMS)
def test_own_work_is_what_a_profiler_sees_of_kernels(trainings, form):
    rows = MANY_ROWS * (4 if form in ("bf16", "GradScaler") else 1)
    training = trainings(form, rows=rows, grad_norm=False, local_gradients=False)
    training.train(2 * STEPS)
    measured = training.times("device_busy_s")[-STEPS:]
    with profile(activities=KERNELS_AND_CALLS) as trace:
        training.train(STEPS)
        torch.cuda.synchronize()
    assert statistics.median(measured) == pytest.approx(busy_s(trace) / STEPS, rel=0.05)


@pytest.mark.parametrize("form", FORMS)
def test_the_probe_waits_for_nothing(trainings, form):
    synchronizations = []
    for watched in (False, True):
        training = trainings(form, watched, fingerprint_every=1)
        training.train(STEPS)
        torch.cuda.synchronize()
        with profile(activities=KERNELS_AND_CALLS) as trace:
            training.train(STEPS)
        synchronizations.append(Counter(event.name for event in trace.events() if event.name in SYNCHRONIZATIONS))
        assert training.sink.dropped.get("probe_errors", 0) == 0
    assert synchronizations[1] == synchronizations[0]


def test_no_operation_of_the_probe_is_one_that_torch_knows_to_wait(trainings):
    training = trainings()
    training.train(STEPS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.train(STEPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.sink.dropped.get("probe_errors", 0) == 0


def test_a_host_that_gives_work_too_late_leaves_the_speed_of_its_device_unknown(trainings):
    training = trainings()
    training.inputs = training.inputs[:1]
    many = nn.Sequential(*(nn.Linear(64, 64) for _ in range(200))).cuda()
    training.model.append(nn.Sequential(nn.Linear(WIDTH, 64), many)).cuda()
    training.train(STEPS)
    step_s = training.times("device_step_s")
    assert statistics.median(step_s) > 0
    assert len(training.times("device_busy_s")) < STEPS / 2


def test_a_captured_forward_and_backward_are_left_alone(trainings):
    training = trainings(graphed=True)
    training.train(STEPS)
    assert training.sink.dropped.get("probe_errors", 0) == 0
    assert all(seconds > 0 for seconds in training.times("device_step_s"))


def test_a_step_captured_as_a_whole_is_left_alone(trainings):
    training = trainings(watched=False)
    training.optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4, capturable=True)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        training.train(3)
    torch.cuda.current_stream().wait_stream(side)
    probe = TorchProbe(training.sink, training.model, training.optimizer, fingerprint_every=0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.train(1)
    for step in range(STEPS):
        probe.step_begin(step, 0)
        graph.replay()
        probe.step_end(step, 0)
        torch.cuda.synchronize()
    probe.close()
    assert training.sink.dropped.get("probe_errors", 0) == 0
    read = [values["device_step_s"] for _, _, values, _ in training.sink.late_values if "device_step_s" in values]
    assert len(read) >= STEPS // 2
    assert all(seconds > 0 for seconds in read)


def test_a_users_profiler_of_kernels_goes_first_and_a_trace_says_why_it_does_not_start(trainings):
    training = trainings()
    training.train(2)
    with profile(activities=KERNELS_AND_CALLS) as users:
        with pytest.raises(ValueError, match="a profiler of the script's own runs"):
            StepProfiler().start()
        training.train(2)
        torch.cuda.synchronize()
    assert any(event.device_type.name == "CUDA" for event in users.events())


def test_a_trace_ends_where_a_users_profiler_starts_which_sees_its_kernels(trainings):
    training = trainings()
    training.train(2)
    ours = StepProfiler()
    ours.start()
    training.train(1)
    with profile(activities=KERNELS_AND_CALLS) as users:
        training.train(2)
        torch.cuda.synchronize()
    assert ours.ended_by
    assert any(event.device_type.name == "CUDA" for event in users.events())


def test_the_device_is_reported_as_its_driver_names_it(trainings):
    pynvml = pytest.importorskip("pynvml")
    training = trainings()
    pynvml.nvmlInit()
    known = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]
    assert training.sink.declared["device_uuid"] in known


# ---- four ranks of one gloo group that share a GPU, of which one has a slow device ----------------------------------
# Their work is a kernel that spins until a time has passed, also while the device works for another process. A late
# host cannot be told here: it changes when the ranks meet on the device, and so what each of them takes.

WORLD_SIZE = 4
STEPS_TOGETHER = 100
AT = 60
"""The step from which rank 2 differs."""
CYCLES = 20_000_000
"""Of the device's clock: about 11 ms, several times as long as a device works for one process before another."""
SLOWNESS = 1.5
Rows = list[dict[str, float]]


class _Spin(torch.autograd.Function):
    """Keeps the device busy in the forward, and as long in the backward."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, cycles: int) -> Tensor:
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return values.clone()

    @staticmethod
    def backward(ctx: FunctionCtx | Any, *gradients: Tensor) -> tuple[Tensor, None]:
        torch.cuda._sleep(ctx.cycles)
        return gradients[0], None


class Spinning(nn.Module):
    """Layers whose work takes the device so many cycles in each pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.cycles = CYCLES

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = _Spin.apply(layer(values), self.cycles)
        return values


def measured(rank: int) -> tuple[Rows, dict[str, int]]:
    """The rows of one rank, and what its probe dropped."""
    torch.cuda.set_device(0)
    torch.manual_seed(0)
    spinning = Spinning().cuda()
    watched = Watched(DistributedDataParallel(spinning, device_ids=[0]), fingerprint_every=0)
    inputs = torch.ones(2, 64, device="cuda")
    for step in range(STEPS_TOGETHER + 1):
        spinning.cycles = round(CYCLES * SLOWNESS) if rank == 2 and step >= AT else CYCLES
        with a_step(watched.probe, number=step):
            watched.optimizer.zero_grad()
            loss = watched.model(inputs).square().mean()
            loss.backward()
            watched.optimizer.step()
            loss.item()
    watched.probe.close()
    found: dict[int, dict[str, float]] = {}
    for step, _, values, _ in watched.sink.late_values:
        found.setdefault(step, {}).update(values)
    return [found.get(step, {}) for step in range(STEPS_TOGETHER)], watched.sink.dropped


def test_the_rank_whose_device_keeps_the_others_waiting_is_named() -> None:
    ranks = on_ranks(WORLD_SIZE, measured)
    assert [dropped for _, dropped in ranks] == [{}] * WORLD_SIZE
    (finding,) = findings([rows for rows, _ in ranks], topology(WORLD_SIZE))
    assert (finding.ranks, finding.cause) == ((2,), "device")
    assert AT < (finding.detected_step or 0) <= AT + 30
