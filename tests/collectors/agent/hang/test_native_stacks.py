"""Native frames of hanging ranks: taken beside the work of the agent, of few ranks, harmless where refused."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch.agent.clock import HostClock
from rankwatch.agent.hang.native_stacks import NATIVE_STACKS_MAX, NativeStacks, StackedRank
from rankwatch.wire import Event
from tests.support.agent.service import until

FRAMES = 'Thread 7 (idle): "MainThread"\n    ncclGroupEnd (libnccl.so.2)\n    all_reduce (torch/distributed.py:1)'


def py_spy(folder: Path, script: str) -> str:
    """A program that stands in for py-spy."""
    program = folder / "py-spy"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o700)
    return str(program)


def hanging(rank: int, pid: int = 42, request: str = "r") -> StackedRank:
    return StackedRank(request, "l.0", rank, 7, pid)


def answered(stacks: NativeStacks) -> list[tuple[str, Event]]:
    """What has come once nothing is outstanding."""
    found: list[tuple[str, Event]] = []

    def done() -> bool:
        found.extend(stacks.take())
        return stacks._outstanding == 0

    until(done)
    return found


def test_frames_come_as_an_event_of_the_rank(tmp_path: Path) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, f"echo \"$@\" >&2; cat <<'END'\n{FRAMES}\nEND"))
    stacks.begin(hanging(3))
    assert stacks.pending
    ((attempt, event),) = answered(stacks)
    assert (attempt, event.kind, event.rank, event.step) == ("l.0", "native_stack", 3, 7)
    assert event.fields == {"order": "r", "stack": FRAMES + "\n"}
    assert not stacks.pending


def test_few_ranks_are_asked_for_one_request_and_each_request_begins_anew(tmp_path: Path) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, "echo $4"))
    for rank in range(NATIVE_STACKS_MAX + 3):
        stacks.begin(hanging(rank, pid=rank))
    stacks.begin(hanging(0, pid=99, request="later"))
    told = [event.fields["stack"].strip() for _, event in answered(stacks)]
    assert told == [*map(str, range(NATIVE_STACKS_MAX)), "99"]


def test_a_refusal_is_logged_once_and_costs_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stacks = NativeStacks(HostClock(), py_spy(tmp_path, "echo 'Permission denied: try again with sudo' >&2; exit 1"))
    stacks.begin(hanging(0))
    stacks.begin(hanging(1))
    assert answered(stacks) == []
    assert caplog.text.count("Permission denied") == 1


def test_without_py_spy_nobody_is_asked() -> None:
    stacks = NativeStacks(HostClock(), "no such program")
    stacks.begin(hanging(0))
    assert not stacks.pending
    assert stacks.take() == []


@pytest.mark.skipif(shutil.which("py-spy") is None, reason="py-spy is not installed")
def test_the_real_one_names_functions_of_c() -> None:
    code = "import time; print('up', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        stacks = NativeStacks(HostClock())
        stacks.begin(hanging(0, pid=process.pid))
        found = answered(stacks)
        process.kill()
    if not found:
        pytest.skip("this user may not trace processes here")
    assert "(python3" in found[0][1].fields["stack"] or ".so" in found[0][1].fields["stack"]
