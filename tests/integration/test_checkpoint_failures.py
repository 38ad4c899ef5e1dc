"""Real ranks whose saves and restores fail, through SDK and agent, and the incidents that the service makes of it."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwatch_service.demo.processes import end_all, working_for
from tests.support.agent.service import AgentService, until
from tests.support.detection.judged import judged

pytestmark = [pytest.mark.integration, pytest.mark.ci]

SCRIPT = Path(__file__).parents[1] / "support" / "ranks" / "saving_rank.py"
SEEN_FOR_S = 3.0
"""How long the job goes on without a save before there is room: what is judged once a second has then been judged."""
Run = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a job of two ranks to its end; the incidents that it leaves, as they are a minute later."""
    mark, processes = f"saves-{uuid.uuid4().hex}", []
    with AgentService() as service:

        def seen() -> bool:
            """Whether the service has been told of a failed save and of its disk, and of what came after it."""
            told: dict[str, float] = {}
            counted = False
            for batch in list(service.batches):
                for event in batch.events:
                    told.setdefault(event.kind, batch.sent_unix_ns)
                counted |= any("checkpoint_free_bytes" in sample.counters for sample in batch.host_devices)
            first = max(told.get(kind, math.inf) for kind in ("checkpoint_failed", "checkpoint_disk"))
            return counted and service.batches[-1].sent_unix_ns >= first + SEEN_FOR_S * 1e9

        def started(how: str) -> list[dict[str, Any]]:
            environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")}
            environment |= {"RANKWATCH_DIR": str(tmp_path), "RANKWATCH_LAUNCH": mark, "HOME": str(tmp_path)}
            environment |= service.environment | {"OMP_NUM_THREADS": "1"}
            for rank in range(2):
                ranks = environment | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
                command = [sys.executable, str(SCRIPT), how, str(tmp_path)]
                processes.append(subprocess.Popen(command, env=ranks))
            if how == "limit":
                until(lambda: bool(service.batches) and seen())
                (tmp_path / "room").touch()
            processes[0].wait(120)
            (tmp_path / "done").touch()
            processes[1].wait(120)
            until(lambda: not working_for(mark))
            return judged(service.batches)

        try:
            yield started
        finally:
            for process in processes:
                process.kill()
                process.wait()
            end_all(mark, 0.2)


def test_saves_that_fail_for_a_while_are_one_warning_that_the_next_good_save_ends(run: Run) -> None:
    (incident,) = run("limit")
    assert (incident["kind"], incident["severity"], incident["state"]) == ("checkpoint_failed", "warning", "resolved")
    evidence = incident["evidence"]
    assert (incident["ranks"], evidence["rank"], evidence["step"]) == ([0], 0, 40)
    assert evidence["type"] in ("OSError", "RuntimeError")
    assert "saving_rank.py" in evidence["where"]
    assert evidence["newest_step"] == 21
    assert evidence["disk"]["free_bytes"] > 0
    assert evidence["disk"]["save_bytes"] > 64 * 64


def test_a_save_that_ends_the_job_is_the_cause_of_its_end(run: Run) -> None:
    (incident,) = run("taken")
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("checkpoint_failed", "critical", [0])
    assert "rank_lost" in {one["kind"] for one in incident["consequences"]}


def test_a_save_that_succeeds_at_the_second_try_is_none(run: Run) -> None:
    assert run("retry") == []


def test_a_checkpoint_that_cannot_be_read_is_why_the_job_does_not_begin(run: Run) -> None:
    (incident,) = run("load")
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("restore_failed", "critical", [0])
    assert incident["evidence"]["type"] in ("UnpicklingError", "RuntimeError")
    assert "rank_lost" in {one["kind"] for one in incident["consequences"]}
