"""Native frames of hanging ranks: taken beside the work of the agent, of few ranks, harmless where refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankwatch.agent.clock import HostClock
from rankwatch.agent.hang_stacks import NATIVE_STACKS_MAX, NativeStacks, StackedRank
from rankwatch.wire import Event
from tests.support.agent.service import until

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

    def done() -> bool:
        found.extend(stacks.take())
        return len(found) >= count

    until(done)
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
    told = [event.fields["stack"].strip() for _, event in answered(stacks, NATIVE_STACKS_MAX + 1)]
    assert told == [*map(str, range(NATIVE_STACKS_MAX)), "99"]


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
        assert process.stdout is not None
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
