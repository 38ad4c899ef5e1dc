"""The demo's processes: ranks that start and end together, servers that are waited for, and all that bear its name."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwatch_service.demo.processes import (
    ChildError,
    JobFailedError,
    Launcher,
    await_none,
    end,
    end_all,
    own_environment,
    started,
    working_for,
)

SLEEPER = "import time; time.sleep(600)"
DEADLINE_S = 60.0


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launcher]]:
    made: list[Launcher] = []

    def make(code: str, *, world_size: int = 3, restarts_max: int = 5) -> Launcher:
        import sys

        launcher = Launcher(
            (sys.executable, "-c", code), world_size, "job", tmp_path, own_environment(), restarts_max=restarts_max
        )
        made.append(launcher)
        launcher.start()
        return launcher

    yield make
    for launcher in made:
        launcher.stop()


def poll_until(launcher: Launcher, condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline_s, "the launcher did not get there"
        launcher.poll()
        time.sleep(0.01)


def test_a_job_that_has_finished_is_launched_once_more(launch: Callable[..., Launcher]) -> None:
    launcher = launch("")
    poll_until(launcher, lambda: launcher.finished)
    launcher.start()
    assert (launcher.launch, launcher.finished) == ("job-1", False)
    poll_until(launcher, lambda: launcher.finished)


def test_a_killed_rank_takes_the_others_with_it_and_all_start_again_under_a_new_launch(launch):
    launcher = launch(SLEEPER)
    first = [process.pid for process in launcher.ranks.values()]
    os.kill(first[1], signal.SIGKILL)
    poll_until(launcher, lambda: launcher.number == 1)
    assert launcher.launch == "job-1"
    assert not any(Path(f"/proc/{pid}").exists() for pid in first)
    assert all(process.poll() is None for process in launcher.ranks.values())


def test_a_stopped_rank_is_ended_too(launch: Callable[..., Launcher]) -> None:
    launcher = launch(SLEEPER)
    pids = [process.pid for process in launcher.ranks.values()]
    os.kill(pids[0], signal.SIGSTOP)
    launcher.stop()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_rank_that_ignores_sigterm_is_killed(launch, tmp_path, monkeypatch):
    monkeypatch.setattr("rankwatch_service.demo.processes.TERMINATE_S", 0.2)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    launcher = launch(code, world_size=1)
    poll_until(launcher, lambda: (tmp_path / "job-0-0.log").read_text() == "deaf\n")
    pid = launcher.ranks[0].pid
    launcher.stop()
    assert not Path(f"/proc/{pid}").exists()


def test_a_job_that_keeps_dying_is_given_up_with_the_reason(launch: Callable[..., Launcher]) -> None:
    launcher = launch("raise SystemExit(7)", restarts_max=2)
    with pytest.raises(JobFailedError, match=r"rank \d: 7.*launch 2"):
        poll_until(launcher, lambda: launcher.finished)
    assert not launcher.ranks


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def test_a_child_has_started_when_it_answers(tmp_path):
    log = tmp_path / "log"
    child = started(python(STUBBORN), log, lambda: log.read_text() == "up\n", 60.0)
    assert child.poll() is None
    end(child, 0.1)
    assert child.returncode == -signal.SIGKILL


def test_the_last_words_of_a_child_that_ends_are_reported(tmp_path):
    with pytest.raises(ChildError, match="no such option"):
        started(python("raise SystemExit('no such option')"), tmp_path / "log", lambda: False, 60.0)


DEAF = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"


@pytest.fixture
def name() -> Iterator[str]:
    name = f"demo-{uuid.uuid4().hex}"
    yield name
    end_all(name)


def start(name: str, code: str = "import time; print('on', flush=True); time.sleep(600)") -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=os.environ | {"SOME_DIR": f"/tmp/{name}/x"},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        process.stdout.readline()
    return process


def test_a_process_in_another_session_is_found_by_its_environment(name: str) -> None:
    process = start(name)
    assert working_for(name) == [process.pid]
    assert working_for(name, module="rankwatch.agent") == []
    process.kill()
    process.wait()
    assert await_none(name, limit_s=5.0)


def test_a_process_that_ignores_being_asked_is_killed(name: str) -> None:
    processes = [start(name, DEAF), start(name)]
    end_all(name, grace_s=0.3)
    assert [process.wait(60) for process in processes] == [-9, -15]
