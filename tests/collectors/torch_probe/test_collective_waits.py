"""What is marked of a script's communication: only the training's own, on its own stream, and never twice."""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from rankwatch.torch_probe.device import DeviceTimer, StepSpans
from rankwatch.torch_probe.device_times import CollectiveWaits
from tests.support.accelerator.simulated import SimulatedDevice, VirtualClock
from tests.support.ranks.sink import FakeSink

FUNCTIONS = ((dist.ProcessGroup, "allreduce"), (dist.Work, "wait"), (functional, "wait_tensor"))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Bench:
    def __init__(self) -> None:
        self.device = SimulatedDevice("SIM-0", VirtualClock())
        self.timer = DeviceTimer(self.device, FakeSink())
        self.part: str | None = "forward"
        self.errors: list[Exception] = []
        self.waits = CollectiveWaits(self.device, self.timer, lambda: self.part, self.errors.append)
        self.timer.step_begins()

    def marked(self) -> list[str]:
        spans: StepSpans = self.timer.take()
        return [span.name for span in spans.waits]


@pytest.fixture
def bench(group: None) -> Iterator[Bench]:
    made = Bench()
    yield made
    made.waits.remove()
    assert made.errors == []


def test_the_start_of_a_collective_and_its_wait_are_marked(bench: Bench) -> None:
    dist.all_reduce(torch.ones(2))
    assert bench.marked() == ["forward", "forward"]


def test_the_start_and_the_wait_of_one_that_overlaps_are_marked(bench: Bench) -> None:
    work = dist.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    bench.part = "backward"
    work.wait()
    assert bench.marked() == ["forward", "backward"]


def test_what_dtensor_waits_for_is_marked(bench: Bench) -> None:
    functional.wait_tensor(torch.ones(2))
    assert bench.marked() == ["forward"]


def test_another_thread_and_another_stream_are_not_the_training(bench: Bench) -> None:
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
    thread.start()
    thread.join()
    with bench.device.on_stream("side"):
        dist.all_reduce(torch.ones(2))
    assert bench.marked() == []
    assert not bench.timer.waits_seen


def test_parts_that_are_not_measured_are_left_out(bench: Bench) -> None:
    bench.part = None
    dist.all_reduce(torch.ones(2))
    assert bench.marked() == []


def test_a_failing_collective_raises_as_before_and_its_wait_ends(bench: Bench) -> None:
    with pytest.raises(TypeError):
        dist.group.WORLD.allreduce(object())  # type: ignore[union-attr]
    assert bench.marked() == ["forward"]


def test_a_signal_that_the_script_survives_leaves_later_waits_marked(bench: Bench) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    bench.waits._part = interrupted
    with pytest.raises(KeyboardInterrupt):
        functional.wait_tensor(torch.ones(2))
    bench.waits._part = lambda: bench.part
    functional.wait_tensor(torch.ones(2))
    assert bench.marked() == ["forward"]


def test_torch_has_its_own_functions_again_after_removal(group: None) -> None:
    before = [inspect.getattr_static(owner, name) for owner, name in FUNCTIONS]
    bench = Bench()
    assert all(
        inspect.getattr_static(owner, name) is not was for (owner, name), was in zip(FUNCTIONS, before, strict=True)
    )
    bench.waits.remove()
    assert [inspect.getattr_static(owner, name) for owner, name in FUNCTIONS] == before
    dist.all_reduce(torch.ones(2))
    assert bench.marked() == []


def test_one_that_others_have_replaced_since_stays_theirs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", functools.partial(ours))
    theirs = functional.wait_tensor
    bench.waits.remove()
    assert functional.wait_tensor is theirs
    theirs(torch.ones(2))
    assert bench.marked() == []


def test_nothing_is_marked_while_a_compiler_traces(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    functional.wait_tensor(torch.ones(2))
    assert bench.marked() == []
