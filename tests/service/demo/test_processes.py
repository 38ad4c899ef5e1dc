import os
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from rankwatch_service.demo.job.processes import await_none, end_all, working_for

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


def test_nothing_is_waited_for_where_nothing_runs(name: str) -> None:
    assert await_none(name, limit_s=0.0)
