"""The profiler of a trace beside the script's own: that one goes first, whichever starts first."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.autograd import profiler as torch_profiler
from torch.profiler import profile, schedule

from rankwatch.torch_probe import tracing
from rankwatch.torch_probe.tracing import StepProfiler

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


def recording() -> StepProfiler:
    ours = StepProfiler()
    ours.start()
    return ours


def test_what_ran_in_the_recorded_steps_is_summed_up():
    work()
    ours = recording()
    work()
    ours.stop()
    work()
    ours.start()
    work()
    ours.stop()
    work()
    summary = ours.summary()
    calls = {row["name"]: row["count"] for row in summary["top"]}
    assert (calls["aten::mm"], calls["aten::relu"], len(summary["step_times_s"])) == (2, 2, 2)
    assert summary["kinds"]["matmul"] > 0


def test_a_discarded_step_is_no_part_of_the_summary():
    ours = recording()
    work()
    ours.discard()
    ours.start()
    ours.stop()
    assert len(ours.summary()["step_times_s"]) == 1
    assert "aten::mm" not in {row["name"] for row in ours.summary()["top"]}


def test_more_spans_than_the_limit_are_not_summed_up(monkeypatch):
    monkeypatch.setattr(tracing, "SPANS_MAX", 8)
    ours = recording()
    work()
    ours.stop()
    ours.start()
    work()
    ours.stop()
    with pytest.raises(ValueError, match="more than 8 spans were recorded"):
        ours.summary()


def test_a_boundary_between_steps_may_lie_within_a_mark():
    """Torch crashes if a mark that one recording has seen begin ends in the next."""
    command = [sys.executable, "-m", "tests.support.ranks.marked_rank"]
    environment = os.environ | {"MALLOC_PERTURB_": "165"}
    folder = Path(__file__).parents[3]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (0, "10 steps\n"), done.stderr


def test_it_does_not_start_while_the_scripts_profiler_runs():
    with profile() as theirs:
        with pytest.raises(ValueError, match="a profiler of the script's own runs"):
            recording()
        work()
    assert any(event.name == "aten::mm" for event in theirs.events())


def test_it_does_not_start_while_the_scripts_profiler_warms_up():
    theirs = profile(schedule=schedule(wait=0, warmup=2, active=1))
    theirs.start()
    with pytest.raises(ValueError, match="warms up"):
        recording()
    theirs.stop()
    recording().discard()


@pytest.mark.parametrize("make", [profile, torch_profiler.profile])
def test_it_ends_before_the_scripts_profiler_starts_which_records_everything(make):
    ours = recording()
    with make() as theirs:
        work()
    assert ours.ended_by == "a profiler of the script's own started"
    events = theirs.events() if make is profile else theirs.function_events
    assert any(event.name == "aten::mm" for event in events)
    ours.discard()


def test_it_does_not_start_while_a_cuda_graph_is_captured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(ValueError, match="CUDA graph"):
        recording()


def test_discarding_twice_changes_nothing():
    ours = recording()
    ours.discard()
    ours.discard()
