"""What is measured of a step on its device, and how a device that is given its work late is told from a slow one."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rankwatch.torch_probe import TorchProbe
from rankwatch.torch_probe.device import BLOCK, BLOCKS_MAX, PHASES_MAX, SPANS_MAX, WAITS_MAX, DeviceTimer
from rankwatch.torch_probe.device_times import BlockMarks
from rankwatch.torch_probe.watched_model import FsdpBlock
from tests.support.ranks.device import FakeDevice
from tests.support.ranks.sink import FakeSink

DEVICE_MS = 10.0
"""Work of a phase on the device."""
Read = tuple[dict[str, float], int]


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


@pytest.fixture
def timer(device: FakeDevice, sink: FakeSink) -> DeviceTimer:
    return DeviceTimer(device, sink)


def phase(timer: DeviceTimer, device: FakeDevice, name: str, host_s: float = 0.001, *, passed: bool = False) -> None:
    """A phase whose work takes the host `host_s` to give; `passed`: the device had done all before."""
    if passed:
        device.finish()
    begin = timer.phase_begins(name)
    device.work_ms += DEVICE_MS
    device.host_now_s += host_s
    if begin is not None:
        timer.phase_ends(name, begin)


def read(timer: DeviceTimer, device: FakeDevice, **known: float | bool) -> dict[str, float]:
    spans = timer.take(**known)
    end = device.now()
    device.finish()
    return spans.read(end)


def test_own_work_and_the_wait_for_others_are_apart(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    for name in ("forward", "backward", "collective", "optimizer"):
        phase(timer, device, name)
    found = read(timer, device, knows_waits=True)
    each = found["device.forward"]
    assert found["device_busy_s"] == pytest.approx(3 * each)
    assert found["device_wait_s"] == pytest.approx(each)
    assert found["device_step_s"] > 4 * each


def test_a_wait_that_may_lie_elsewhere_is_not_reported(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    phase(timer, device, "forward")
    phase(timer, device, "backward")
    found = read(timer, device, knows_waits=False)
    assert "device_busy_s" in found
    assert "device_wait_s" not in found


def test_a_device_that_never_waits_for_its_host_measures_its_work(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    for name in ("forward", "backward", "optimizer"):
        phase(timer, device, name, passed=name == "forward")
    assert read(timer, device)["device_busy_s"] > 0


def test_a_device_that_is_given_its_work_late_says_nothing_about_its_speed(timer, device):
    timer.step_begins()
    for name in ("forward", "backward", "optimizer"):
        phase(timer, device, name, host_s=0.0105, passed=True)
    found = read(timer, device, knows_waits=True)
    assert "device_busy_s" not in found
    assert {"device.forward", "device_step_s", "device_wait_s"} <= set(found)


def test_it_is_known_without_a_moment_that_has_passed_once_the_lag_is(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    phase(timer, device, "forward", host_s=0.0105, passed=True)
    for name in ("backward", "optimizer"):
        phase(timer, device, name, host_s=0.0115)
    assert "device_busy_s" not in read(timer, device)


def test_a_step_that_is_late_for_the_lesser_part_measures_its_work(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    phase(timer, device, "forward", host_s=0.0105, passed=True)
    phase(timer, device, "backward")
    phase(timer, device, "optimizer")
    assert "device_busy_s" in read(timer, device)


@pytest.mark.parametrize("each", [1.0, 2.0])
def test_of_a_sharded_model_the_work_of_its_blocks_counts_and_the_rest_of_its_passes_is_waiting(timer, device, each):
    timer.step_begins()
    begin = timer.mark()
    block = timer.mark()
    assert begin is not None
    assert block is not None
    device.work_ms += 2
    timer.block_ends("forward", block)
    device.work_ms += 20
    timer.phase_ends("forward", begin)
    begin = timer.mark()
    assert begin is not None
    block = timer.mark()
    assert block is not None
    device.work_ms += 4
    timer.block_ends("backward", block)
    device.work_ms += 20
    timer.phase_ends("backward", begin)
    phase(timer, device, "optimizer")
    found = read(timer, device, blocks_each=each, knows_waits=True)
    blocks_s = 0.008 * each
    assert found["device_busy_s"] == pytest.approx(blocks_s + found["device.optimizer"])
    passes_s = found["device.forward"] + found["device.backward"]
    assert found["device_wait_s"] == pytest.approx(max(passes_s - blocks_s, 0.0))


def waited(timer: DeviceTimer, device: FakeDevice, part: str, wait_ms: float) -> None:
    begin = timer.wait_begins(part)
    device.work_ms += wait_ms
    if begin is not None:
        timer.wait_ends(part, begin)


def test_waits_within_a_phase_are_no_work_and_those_outside_are_waits_too(timer, device):
    timer.step_begins()
    for name in ("forward", "backward"):
        begin = timer.phase_begins(name)
        assert begin is not None
        device.work_ms += 10
        waited(timer, device, name, 30)
        timer.phase_ends(name, begin)
        waited(timer, device, "", 50)
    found = read(timer, device, knows_waits=True)
    waits_s = 2 * 0.031
    assert found["device_busy_s"] == pytest.approx(found["device.forward"] + found["device.backward"] - waits_s)
    assert found["device_wait_s"] == pytest.approx(waits_s + 2 * 0.051)


def test_a_step_whose_few_waits_were_all_left_out_tells_neither_work_nor_wait(timer, device):
    measured = []
    for waits in (2 * WAITS_MAX, 1, 1):
        timer.step_begins()
        for name in ("forward", "backward"):
            begin = timer.phase_begins(name)
            assert begin is not None
            for _ in range(waits):
                waited(timer, device, name, 1)
            timer.phase_ends(name, begin)
        found = read(timer, device, knows_waits=True)
        measured.append({"device_busy_s", "device_wait_s"} & found.keys())
    assert [len(names) for names in measured] == [2, 0, 2]


def test_waits_within_a_measured_block_stand_for_those_of_all_blocks(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    for name in ("forward", "backward"):
        begin, block = timer.phase_begins(name), timer.mark()
        assert begin is not None
        assert block is not None
        device.work_ms += 10
        waited(timer, device, BLOCK, 5)
        timer.block_ends(name, block)
        device.work_ms += 40
        timer.phase_ends(name, begin)
    found = read(timer, device, blocks_each=2.0, knows_waits=True)
    block_s, wait_s = 0.018, 0.006  # with a millisecond before each moment
    assert found["device_busy_s"] == pytest.approx(2.0 * 2 * (block_s - wait_s))
    passes_s = found["device.forward"] + found["device.backward"]
    assert found["device_wait_s"] == pytest.approx(passes_s - found["device_busy_s"])


def test_of_many_waits_some_are_measured_for_all_from_the_second_step_on(timer, device):
    for step in range(2):
        timer.step_begins()
        begin = timer.phase_begins("forward")
        assert begin is not None
        for _ in range(4 * WAITS_MAX):
            device.work_ms += 1
            waited(timer, device, "forward", 2)
        timer.phase_ends("forward", begin)
        phase(timer, device, "backward")
        found = read(timer, device, knows_waits=True)
        if step:
            assert found["device_wait_s"] == pytest.approx(4 * WAITS_MAX * 0.003)


UNKNOWN = {"device.forward", "device.backward", "device_step_s"}


@pytest.mark.parametrize("measured", [(), ("forward",), ("forward", "forward", "backward")])
def test_where_blocks_were_not_measured_in_both_passes_own_work_is_unknown(timer, device, measured):
    timer.step_begins()
    for name in measured:
        block = timer.mark()
        assert block is not None
        timer.block_ends(name, block)
    phase(timer, device, "forward")
    phase(timer, device, "backward")
    assert set(read(timer, device, blocks_each=1.0, knows_waits=True)) == UNKNOWN


def test_where_a_graph_is_replayed_and_only_the_optimizer_runs_hooks_own_work_is_unknown(timer, device):
    timer.step_begins()
    phase(timer, device, "optimizer")
    assert set(read(timer, device, knows_waits=True)) == {"device.optimizer", "device_step_s"}


def test_nothing_is_recorded_or_asked_in_a_capture(timer: DeviceTimer, device: FakeDevice) -> None:
    device.capturing = True
    timer.step_begins()
    assert timer.mark() is None
    device.capturing = False
    assert read(timer, device) == {}


def test_a_phase_that_a_capture_cuts_is_left_out(timer: DeviceTimer, device: FakeDevice) -> None:
    timer.step_begins()
    begin = timer.mark()
    assert begin is not None
    device.capturing = True
    timer.phase_ends("forward", begin)
    device.capturing = False
    assert set(read(timer, device)) == {"device_step_s"}


def test_of_a_step_with_more_parts_than_are_read_own_work_is_unknown_and_they_are_counted(timer, device, sink):
    timer.step_begins()
    for number in range(SPANS_MAX + 3):
        phase(timer, device, "backward" if number % 2 else "forward")
    assert sink.dropped == {"spans": 3}
    assert set(read(timer, device, knows_waits=True)) == UNKNOWN


def steps_of(passes: int, timer: DeviceTimer, device: FakeDevice, *, host_s: float = 0.0) -> list[Read]:
    """Three steps of so many micro-batches: what was read of each, and how many parts were measured.

    `host_s`: what a phase takes a host that then waits for its device; 0: one that does not wait.
    """
    found = []
    for _ in range(3):
        timer.step_begins()
        for _ in range(passes):
            for name in ("forward", "backward"):
                phase(timer, device, name, host_s or 0.001, passed=host_s > 0)
        phase(timer, device, "optimizer")
        spans = timer.take()
        end = device.now()
        device.finish()
        found.append((spans.read(end), len(spans.phases)))
        for moment in spans.moments:
            device.free(moment)
    return found


def test_of_a_step_with_many_parts_some_are_measured_and_stand_for_all(timer, device, sink):
    (first, parts), *later = steps_of(300, timer, device)
    assert ("device_busy_s" in first, parts) == (False, SPANS_MAX)
    dropped = sink.dropped["spans"]
    for found, parts in later:
        assert parts <= PHASES_MAX + 1
        assert found["device_busy_s"] == pytest.approx(601 * (DEVICE_MS + 1) / 1e3, rel=0.001)
    assert sink.dropped["spans"] == dropped


def test_a_step_of_which_all_parts_fit_is_measured_whole(timer: DeviceTimer, device: FakeDevice) -> None:
    for found, parts in steps_of(PHASES_MAX, timer, device):
        assert parts == 2 * PHASES_MAX + 1
        assert found["device_busy_s"] == pytest.approx((2 * PHASES_MAX + 1) * (DEVICE_MS + 1) / 1e3)


def test_a_device_that_is_given_many_parts_late_is_still_told_from_a_slow_one(timer, device):
    for found, _ in steps_of(PHASES_MAX + 1, timer, device, host_s=0.012)[1:]:
        assert set(found) == {"device.forward", "device.backward", "device.optimizer", "device_step_s"}


def test_moments_are_recorded_again_step_after_step(device: FakeDevice, sink: FakeSink, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer, device=device)
    made = []
    for step in range(30):
        probe.step_begin(step, 0)
        if step != 5:  # a step that an exception ends: what it recorded is not read
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            probe.step_end(step, 0)
        device.finish()
        made.append(device.made)
    assert made[-1] == made[10]
    assert all(math.isfinite(value) for _, _, values, _ in sink.late_values for value in values.values())


def test_what_a_checkpoint_computes_again_is_part_of_the_backward(device: FakeDevice, sink: FakeSink) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer, device=device)
    probe.step_begin(0, 0)
    checkpoint(model, torch.ones(1, 4, requires_grad=True), use_reentrant=False).sum().backward()
    optimizer.step()
    probe.step_end(0, 0)
    device.finish()
    probe.step_begin(1, 0)
    probe.step_end(1, 0)
    assert sink.log.count("+forward") == 1
    assert sink.log.count("+backward") == 1


def test_a_teachers_forward_is_no_work_of_the_step(device: FakeDevice, sink: FakeSink, model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer, device=device)
    probe.step_begin(0, 0)
    with torch.no_grad():
        model(torch.ones(1, 4))
    probe.step_end(0, 0)
    device.finish()
    probe.step_begin(1, 0)
    probe.step_end(1, 0)
    assert set(sink.late_values[0][2]) == {"device_step_s"}


def test_a_hook_that_fails_leaves_no_phase_open(device, sink, model, monkeypatch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    probe = TorchProbe(sink, model, optimizer, device=device)
    probe.step_begin(0, 0)

    def fails() -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(device, "now", fails)
    model(torch.ones(1, 4)).sum().backward()
    assert sink.open == []
    assert sink.dropped["probe_errors"] > 0


def test_where_only_some_models_are_sharded_or_it_cannot_be_read_no_block_stands_for_the_work(timer, monkeypatch):
    sharded, plain, errors = nn.Linear(2, 2), nn.Linear(2, 2), []
    own = {sharded: [FsdpBlock(sharded, sharded, True)], plain: []}
    monkeypatch.setattr("rankwatch.torch_probe.device_times.blocks", own.__getitem__)
    assert BlockMarks([sharded], timer, errors.append).each == 1.0
    some = BlockMarks([sharded, plain], timer, errors.append)
    assert (some.each, some.handles) == (1.0, [])
    assert BlockMarks([plain], timer, errors.append).each == 0.0
    assert errors == []
    unknown = BlockMarks([nn.Linear(2, 2)], timer, errors.append)
    assert (unknown.each, unknown.handles, len(errors)) == (1.0, [], 1)


def test_many_blocks_are_measured_in_part(timer: DeviceTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [FsdpBlock(module, module, True) for module in (nn.Linear(2, 2) for _ in range(80))]
    monkeypatch.setattr("rankwatch.torch_probe.device_times.blocks", lambda _module: found)
    marks = BlockMarks([nn.Linear(2, 2)], timer, [].append)
    assert (marks.each, len(marks.handles)) == (10.0, 2 * BLOCKS_MAX)
