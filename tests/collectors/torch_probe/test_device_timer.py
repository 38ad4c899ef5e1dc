"""What is measured of a step on its device, and how a device that is given its work late is told from a slow one."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.utils.checkpoint import checkpoint

from rankwatch.torch_probe.device import BLOCK, BLOCKS_MAX, PHASES_MAX, SPANS_MAX, WAITS_MAX, DeviceTimer, StepSpans
from rankwatch.torch_probe.device_times import BlockMarks, CollectiveWaits
from rankwatch.torch_probe.watched_model import FsdpBlock
from tests.support.accelerator.simulated import SimulatedDevice, VirtualClock
from tests.support.ranks.device import FakeDevice
from tests.support.ranks.sink import FakeSink, Watched, a_step

DEVICE_MS = 10.0
"""Work of a phase on the device."""


class Timed:
    """A timer on a device whose work is done when the test says so."""

    def __init__(self, sink: FakeSink) -> None:
        self.device = FakeDevice()
        self.timer = DeviceTimer(self.device, sink)
        self.timer.step_begins()

    def phase(self, name: str, host_s: float = 0.001, *, passed: bool = False) -> None:
        """A phase whose work takes the host `host_s` to give; `passed`: the device had done all before."""
        if passed:
            self.device.finish()
        with self.within(name):
            self.device.work_ms += DEVICE_MS
            self.device.host_now_s += host_s

    def phases(self, *names: str, **how: float) -> None:
        for name in names:
            self.phase(name, **how)

    @contextlib.contextmanager
    def within(self, name: str) -> Iterator[None]:
        begin = self.timer.phase_begins(name)
        yield
        if begin is not None:
            self.timer.phase_ends(name, begin)

    @contextlib.contextmanager
    def block(self, name: str, work_ms: float = 0.0) -> Iterator[None]:
        """A block of a sharded model within a phase."""
        block = self.timer.mark()
        assert block is not None
        self.device.work_ms += work_ms
        yield
        self.timer.block_ends(name, block)

    def wait(self, part: str, wait_ms: float) -> None:
        begin = self.timer.wait_begins(part)
        self.device.work_ms += wait_ms
        if begin is not None:
            self.timer.wait_ends(part, begin)

    def read(self, **known: float | bool) -> dict[str, float]:
        spans = self.timer.take(**known)
        end = self.device.now()
        self.device.finish()
        return spans.read(end)

    def steps_of(self, passes: int, *, host_s: float = 0.0) -> list[tuple[dict[str, float], int]]:
        """Three steps of so many micro-batches: what was read of each, and how many parts were measured.

        `host_s`: what a phase takes a host that then waits for its device; 0: one that does not wait.
        """
        found = []
        for _ in range(3):
            self.timer.step_begins()
            for _ in range(passes):
                for name in ("forward", "backward"):
                    self.phase(name, host_s or 0.001, passed=host_s > 0)
            self.phase("optimizer")
            spans = self.timer.take()
            end = self.device.now()
            self.device.finish()
            found.append((spans.read(end), len(spans.phases)))
            for moment in spans.moments:
                self.device.free(moment)
        return found


@pytest.fixture
def timed(sink: FakeSink) -> Timed:
    return Timed(sink)


def test_own_work_and_the_wait_for_others_are_apart(timed):
    timed.phases("forward", "backward", "collective", "optimizer")
    found = timed.read(knows_waits=True)
    each = found["device.forward"]
    assert found["device_busy_s"] == pytest.approx(3 * each)
    assert found["device_wait_s"] == pytest.approx(each)
    assert found["device_step_s"] > 4 * each


def test_a_wait_that_may_lie_elsewhere_is_not_reported(timed):
    timed.phases("forward", "backward")
    found = timed.read(knows_waits=False)
    assert "device_busy_s" in found
    assert "device_wait_s" not in found


def test_a_device_that_is_given_its_work_late_says_nothing_about_its_speed(timed):
    timed.phases("forward", "backward", "optimizer", host_s=0.0105, passed=True)
    found = timed.read(knows_waits=True)
    assert "device_busy_s" not in found
    assert {"device.forward", "device_step_s", "device_wait_s"} <= set(found)


@pytest.mark.parametrize(("later_s", "measured"), [(0.0115, False), (0.001, True)], ids=["the lag", "the lesser part"])
def test_it_is_known_without_a_moment_that_has_passed_once_the_lag_is_and_late_for_the_lesser_part_is_none(
    timed, later_s, measured
):
    timed.phase("forward", host_s=0.0105, passed=True)
    timed.phases("backward", "optimizer", host_s=later_s)
    assert ("device_busy_s" in timed.read()) is measured


@pytest.mark.parametrize("each", [1.0, 2.0])
def test_of_a_sharded_model_the_work_of_its_blocks_counts_and_the_rest_of_its_passes_is_waiting(timed, each):
    for name, work_ms in (("forward", 2), ("backward", 4)):
        with timed.within(name):
            with timed.block(name, work_ms):
                pass
            timed.device.work_ms += 20
    timed.phase("optimizer")
    found = timed.read(blocks_each=each, knows_waits=True)
    blocks_s = 0.008 * each
    assert found["device_busy_s"] == pytest.approx(blocks_s + found["device.optimizer"])
    passes_s = found["device.forward"] + found["device.backward"]
    assert found["device_wait_s"] == pytest.approx(max(passes_s - blocks_s, 0.0))


def test_waits_within_a_phase_are_no_work_and_those_outside_are_waits_too(timed):
    for name in ("forward", "backward"):
        with timed.within(name):
            timed.device.work_ms += 10
            timed.wait(name, 30)
        timed.wait("", 50)
    found = timed.read(knows_waits=True)
    waits_s = 2 * 0.031
    assert found["device_busy_s"] == pytest.approx(found["device.forward"] + found["device.backward"] - waits_s)
    assert found["device_wait_s"] == pytest.approx(waits_s + 2 * 0.051)


def test_a_step_whose_few_waits_were_all_left_out_tells_neither_work_nor_wait(timed):
    measured = []
    for waits in (2 * WAITS_MAX, 1, 1):
        timed.timer.step_begins()
        for name in ("forward", "backward"):
            with timed.within(name):
                for _ in range(waits):
                    timed.wait(name, 1)
        measured.append({"device_busy_s", "device_wait_s"} & timed.read(knows_waits=True).keys())
    assert [len(names) for names in measured] == [2, 0, 2]


def test_waits_within_a_measured_block_stand_for_those_of_all_blocks(timed):
    for name in ("forward", "backward"):
        with timed.within(name):
            with timed.block(name, 10):
                timed.wait(BLOCK, 5)
            timed.device.work_ms += 40
    found = timed.read(blocks_each=2.0, knows_waits=True)
    block_s, wait_s = 0.018, 0.006  # with a millisecond before each moment
    assert found["device_busy_s"] == pytest.approx(2.0 * 2 * (block_s - wait_s))
    passes_s = found["device.forward"] + found["device.backward"]
    assert found["device_wait_s"] == pytest.approx(passes_s - found["device_busy_s"])


def test_of_many_waits_some_are_measured_for_all_from_the_second_step_on(timed):
    for step in range(2):
        timed.timer.step_begins()
        with timed.within("forward"):
            for _ in range(4 * WAITS_MAX):
                timed.device.work_ms += 1
                timed.wait("forward", 2)
        timed.phase("backward")
        found = timed.read(knows_waits=True)
        if step:
            assert found["device_wait_s"] == pytest.approx(4 * WAITS_MAX * 0.003)


UNKNOWN = {"device.forward", "device.backward", "device_step_s"}


@pytest.mark.parametrize("measured", [(), ("forward",), ("forward", "forward", "backward")])
def test_where_blocks_were_not_measured_in_both_passes_own_work_is_unknown(timed, measured):
    for name in measured:
        with timed.block(name):
            pass
    timed.phases("forward", "backward")
    assert set(timed.read(blocks_each=1.0, knows_waits=True)) == UNKNOWN


def test_where_a_graph_is_replayed_and_only_the_optimizer_runs_hooks_own_work_is_unknown(timed):
    timed.phase("optimizer")
    assert set(timed.read(knows_waits=True)) == {"device.optimizer", "device_step_s"}


def test_nothing_is_recorded_or_asked_in_a_capture(timed):
    timed.device.capturing = True
    timed.timer.step_begins()
    assert timed.timer.mark() is None
    timed.device.capturing = False
    assert timed.read() == {}


def test_a_phase_that_a_capture_cuts_is_left_out(timed):
    with timed.within("forward"):
        timed.device.capturing = True
    timed.device.capturing = False
    assert set(timed.read()) == {"device_step_s"}


def test_of_a_step_with_more_parts_than_are_read_own_work_is_unknown_and_they_are_counted(timed, sink):
    for number in range(SPANS_MAX + 3):
        timed.phase("backward" if number % 2 else "forward")
    assert sink.dropped == {"spans": 3}
    assert set(timed.read(knows_waits=True)) == UNKNOWN


def test_of_a_step_with_many_parts_some_are_measured_and_stand_for_all(timed, sink):
    (first, parts), *later = timed.steps_of(300)
    assert ("device_busy_s" in first, parts) == (False, SPANS_MAX)
    dropped = sink.dropped["spans"]
    for found, parts in later:
        assert parts <= PHASES_MAX + 1
        assert found["device_busy_s"] == pytest.approx(601 * (DEVICE_MS + 1) / 1e3, rel=0.001)
    assert sink.dropped["spans"] == dropped


def test_a_step_of_which_all_parts_fit_is_measured_whole(timed):
    for found, parts in timed.steps_of(PHASES_MAX):
        assert parts == 2 * PHASES_MAX + 1
        assert found["device_busy_s"] == pytest.approx((2 * PHASES_MAX + 1) * (DEVICE_MS + 1) / 1e3)


def test_a_device_that_is_given_many_parts_late_is_still_told_from_a_slow_one(timed):
    for found, _ in timed.steps_of(PHASES_MAX + 1, host_s=0.012)[1:]:
        assert set(found) == {"device.forward", "device.backward", "device.optimizer", "device_step_s"}


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def watched(model: nn.Module, device: FakeDevice) -> Watched:
    return Watched(model, device=device)


def test_moments_are_recorded_again_step_after_step(watched, device):
    made = []
    for step in range(30):
        watched.probe.step_begin(step, 0)
        if step != 5:  # a step that an exception ends: what it recorded is not read
            watched.model(torch.ones(1, 4)).sum().backward()
            watched.optimizer.step()
            watched.probe.step_end(step, 0)
        device.finish()
        made.append(device.made)
    assert made[-1] == made[10]
    assert all(math.isfinite(value) for _, _, values, _ in watched.sink.late_values for value in values.values())


def test_what_a_checkpoint_computes_again_is_part_of_the_backward(watched):
    with watched.step():
        inputs = torch.ones(1, 4, requires_grad=True)
        checkpoint(watched.model, inputs, use_reentrant=False).sum().backward()
    assert watched.sink.log.count("+forward") == 1
    assert watched.sink.log.count("+backward") == 1


def test_a_teachers_forward_is_no_work_of_the_step(watched, device):
    with a_step(watched.probe), torch.no_grad():
        watched.model(torch.ones(1, 4))
    device.finish()
    with a_step(watched.probe, number=1):
        pass
    assert set(watched.sink.late_values[0][2]) == {"device_step_s"}


def test_a_hook_that_fails_leaves_no_phase_open(watched, device, monkeypatch):
    watched.probe.step_begin(0, 0)

    def fails() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(device, "now", fails)
    watched.model(torch.ones(1, 4)).sum().backward()
    assert watched.sink.open == []
    assert watched.sink.dropped["probe_errors"] > 0


def test_where_only_some_models_are_sharded_or_it_cannot_be_read_no_block_stands_for_the_work(timed, monkeypatch):
    sharded, plain, errors = nn.Linear(2, 2), nn.Linear(2, 2), []
    own = {sharded: [FsdpBlock(sharded, sharded, True)], plain: []}
    monkeypatch.setattr("rankwatch.torch_probe.device_times.blocks", own.__getitem__)
    assert BlockMarks([sharded], timed.timer, errors.append).each == 1.0
    some = BlockMarks([sharded, plain], timed.timer, errors.append)
    assert (some.each, some.handles) == (1.0, [])
    assert BlockMarks([plain], timed.timer, errors.append).each == 0.0
    assert errors == []
    unknown = BlockMarks([nn.Linear(2, 2)], timed.timer, errors.append)
    assert (unknown.each, unknown.handles, len(errors)) == (1.0, [], 1)


def test_many_blocks_are_measured_in_part(timed, monkeypatch):
    found = [FsdpBlock(module, module, True) for module in (nn.Linear(2, 2) for _ in range(80))]
    monkeypatch.setattr("rankwatch.torch_probe.device_times.blocks", lambda _module: found)
    marks = BlockMarks([nn.Linear(2, 2)], timed.timer, [].append)
    assert (marks.each, len(marks.handles)) == (10.0, 2 * BLOCKS_MAX)


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


def test_the_start_and_the_wait_of_a_collective_are_marked_also_of_one_that_overlaps(bench):
    dist.all_reduce(torch.ones(2))
    assert bench.marked() == ["forward", "forward"]
    bench.timer.step_begins()
    work = dist.all_reduce(torch.ones(2), async_op=True)
    bench.part = "backward"
    work.wait()
    assert bench.marked() == ["forward", "backward"]


def test_what_dtensor_waits_for_is_marked(bench):
    functional.wait_tensor(torch.ones(2))
    assert bench.marked() == ["forward"]


def test_another_thread_and_another_stream_are_not_the_training(bench):
    thread = threading.Thread(target=dist.all_reduce, args=(torch.ones(2),))
    thread.start()
    thread.join()
    with bench.device.on_stream("side"):
        dist.all_reduce(torch.ones(2))
    assert bench.marked() == []
    assert not bench.timer.waits_seen


def test_parts_that_are_not_measured_are_left_out(bench):
    bench.part = None
    dist.all_reduce(torch.ones(2))
    assert bench.marked() == []


def test_a_failing_collective_raises_as_before_and_its_wait_ends(bench):
    with pytest.raises(TypeError):
        dist.group.WORLD.allreduce(object())  # type: ignore[union-attr]
    assert bench.marked() == ["forward"]


def test_a_signal_that_the_script_survives_leaves_later_waits_marked(bench):
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


def test_one_that_others_have_replaced_since_stays_theirs(bench, monkeypatch):
    ours = functional.wait_tensor
    monkeypatch.setattr(functional, "wait_tensor", functools.partial(ours))
    theirs = functional.wait_tensor
    bench.waits.remove()
    assert functional.wait_tensor is theirs
    theirs(torch.ones(2))
    assert bench.marked() == []


def test_nothing_is_marked_while_a_compiler_traces(bench, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    functional.wait_tensor(torch.ones(2))
    assert bench.marked() == []
