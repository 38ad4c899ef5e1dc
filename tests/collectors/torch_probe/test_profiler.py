"""The profiler of a trace beside the script's own: that one goes first, whichever starts first."""

from collections.abc import Iterator

import pytest
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import profile, schedule

from rankwatch.torch_probe.trace.profiler import StepProfiler

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    """Afterwards torch is as it was."""
    before = (torch_profiler._prepare_profiler, torch_profiler._enable_profiler)
    yield
    assert (torch_profiler._prepare_profiler, torch_profiler._enable_profiler) == before
    assert not torch.autograd._profiler_enabled()


def work() -> None:
    torch.relu(torch.randn(8, 8) @ torch.randn(8, 8))


def test_what_ran_between_start_and_stop_is_summed_up():
    work()
    ours = StepProfiler()
    work()
    work()
    summary = ours.stop()()
    calls = {row["name"]: row["count"] for row in summary["top"]}
    assert (calls["aten::mm"], calls["aten::relu"]) == (2, 2)
    assert summary["kinds"]["matmul"] > 0


def test_it_does_not_start_while_the_scripts_profiler_runs():
    with profile() as theirs:
        with pytest.raises(ValueError, match="a profiler of the script's own runs"):
            StepProfiler()
        work()
    assert any(event.name == "aten::mm" for event in theirs.events())


def test_it_does_not_start_while_the_scripts_profiler_warms_up():
    theirs = profile(schedule=schedule(wait=0, warmup=2, active=1))
    theirs.start()
    with pytest.raises(ValueError, match="warms up"):
        StepProfiler()
    theirs.stop()
    StepProfiler().close()


@pytest.mark.parametrize("make", [profile, torch_profiler.profile])
def test_it_ends_before_the_scripts_profiler_starts_which_records_everything(make):
    ours = StepProfiler()
    with make() as theirs:
        work()
    assert ours.ended_by == "a profiler of the script's own started"
    events = theirs.events() if make is profile else theirs.function_events
    assert any(event.name == "aten::mm" for event in events)
    ours.close()


def test_it_does_not_start_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph"):
        StepProfiler()


def test_closing_twice_changes_nothing():
    ours = StepProfiler()
    ours.close()
    ours.close()
