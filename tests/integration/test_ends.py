"""Real jobs of two ranks that end in every way, plainly started and by torchrun, and what is said of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rankwatch_service.demo.processes import end_all, working_for
from tests.support.agent.service import AgentService, until
from tests.support.detection.verdicts import judged

pytestmark = [pytest.mark.integration, pytest.mark.slow]

SCRIPT = Path(__file__).parents[1] / "support" / "ranks" / "ended_rank.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


class EndedJob:
    """Two ranks in a process group of their own, and the service that their agent talks to."""

    def __init__(self, folder: Path, service: AgentService, how: str, *, torchrun: bool, log: str = "") -> None:
        self.folder = folder
        self.log = log
        """A file to which both ranks write their errors; "": a pipe."""
        self.service = service
        self.mark = f"ends-{uuid.uuid4().hex}"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RANKWATCH_")}
        environment |= {"RANKWATCH_DIR": str(folder), "RANKWATCH_LAUNCH": self.mark, "HOME": str(folder)}
        environment |= service.environment
        command = [str(SCRIPT), how, "1"]
        if torchrun:
            self.processes = [self._start([*TORCHRUN, *command], environment)]
        else:
            self.processes = []
            for rank in range(2):
                ranks = environment | {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
                self.processes.append(self._start([sys.executable, *command], ranks))

    def _start(self, command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
        group = self.processes[0].pid if getattr(self, "processes", None) else 0
        if not self.log:
            return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, process_group=group)
        with (self.folder / self.log).open("ab") as log:
            return subprocess.Popen(command, env=environment, stderr=log, process_group=group)

    @property
    def pids(self) -> dict[int, int]:
        """Of the ranks, by their numbers."""
        return {info.rank: info.pid for batch in list(self.service.batches) for info in batch.ranks}

    def trains(self) -> None:
        """Wait until the agent watches both ranks, and let them go on."""
        until(lambda: {rank for _, step, rank in self.service.rows() if step >= 20} == {0, 1})
        (self.folder / "go").touch()

    def signal(self, number: int) -> None:
        """To all processes of the group, as a terminal does."""
        os.killpg(self.processes[0].pid, number)

    def end(self) -> list[dict[str, Any]]:
        """Wait until all of it has ended, the agent included; the incidents that it leaves."""
        for process in self.processes:
            process.wait(60)
        until(lambda: not working_for(self.mark))
        return judged(self.service.batches)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Any]:
    with AgentService() as service, contextlib.ExitStack() as ends:

        def start(how: str, **more: Any) -> EndedJob:
            started = EndedJob(tmp_path, service, how, **more)
            for process in started.processes:
                ends.callback(process.communicate)
                ends.callback(process.kill)
            ends.callback(end_all, started.mark, 0.2)
            started.trains()
            return started

        yield start


def asked_to_end(incidents: list[dict[str, Any]]) -> bool:
    """Whether one piece of information is all, and it is over."""
    (incident,) = incidents
    assert incident["summary"].startswith("The job was ended "), incident
    return (incident["kind"], incident["severity"], incident["state"]) == ("rank_lost", "info", "resolved")


@pytest.mark.ci
@pytest.mark.parametrize("torchrun", [False, True], ids=["plain", "torchrun"])
def test_ctrl_c_is_one_piece_of_information(job, torchrun):
    running = job("train", torchrun=torchrun)
    running.signal(signal.SIGINT)
    assert asked_to_end(running.end())


@pytest.mark.ci
def test_torchrun_that_is_told_to_end_ends_the_job_on_request(job):
    running = job("train", torchrun=True)
    running.processes[0].terminate()
    assert asked_to_end(running.end())


def test_what_a_scheduler_asks_first_and_kills_then_has_ended_on_request(job):
    running = job("stubborn", torchrun=False)
    running.signal(signal.SIGTERM)
    until(lambda: running.service.events("process_exit"))
    running.signal(signal.SIGKILL)
    assert asked_to_end(running.end())


@pytest.mark.ci
def test_a_job_that_is_cancelled_with_its_agent_is_told_of_by_it(job):
    running = job("stubborn", torchrun=False)
    for pid in working_for(running.mark):
        os.kill(pid, signal.SIGTERM)
    until(lambda: running.service.events("process_exit"))
    running.signal(signal.SIGKILL)
    assert asked_to_end(running.end())


@pytest.mark.ci
def test_one_rank_that_is_asked_to_end_takes_its_peer_along(job):
    running = job("peers", torchrun=False)
    os.kill(running.pids[0], signal.SIGTERM)
    incidents = running.end()
    assert asked_to_end(incidents)
    assert incidents[0]["ranks"] == [0]


@pytest.mark.parametrize(
    "torchrun", [pytest.param(False, id="plain", marks=pytest.mark.ci), pytest.param(True, id="torchrun")]
)
@pytest.mark.parametrize(
    ("how", "code", "error", "place"),
    [
        pytest.param("exit", 3, "SystemExit: 3", "ended_rank.py:", marks=pytest.mark.ci),
        ("raise", 1, "ValueError: broken batch", "in end"),
    ],
)
def test_a_rank_that_ends_by_itself_is_lost_with_status_error_and_place(job, torchrun, how, code, error, place):
    running = job(how, torchrun=torchrun)
    (incident,) = running.end()
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("rank_lost", "critical", [1])
    evidence = incident["evidence"]
    # The peer may end first, of the lost connection; then torchrun ends this one while Python still shuts down.
    ended_meanwhile = torchrun and evidence["signal"] == signal.SIGTERM
    assert evidence["code"] == code or ended_meanwhile, evidence
    assert evidence["error"] == error or (ended_meanwhile and not evidence["error"])
    assert place in evidence["where"]
    assert [end["rank"] for end in evidence["also_ended"]] == [0]


@pytest.mark.parametrize("how", [pytest.param("exit and free", marks=pytest.mark.ci), "exit and shut down"])
def test_a_rank_that_its_launcher_ends_after_the_peer_that_lost_it_is_the_one_that_is_lost(job, how):
    (incident,) = job(how, torchrun=True).end()
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("rank_lost", "critical", [1])
    assert incident["scope"] == "rank:1"
    evidence = incident["evidence"]
    assert (evidence["signal"], evidence["requested"]) == (signal.SIGTERM, False)
    assert "ended_rank.py:" in evidence["where"]
    assert [end["rank"] for end in evidence["also_ended"]] == [0]


@pytest.mark.ci
@pytest.mark.parametrize(
    ("how", "log", "error"),
    [
        ("say and exit", "", "RuntimeError: shard 17 has a bad checksum"),
        ("abort", "both.log", "CUDA error: an illegal memory access was encountered"),
    ],
)
def test_what_a_rank_prints_of_its_end_is_its_error(job, tmp_path, how, log, error):
    (incident,) = job(how, torchrun=False, log=log).end()
    assert (incident["kind"], incident["severity"], incident["ranks"]) == ("rank_lost", "critical", [1])
    assert f": {error}" in incident["summary"]
    assert "; 1 other followed within " in incident["summary"]
    assert incident["evidence"]["first_error"].endswith(error)
    assert error in "\n".join(incident["evidence"]["output"])
    files = incident["evidence"].get("output_files", [])
    assert [file.partition(":")[2] for file in files] == ([str(tmp_path / log)] if log else [])


@pytest.mark.ci
def test_a_rank_that_ends_with_code_0_while_its_peer_goes_on_is_missed(job):
    running = job("quit", torchrun=False)
    until(lambda: running.service.events("process_exit"))
    [(gone_step, _)] = [(event.step, event.rank) for event in running.service.events("process_exit")]
    until(lambda: ("step", gone_step + 400, 0) in [("step", step, rank) for _, step, rank in running.service.rows()])
    running.signal(signal.SIGTERM)
    first, *_ = running.end()
    assert (first["kind"], first["severity"], first["ranks"]) == ("rank_lost", "warning", [1])
    assert "ended with exit code 0 at step 30, before the others were done" in first["summary"]
