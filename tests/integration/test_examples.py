"""The examples run as their first lines say, and go on where rankwatch's advice for a relaunch says."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rankwatch.layout import agent_lock_path, resume_path

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.ci]

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_gpt.py"
JOB = "example-test"
SMALL = ("--layers", "2", "--width", "32", "--batch", "2", "--context", "16", "--save-every", "10", "--job", JOB)
AGENT_ENDS_S = 60.0


@pytest.fixture
def rings(tmp_path):
    """The recorder directory; afterwards the agent that the ranks started has ended."""
    directory = tmp_path / "rings"
    yield directory
    deadline = time.monotonic() + AGENT_ENDS_S
    while agent_lives(directory):
        assert time.monotonic() < deadline, "the agent outlived its job"
        time.sleep(0.1)


def agent_lives(directory: Path) -> bool:
    lock = Path(agent_lock_path(str(directory), JOB))
    if not lock.exists():
        return False
    with lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def train(rings: Path, checkpoints: Path, steps: int) -> dict[int, float]:
    """Run the example with two ranks; return the printed losses by step."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RANKWATCH_", "PYTEST_"))}
    env |= {"RANKWATCH_DIR": str(rings), "OMP_NUM_THREADS": "1", "HOME": str(rings.parent)}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, EXAMPLE, "--steps", str(steps), "--directory", checkpoints, *SMALL],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", done.stdout)}


@pytest.mark.timeout(240)
def test_the_example_learns_saves_and_goes_on_where_the_advice_says(rings, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    first = train(rings, checkpoints, 21)
    assert list(first) == [0, 10, 20]
    assert first[20] < first[0]
    saved = checkpoints / "step-00000010.pt"
    advice = {"job": JOB, "checkpoint": "local:l.0:10", "location": str(saved), "step": 10}
    rings.mkdir(exist_ok=True)
    Path(resume_path(str(rings), JOB)).write_text(json.dumps(advice))
    second = train(rings, checkpoints, 21)
    assert list(second) == [10, 20]
    assert second[10] == pytest.approx(first[10], abs=1e-3)
    assert second[20] == pytest.approx(first[20], abs=1e-2)
