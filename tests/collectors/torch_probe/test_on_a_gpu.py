"""What only a real GPU shows: device times against a profiler's trace, no added wait, captures.

`pytest -m gpu` runs them. Without a GPU they are skipped.
"""

from __future__ import annotations

import statistics

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.trace.profiler import StepProfiler
from tests.support.ranks.sink import FakeSink

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use on this machine"),
]
STEPS = 12
WIDTH = 2048


class Training:
    """A model that keeps a GPU busy for some milliseconds a step, and its probe."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(8)]
        self.model = nn.Sequential(*layers).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.sink = FakeSink()
        self.probe = TorchProbe(self.sink, self.model, self.optimizer, fingerprint_every=0)
        self.inputs = torch.randn(512, WIDTH, device="cuda")
        self.step = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.probe.step_begin(self.step, 0)
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()
            self.probe.step_end(self.step, 0)
            self.step += 1

    def times(self, name: str) -> list[float]:
        torch.cuda.synchronize()
        self.train(1)
        return [values[name] for _, _, values, _ in self.sink.late_values if name in values]


def test_own_work_is_what_a_profiler_sees_of_kernels() -> None:
    training = Training()
    training.train(STEPS)
    before = len(training.times("device_busy_s"))
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        training.train(STEPS)
        torch.cuda.synchronize()
    kernels_s = sum(event.device_time_total for event in trace.events() if event.device_type.name == "CUDA") / 1e6
    measured = training.times("device_busy_s")[before:]
    assert statistics.median(measured) == pytest.approx(kernels_s / STEPS, rel=0.05)


def test_the_probe_waits_for_nothing() -> None:
    training = Training()
    training.train(STEPS)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.train(STEPS)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert training.sink.dropped.get("probe_errors", 0) == 0


def test_a_captured_forward_and_backward_are_left_alone() -> None:
    training = Training()
    training.model = torch.cuda.make_graphed_callables(training.model, (training.inputs,))
    training.train(STEPS)
    assert training.sink.dropped.get("probe_errors", 0) == 0
    assert all(seconds > 0 for seconds in training.times("device_step_s"))


def test_a_users_profiler_of_kernels_goes_first_and_a_trace_says_why_it_does_not_start() -> None:
    training = Training()
    training.train(2)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as users:
        with pytest.raises(ValueError, match="a profiler of the script's own runs"):
            StepProfiler().start()
        training.train(2)
        torch.cuda.synchronize()
    assert any(event.device_type.name == "CUDA" for event in users.events())


def test_a_trace_ends_where_a_users_profiler_starts_which_sees_its_kernels() -> None:
    training = Training()
    training.train(2)
    ours = StepProfiler()
    ours.start()
    training.train(1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as users:
        training.train(2)
        torch.cuda.synchronize()
    assert ours.ended_by
    assert any(event.device_type.name == "CUDA" for event in users.events())


def test_the_device_is_told_as_its_driver_names_it() -> None:
    pynvml = pytest.importorskip("pynvml")
    training = Training()
    pynvml.nvmlInit()
    known = [
        pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(index))
        for index in range(pynvml.nvmlDeviceGetCount())
    ]
    assert training.sink.declared["device_uuid"] in known
