"""An ordered trace on the rank's side: which steps are recorded, what is answered, and that training goes on."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwatch import layout
from rankwatch.layout import Directive
from rankwatch.loop import tracer
from tests.support.ranks.recorders import Rank


class FakeProfiler:
    """Implements `rankwatch.loop.tracer.RunningProfiler`."""

    def __init__(self, calls: list[str], summary: Callable[[], dict[str, Any]]) -> None:
        self.ended_by = ""
        self._calls = calls
        self._summary = summary
        calls.append("start")

    def stop(self) -> Callable[[], dict[str, Any]]:
        self._calls.append("stop")
        return self._summary

    def close(self) -> None:
        self._calls.append("close")


class TracedRank(Rank):
    """A rank whose traces are recorded by a fake."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.calls: list[str] = []
        self.summary: Callable[[], dict[str, Any]] = lambda: {"spans": 7}
        self.obstacle: Exception | None = None
        self.profiler: FakeProfiler | None = None
        self.watch._loop._tracer._start_profiler = self._start

    def _start(self) -> FakeProfiler:
        if self.obstacle is not None:
            raise self.obstacle
        self.profiler = FakeProfiler(self.calls, self.summary)
        return self.profiler

    def asked(self, request: str, steps: int = 2) -> None:
        """The agent writes the order into the slot."""
        self._put(Directive("", "l.0", "closed", trace=request, trace_steps=steps))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with self.watch.step():
                self.clock.advance(1)

    @property
    def told(self) -> dict[str, Any] | None:
        """The answer, once the thread that writes it has ended."""
        for thread in threading.enumerate():
            if thread.name == "rankwatch trace":
                thread.join()
        path = Path(layout.trace_path(str(self.recorder.path)))
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def kinds(self) -> list[int]:
        return [entry.kind for entry in self.entries if hasattr(entry, "busy_s")]


@pytest.fixture
def rank(tmp_path: Path) -> TracedRank:
    return TracedRank(tmp_path)


def test_the_next_whole_steps_are_recorded_and_summed_up(rank):
    rank.train(3)
    rank.asked("cmd_1")
    rank.train(4)
    assert rank.calls == ["start", "stop", "close"]
    assert rank.told == {"request": "cmd_1", "step": 3, "step_times_s": [1.0, 1.0], "spans": 7}


def test_recorded_steps_are_not_compared_with_others(rank):
    rank.train(1)
    rank.asked("cmd_1")
    rank.train(3)
    assert rank.kinds == [0, 1, 1, 0]


def test_an_order_that_comes_within_a_step_begins_with_the_next_one(rank):
    with rank.watch.step():
        rank.asked("cmd_1")
    rank.train(2)
    assert rank.told["step"] == 1


def test_a_request_is_answered_once_even_if_it_comes_again_after_another(rank):
    for request in ("cmd_1", "cmd_1", "cmd_2", "cmd_1"):
        rank.asked(request, 1)
        rank.train(2)
    assert rank.calls.count("start") == 2
    assert rank.told["request"] == "cmd_2"


def test_a_withdrawn_order_ends_the_recording_without_an_answer(rank):
    rank.asked("cmd_1", 5)
    rank.train(2)
    rank._put(Directive("", "l.0", "closed"))
    rank.train(2)
    assert (rank.calls, rank.told) == (["start", "close"], None)


def test_an_order_with_a_phase_names_the_trace_too(rank):
    rank._put(Directive("o", "l.0", "hold", "pause", 90, trace="cmd_1", trace_steps=1))
    rank.train(1)
    assert rank.told["request"] == "cmd_1"


@pytest.mark.parametrize(
    ("obstacle", "said"),
    [
        (ValueError("a profiler of the script's own runs"), "a profiler of the script's own runs"),
        (RuntimeError("CUPTI"), "RuntimeError: CUPTI"),
    ],
)
def test_a_profiler_that_cannot_start_is_the_answer_and_training_goes_on(rank, obstacle, said):
    rank.obstacle = obstacle
    rank.asked("cmd_1")
    rank.train(3)
    assert rank.told == {"request": "cmd_1", "error": said}
    assert (len(rank.kinds), rank.watch.errors) == (3, 0)


def test_a_summary_that_fails_is_the_answer(rank):
    def fails() -> dict[str, Any]:
        raise KeyError("name")

    rank.summary = fails
    rank.asked("cmd_1", 1)
    rank.train(1)
    assert rank.told["error"] == "KeyError: 'name'"


def test_a_profiler_that_gave_way_is_the_answer(rank):
    rank.asked("cmd_1", 3)
    rank.train(1)
    rank.profiler.ended_by = "a profiler of the script's own started"
    rank.train(2)
    assert rank.told == {"request": "cmd_1", "error": "a profiler of the script's own started"}


def test_a_loop_that_is_left_ends_the_recording(rank):
    rank.asked("cmd_1", 3)
    for _ in rank.watch.steps(2):
        pass
    assert rank.told["error"] == "the loop ended after 2 of 3 steps"
    assert rank.calls[-1] == "close"


def test_a_summary_that_is_too_long_is_not_written(rank):
    rank.summary = lambda: {"top": ["x" * 1_000] * 100}
    rank.asked("cmd_1", 1)
    rank.train(1)
    assert rank.told["error"].startswith("the summary has 10")


def test_more_steps_than_the_limit_are_not_recorded(rank):
    rank.asked("cmd_1", 1_000)
    rank.train(tracer.STEPS_MAX + 2)
    assert len(rank.told["step_times_s"]) == tracer.STEPS_MAX


def test_a_process_without_torch_says_so(rank, monkeypatch):
    monkeypatch.delitem(tracer.sys.modules, "torch", raising=False)
    rank.watch._loop._tracer._start_profiler = tracer._start_torch_profiler
    rank.asked("cmd_1")
    rank.train(1)
    assert rank.told["error"] == "this process has not loaded torch"
