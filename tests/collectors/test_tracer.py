"""An ordered trace on the rank's side: which steps are recorded, what is answered, and that training goes on."""

import errno
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rankwatch import layout
from rankwatch.layout import Directive
from rankwatch.loop import tracer
from tests.support.ranks.recorders import Rank


class FakeProfiler:
    """Implements `rankwatch.loop.tracer.Profiler`."""

    def __init__(self, rank: "TracedRank") -> None:
        self.ended_by = ""
        self.kept = 0
        self._rank = rank

    def start(self) -> None:
        if self._rank.obstacle is not None:
            raise self._rank.obstacle
        self._rank.calls.append(f"start {self._rank.watch._meter.step}")

    def stop(self) -> None:
        self._rank.calls.append(f"stop {self._rank.watch._meter.step}")
        self.kept += 1

    def discard(self) -> None:
        self._rank.calls.append("discard")

    def summary(self) -> dict[str, Any]:
        return self._rank.summary() | {"kept": self.kept}


class TracedRank(Rank):
    """A rank whose traces are recorded by a fake."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.calls: list[str] = []
        self.summary: Callable[[], dict[str, Any]] = lambda: {"spans": 7}
        self.obstacle: Exception | None = None
        self.profiler: FakeProfiler | None = None
        self.watch._loop._tracer._new_profiler = self._new

    def _new(self) -> FakeProfiler:
        self.profiler = FakeProfiler(self)
        return self.profiler

    def asked(self, request: str, steps: int = 2) -> None:
        """The agent writes the order into the slot."""
        self._put(Directive("", "l.0", "closed", trace=request, trace_steps=steps))

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with self.watch.step():
                self.clock.advance(1)

    @property
    def reported(self) -> dict[str, Any] | None:
        """The answer, once the thread that writes it has ended."""
        for thread in threading.enumerate():
            if thread.name == "rankwatch trace":
                thread.join()
        path = Path(layout.trace_path(str(self.recorder.path)))
        return json.loads(path.read_text()) if path.exists() else None

    @property
    def kinds(self) -> list[int]:
        return [entry.kind for entry in self.steps]


@pytest.fixture
def rank(tmp_path: Path) -> TracedRank:
    return TracedRank(tmp_path)


def test_whole_steps_are_recorded_and_summed_up_with_one_between_each_two(rank):
    rank.train(3)
    rank.asked("cmd_1")
    rank.train(5)
    assert rank.calls == ["start 3", "stop 3", "start 5", "stop 5"]
    assert rank.kinds == [0, 0, 0, 1, 0, 1, 0, 0], "recorded steps are not compared with others"
    assert rank.reported == {"request": "cmd_1", "step": 3, "spans": 7, "kept": 2}


@pytest.mark.parametrize("phase", ["eval", "checkpoint_save", "checkpoint_load"])
def test_what_happens_between_steps_is_not_recorded(rank, phase):
    rank.asked("cmd_1")
    rank.train(1)
    assert rank.calls[-1] == "stop 0"
    with rank.watch.phase(phase), rank.watch.pause("maintenance"):
        rank.clock.advance(36_000)
    rank.train(2)
    assert rank.reported == {"request": "cmd_1", "step": 0, "spans": 7, "kept": 2}


@pytest.mark.parametrize("part", ["eval", "checkpoint_save", "checkpoint_load", "maintenance"])
def test_a_step_with_a_part_that_is_no_training_is_not_kept_and_another_one_is_recorded(rank, part):
    rank.asked("cmd_1", 1)
    with rank.watch.step(), rank.watch.pause(part) if part == "maintenance" else rank.watch.phase(part):
        assert rank.calls == ["start 0", "discard"]
        assert rank.kinds == []
    rank.train(2)
    assert rank.calls == ["start 0", "discard", "start 2", "stop 2"]
    assert (rank.reported["step"], rank.reported["kept"]) == (2, 1)


def test_a_trace_ends_if_every_step_has_a_part_that_is_no_training(rank):
    rank.asked("cmd_1", 2)
    rank.train(1)
    for _ in range(10):
        with rank.watch.step(), rank.watch.phase("eval"):
            rank.clock.advance(1)
    assert rank.calls.count("discard") == 3
    assert rank.reported["error"] == "eval began within step 6; 1 of 2 steps were recorded"
    assert rank.reported["kept"] == 1


def test_a_save_in_another_thread_leaves_the_recording_alone(rank):
    rank.asked("cmd_1", 1)
    with rank.watch.step():
        saver = threading.Thread(target=lambda: rank.watch._meter.interrupted("checkpoint_save began"))
        saver.start()
        saver.join()
    assert rank.reported["kept"] == 1


def test_steps_that_take_too_long_end_the_trace(rank):
    rank.asked("cmd_1", 3)
    rank.train(1)
    rank.train(1)
    with rank.watch.step():
        rank.clock.advance(tracer.RECORDED_S_MAX)
    assert rank.calls == ["start 0", "stop 0", "start 2", "discard"]
    assert rank.reported["error"] == "its steps took more than 300 s; 1 of 3 steps were recorded"


def test_a_step_that_an_exception_leaves_is_recorded_no_further(rank):
    rank.asked("cmd_1", 1)
    with pytest.raises(ZeroDivisionError), rank.watch.step():
        raise ZeroDivisionError
    assert rank.calls == ["start 0", "discard"]
    assert rank.reported["error"] == "an exception left a step"


@pytest.mark.parametrize("then", ["begin", "abandon"])
def test_a_step_that_never_ends_or_does_not_take_place_is_recorded_no_further_than_until_it_is_known(rank, then):
    rank.asked("cmd_1", 1)
    rank.watch.begin()
    getattr(rank.watch if then == "begin" else rank.watch._loop, then)()
    assert rank.calls == ["start 0", "discard"]


def test_a_rollback_fails_the_trace(rank):
    rank.watch.on_rollback(lambda checkpoint: checkpoint.step)
    rank.asked("cmd_1", 3)
    rank.train(1)
    rank.order("rollback", 1, checkpoint="local:l.0:0", checkpoint_step=0, k=1, trace="cmd_1", trace_steps=3)
    rank.train(4)
    assert rank.watch._meter.k == 1
    assert rank.reported == {"request": "cmd_1", "error": "a rollback"}
    assert rank.calls == ["start 0", "stop 0"]


def test_an_order_that_comes_within_a_step_begins_with_the_next_one_and_one_with_a_phase_names_the_trace_too(rank):
    with rank.watch.step():
        rank._put(Directive("o", "l.0", "hold", "pause", 90, trace="cmd_1", trace_steps=1))
    rank.train(1)
    assert (rank.reported["request"], rank.reported["step"]) == ("cmd_1", 1)


def test_a_request_is_answered_once_even_if_it_comes_again_after_another(rank):
    seconds = iter([0.2, 0.0])  # the newer answer comes last, though the older one takes longer
    rank.summary = lambda: time.sleep(next(seconds)) or {"spans": 7}
    for request in ("cmd_1", "cmd_1", "cmd_2", "cmd_1"):
        rank.asked(request, 1)
        rank.train(2)
    assert [call for call in rank.calls if "start" in call] == ["start 0", "start 5"]
    assert rank.reported["request"] == "cmd_2"


def test_a_withdrawn_order_ends_the_recording_without_an_answer_and_can_be_given_again(rank):
    """Orders come on two paths: an older state, without the request, may arrive after a newer one."""
    rank.asked("cmd_1")
    rank.train(2)
    rank._put(Directive("", "l.0", "closed"))
    rank.train(1)
    assert (rank.calls, rank.reported) == (["start 0", "stop 0"], None)
    rank.asked("cmd_1")
    rank.train(3)
    assert (rank.reported["step"], rank.reported["kept"]) == (3, 2)


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
    assert rank.reported == {"request": "cmd_1", "error": said}
    assert (len(rank.kinds), rank.watch.errors) == (3, 0)


def test_a_summary_that_fails_is_the_answer(rank):
    rank.summary = lambda: {}["name"]
    rank.asked("cmd_1", 1)
    rank.train(1)
    assert rank.reported["error"] == "KeyError: 'name'"


def test_a_profiler_that_gave_way_is_the_answer(rank):
    rank.asked("cmd_1", 3)
    with rank.watch.step():
        rank.profiler.ended_by = "a profiler of the script's own started"
    rank.train(2)
    assert rank.reported == {"request": "cmd_1", "error": "a profiler of the script's own started"}


@pytest.mark.parametrize(
    ("breaks", "end", "error"),
    [(False, "stop 0", "the loop ended; 1 of 3 steps were recorded"), (True, "discard", "the loop ended")],
)
def test_a_loop_that_is_left_between_steps_or_within_one_ends_the_recording(rank, breaks, end, error):
    rank.asked("cmd_1", 3)
    for _ in rank.watch.steps(2):
        if breaks:
            break
    assert (rank.calls, rank.reported["error"]) == (["start 0", end], error)


def test_a_summary_that_is_too_long_is_not_written(rank):
    rank.summary = lambda: {"top": ["x" * 1_000] * 100}
    rank.asked("cmd_1", 1)
    rank.train(1)
    assert rank.reported["error"].startswith("the summary has 10")


def test_more_steps_than_the_limit_are_not_recorded(rank):
    rank.asked("cmd_1", 1_000)
    rank.train(2 * tracer.STEPS_MAX + 2)
    assert rank.reported["kept"] == tracer.STEPS_MAX


def test_an_answer_for_which_the_disk_has_no_room_leaves_no_file(rank, monkeypatch):
    def full(source: str, target: str) -> None:
        raise OSError(errno.ENOSPC, "no space", source, target)

    monkeypatch.setattr(tracer.os, "replace", full)
    rank.asked("cmd_1", 1)
    rank.train(1)
    assert rank.reported is None
    assert not list(Path(str(rank.recorder.path)).parent.glob("*.new"))


def test_a_process_without_torch_says_so(rank, monkeypatch):
    monkeypatch.delitem(tracer.sys.modules, "torch", raising=False)
    rank.watch._loop._tracer._new_profiler = tracer._torch_profiler
    rank.asked("cmd_1")
    rank.train(1)
    assert rank.reported["error"] == "this process has not loaded torch"
