"""Where a rank stands, read from what faulthandler writes.

What is said of a rank from which no stack comes, tried on a real process.

Native frames of hanging ranks: taken beside the work of the agent, of few ranks, harmless where refused.
"""

from __future__ import annotations

import faulthandler
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rankwatch import layout, wire
from rankwatch.agent import hang_stacks
from rankwatch.agent.clock import HostClock
from rankwatch.agent.hang_stacks import (
    NATIVE_STACKS_MAX,
    POSITION_CHARS_MAX,
    NativeStacks,
    StackedRank,
    StackPosition,
    stack_position,
)
from rankwatch.agent.processes import read_stat
from rankwatch.agent.ranks import LocalRanks
from rankwatch.wire import Event
from tests.support.agent.service import until
from tests.support.clock import FakeClock
from tests.support.ranks.recording_rank import RecordingRank

TRAINING = """Current thread 0x00007f0000000010 (most recent call first):
  File "/usr/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/home/me/train.py", line 41 in train
  File "/home/me/train.py", line 60 in <module>
"""
LOGGER = """Thread 0x00007f0000000020 (most recent call first):
  File "/usr/lib/python3.11/queue.py", line 171 in get
  File "/usr/lib/python3.11/threading.py", line 1002 in _bootstrap

"""


def position(stack: str, thread: int = 0x7F0000000010) -> StackPosition:
    return stack_position(stack, thread)


def test_the_place_is_reported_by_the_innermost_frame_and_that_of_the_jobs_own_code() -> None:
    assert position(TRAINING).text == "all_reduce (distributed_c10d.py:2810), from train (train.py:41)"
    own = TRAINING.replace("/usr/lib/python3.11/site-packages/torch", "/home/me")
    assert position(own).text == "all_reduce (distributed_c10d.py:2810)"
    assert position(own.replace("in all_reduce", "in " + "x" * 500)).text[-1] == "x"
    assert len(position(own.replace("in all_reduce", "in " + "x" * 500)).text) == POSITION_CHARS_MAX


@pytest.mark.parametrize(
    "same",
    [
        TRAINING.replace("7f0000000010", "7fabcdef0010"),
        LOGGER + TRAINING,
        LOGGER + LOGGER.replace("20 (", "21 (").replace("171", "180") + TRAINING,
    ],
    ids=["another address", "a logger", "two loggers"],
)
def test_addresses_and_threads_that_serve_make_no_difference(same: str) -> None:
    number = int(re.findall(r"0x(\w+)", same)[-1], 16)
    assert position(same, number) == position(TRAINING)


def test_a_thread_of_python_counts_if_it_is_the_one_that_trains() -> None:
    idle = TRAINING.replace("Current thread", "Thread")
    assert position(LOGGER + idle, 0x7F0000000020).text == "get (queue.py:171)"
    assert position(LOGGER + idle, 1).text == position(TRAINING).text, "else the oldest thread, which is listed last"


def in_script(*calls: str) -> str:
    """The stack of a script that has made these calls, innermost first."""
    frames = [*calls, "/home/me/train.py:41:train", "/home/me/train.py:60:<module>"]
    lines = [
        f'  File "{file}", line {line} in {function}' for file, line, function in (one.split(":") for one in frames)
    ]
    return "\n".join(["Current thread 0x00007f0000000010 (most recent call first):", *lines, ""])


TORCH = "/usr/lib/python3.11/site-packages/torch"
BACKWARD = in_script(f"{TORCH}/autograd/graph.py:829:_engine_run_backward")
LOADER = in_script("/usr/lib/python3.11/queue.py:180:get", f"{TORCH}/utils/data/dataloader.py:1133:_try_get_data")
AT_EXIT = TRAINING[: TRAINING.index("\n") + 1] + '  File "/site-packages/tracker/run.py", line 9 in finish\n'


@pytest.mark.parametrize(
    ("stack", "os_state", "wchan", "doing"),
    [
        (TRAINING, "S", "futex_do_wait", wire.COLLECTIVE),
        (TRAINING, "R", "", wire.COLLECTIVE),
        (BACKWARD, "S", "futex_do_wait", wire.COLLECTIVE),
        (BACKWARD, "R", "", ""),
        (LOADER, "S", "futex_do_wait", wire.DATA),
        (in_script(), "S", "hrtimer_nanosleep", wire.OWN),
        (in_script("/usr/lib/python3.11/subprocess.py:2047:_wait"), "S", "do_wait", wire.OWN),
        (in_script(), "R", "", wire.OWN),
        (in_script(), "S", "futex_do_wait", ""),
        (AT_EXIT, "S", "hrtimer_nanosleep", wire.ENDING),
        (in_script(*["/home/me/train.py:5:deep"] * 98).rpartition("  File")[0], "R", "", wire.ENDING),
        (in_script(*["/home/me/train.py:5:deep"] * 99).rpartition("  File")[0], "R", "", wire.OWN),
    ],
)
def test_a_stack_and_the_kernel_say_what_a_rank_does(stack: str, os_state: str, wchan: str, doing: str) -> None:
    assert position(stack).doing(os_state, wchan) == doing


def test_a_rank_that_stands_still_is_looked_at_and_one_that_moves_is_not(tmp_path: Path) -> None:
    clock = HostClock()
    with RecordingRank(tmp_path) as rank:
        (local,) = LocalRanks(tmp_path, "gpt").scan()
        answers = hang_stacks.HangAnswers(clock)
        rank.do("steps", 1)
        answers.look(local, local.reader.progress())
        assert not answers.pending, "it has stood for a moment only"
        rank.do("hang", "forward")
        stands = local.reader.progress()
        until(lambda: answers.look(local, stands) or answers.pending)
        until(lambda: answers.take() == [] and not answers.pending)
        assert local.look.doing == wire.OWN
        stood_s = clock.monotonic_s() - stands.step_entered_ns / 1e9
        assert local.look.again_s - clock.monotonic_s() > stood_s / 2
        moved = replace(stands, step=stands.step + 1, step_entered_ns=int(clock.monotonic_s() * 1e9))
        answers.look(local, moved)
        assert (local.look.doing, answers.pending) == ("", False)
        answers.look(local, stands)
        assert answers.pending
        answers.look(local, moved)
        until(lambda: answers.take() == [] and not answers.pending)
        assert local.look.doing == "", "the stack is of where it stood before"


def test_the_file_of_stacks_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hang_stacks, "STACK_FILE_MAX", 2_000)
    with RecordingRank(tmp_path) as rank:
        rank.do("hang", "forward")
        (local,) = LocalRanks(tmp_path, "gpt").scan()
        taker, sizes = hang_stacks.Stacks(HostClock()), []
        for number in range(20):
            taker.begin(f"r{number}", local)
            events = []
            while taker.pending:
                events += taker.take()
            assert "_endless_loop" in events[0][1].fields["stack"]
            sizes.append(Path(layout.stack_path(local.path)).stat().st_size)
        assert max(sizes) < 2_000 + max(sizes[0], 2_000)


@pytest.mark.parametrize("text", ["", "no stack\n", "Thread 0x10 (most recent call first):\n  <no Python frame>\n"])
def test_a_text_without_frames_is_no_place(text: str) -> None:
    assert stack_position(text, 0x10) is None


def test_what_this_python_writes_is_understood() -> None:
    met, over = threading.Event(), threading.Event()

    def wait() -> None:
        met.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    met.wait()
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        text = file.read()
    over.set()
    thread.join()
    here = threading.get_ident()
    assert position(text, here).text.startswith("test_what_this_python_writes_is_understood (test_hang_stacks.py:")
    assert "from wait (test_hang_stacks.py:" in position(text, thread.ident or 0).text


def stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state in hang_stacks.STOPPED_STATES


def test_a_rank_that_is_stopped_just_after_it_was_looked_at_is_called_stopped(tmp_path, monkeypatch):
    with RecordingRank(tmp_path) as rank:
        (local,) = LocalRanks(tmp_path, "gpt").scan()
        clock = FakeClock()
        taker = hang_stacks.Stacks(clock)
        look = hang_stacks.catches

        def then_stop(pid: int, number: int) -> bool:
            found = look(pid, number)
            os.kill(pid, signal.SIGSTOP)
            while not stopped(pid):
                pass
            return found

        with monkeypatch.context() as patch:
            patch.setattr(hang_stacks, "catches", then_stop)
            taker.begin("r1", local)
        assert taker.take() == [], "a handler that runs late would still be waited for"
        clock.advance(hang_stacks.STACK_WAIT_S)
        ((_, event),) = taker.take()
        assert event.fields["reason"] == hang_stacks.STOPPED
        assert event.fields["os_state"] in hang_stacks.STOPPED_STATES
        os.kill(rank.pid, signal.SIGCONT)


def test_ranks_of_a_host_at_the_same_place_send_its_text_once_for_each_request(tmp_path: Path) -> None:
    with RecordingRank(tmp_path, 0), RecordingRank(tmp_path, 1), RecordingRank(tmp_path, 2) as other:
        other.do("hang", "forward")
        ranks = LocalRanks(tmp_path, "gpt").scan()
        taker = hang_stacks.Stacks(HostClock())
        for request in ("r1", "r2"):
            for rank in ranks:
                taker.begin(request, rank)
            events = []
            while taker.pending:
                events += [event for _, event in taker.take()]
            by_rank = {event.rank: event.fields for event in events}
            assert by_rank[0]["place"] == by_rank[1]["place"] != by_rank[2]["place"]
            assert sorted(bool(by_rank[rank]["stack"]) for rank in (0, 1)) == [False, True]
            assert "_endless_loop" in by_rank[2]["stack"]
            assert by_rank[2]["where"].startswith("_endless_loop (recording_rank.py:")
            assert {fields["reason"] for fields in by_rank.values()} == {""}


FRAMES = 'Thread 7 (idle): "MainThread"\n    ncclGroupEnd (libnccl.so.2)\n    all_reduce (torch/distributed.py:1)'


def py_spy(folder: Path, script: str) -> str:
    """A program that stands in for py-spy."""
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return str(program)


class Living:
    """A process of a rank."""

    def __init__(self, pid: int, *, exiting: bool = False) -> None:
        self.pid = pid
        self.exiting = lambda: exiting


def hanging(rank: int, pid: int = 42, request: str = "r", *, exiting: bool = False) -> StackedRank:
    process: Any = Living(pid, exiting=exiting)
    return StackedRank(request, "l.0", rank, 7, process)


def answered(stacks: NativeStacks, count: int) -> list[tuple[str, Event]]:
    """The next answers."""
    found: list[tuple[str, Event]] = []
    until(lambda: found.extend(stacks.take()) or len(found) >= count)
    return found


def test_frames_come_as_an_event_of_the_rank(tmp_path: Path) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, f"echo \"$@\" >&2; cat <<'END'\n{FRAMES}\nEND"))
    stacks.begin(hanging(3))
    ((attempt, event),) = answered(stacks, 1)
    assert (attempt, event.kind, event.rank, event.step) == ("l.0", "native_stack", 3, 7)
    assert event.fields == {"order": "r", "stack": FRAMES + "\n"}


def test_few_ranks_are_asked_for_one_request_and_each_request_begins_anew(tmp_path: Path) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, "echo $4"))
    for rank in range(NATIVE_STACKS_MAX + 3):
        stacks.begin(hanging(rank, pid=rank))
    stacks.begin(hanging(0, pid=99, request="later"))
    reported = [event.fields["stack"].strip() for _, event in answered(stacks, NATIVE_STACKS_MAX + 1)]
    assert reported == [*map(str, range(NATIVE_STACKS_MAX)), "99"]


def test_a_refusal_is_logged_once_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    refusing = "[ $4 = 2 ] && exec echo frames; echo 'Permission denied: try again with sudo' >&2; exit 1"
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, refusing))
    for rank in range(3):
        stacks.begin(hanging(rank, pid=rank))
    assert [event.rank for _, event in answered(stacks, 1)] == [2]
    assert caplog.text.count("Permission denied") == 1


def test_a_process_that_has_ended_meanwhile_is_not_asked_since_another_may_have_its_pid(tmp_path: Path) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, "echo $4"))
    stacks.begin(hanging(0, pid=5, exiting=True))
    stacks.begin(hanging(1, pid=6))
    assert [event.fields["stack"] for _, event in answered(stacks, 1)] == ["6\n"]


def test_without_py_spy_nobody_is_asked() -> None:
    stacks = NativeStacks(HostClock(), "no such program")
    stacks.begin(hanging(0))
    assert stacks._thread is None
    assert stacks.take() == []


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy, an optional tool of the host, is not installed")
def test_the_real_one_names_functions_of_c() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        stacks = NativeStacks(HostClock())
        stacks.begin(hanging(0, pid=process.pid))
        try:
            ((_, event),) = answered(stacks, 1)
        except AssertionError:
            if stacks._refused:
                pytest.skip("this user may not trace processes here")
            raise
        finally:
            process.kill()
    assert "(python3" in event.fields["stack"] or ".so" in event.fields["stack"]
