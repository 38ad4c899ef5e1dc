"""The demo as a user starts it: what it finds, what it must not find, and that it leaves nothing behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from rankwatch_service.demo.processes import working_for
from tests.support.service.process import until
from tests.support.trials.selection import long_trial

pytestmark = [pytest.mark.integration, pytest.mark.torch, pytest.mark.slow]

RANKWATCH = str(Path(sys.executable).with_name("rankwatch"))
START_S = 120.0


@contextmanager
def started(folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a demo that keeps everything under `folder`, as far as it keeps anything."""
    demo = subprocess.Popen(
        [RANKWATCH, "demo", *arguments],
        env=os.environ | {"TMPDIR": str(folder), "COLUMNS": "160"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with demo:
        try:
            yield demo
        finally:
            if demo.poll() is None:
                demo.terminate()


def assert_nothing_is_left(folder: Path, name: str) -> None:
    assert working_for(name) == []
    assert list(folder.iterdir()) == []
    assert not (Path("/dev/shm") / name).exists()


@pytest.mark.alone
@pytest.mark.timeout(480)
def test_every_fault_of_the_demo_is_found_named_told_and_mended(tmp_path: Path) -> None:
    with started(tmp_path) as demo:
        output = demo.communicate(timeout=450)[0]
    assert demo.returncode == 0, output
    assert list(tmp_path.iterdir()) == []


@long_trial
@pytest.mark.timeout(480)
def test_a_demo_that_is_kept_has_a_job_to_control_and_a_link_of_one_use(tmp_path: Path) -> None:
    with started(tmp_path, "--no-faults", "--steps", "60", "--keep") as demo:
        assert demo.stdout is not None
        said = next(line for line in demo.stdout if "trains on until Ctrl-C" in line)
        url, token = said.split()[-1].split("/login#")
        opened = [
            httpx2.post(f"{url}/api/v1/session", json={"token": token}, headers={"Origin": url}) for _ in range(2)
        ]
        assert [answer.status_code for answer in opened] == [201, 401]
        cookies = opened[0].cookies

        def job() -> dict[str, Any]:
            answer: dict[str, Any] = httpx2.get(f"{url}/api/v1/jobs/gpt-demo", cookies=cookies).json()
            return answer

        until("the job runs again", lambda: job()["state"] == "running", START_S)
        asked = httpx2.post(
            f"{url}/api/v1/jobs/gpt-demo/commands",
            json={"action": "pause", "params": {}, "reason": "a try"},
            headers={"Origin": url, "Idempotency-Key": "one"},
            cookies=cookies,
        )
        assert asked.is_success, asked.text
        until("the job is paused", lambda: job()["state"] == "paused", START_S)
        (folder,) = tmp_path.iterdir()
        demo.send_signal(signal.SIGINT)
        output = demo.communicate(timeout=60)[0]
    assert demo.returncode == 0, output
    assert_nothing_is_left(tmp_path, folder.name)


@pytest.mark.ci
@pytest.mark.timeout(240)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_a_demo_that_is_interrupted_leaves_no_process_and_no_file(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, "--no-faults") as demo:
        until("training", lambda: len(list(tmp_path.glob("*/journal/*"))) == 4, START_S)
        (folder,) = tmp_path.iterdir()
        assert len(working_for(folder.name, "demo.training")) == 4
        assert working_for(folder.name, "rankwatch.agent")
        demo.send_signal(number)
        output = demo.communicate(timeout=60)[0]
    assert demo.returncode == 128 + number, output
    assert_nothing_is_left(tmp_path, folder.name)
