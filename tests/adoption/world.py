"""A real service, and training scripts that are launched beside it as their authors would."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankwatch_service.demo.processes import end_all, own_environment, working_for
from rankwatch_service.demo.service import ServiceProcess
from tests.adoption.cases import SLOW, Case, Fault

RUN_S = 300.0
"""A script that has not ended by then hangs."""
REPORTED_S = 90.0
"""What is not reported by then is not reported."""
LOOK_S = 0.1
RUNS_MAX = 3
TRAIN_AT_A_TIME = 3
"""On two cores: a script starts and ends longer than it computes."""
ABORTED = "terminate called without an active exception"
"""What a process says when torch aborts it at its end, because a thread of gloo is still running: about one launch in a
hundred. Its exit status is then not that of the script."""
FAULTY_RANK = 1
RENDEZVOUS = ("--nnodes=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", *RENDEZVOUS)
RANKWATCH_RUN = (sys.executable, "-m", "rankwatch_service.cli", "run", "--")
FAULTY = Path(__file__).with_name("faulty.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, repr=False)
class Outcome:
    """What the service said of one job."""

    incidents: list[dict[str, Any]]
    output: str
    loss: float | str | None = None
    """The newest that arrived."""

    @property
    def loud(self) -> list[dict[str, Any]]:
        """Incidents that somebody is notified of."""
        return [incident for incident in self.incidents if incident["severity"] != "info"]

    def reported(self, fault: Fault) -> bool:
        """Whether this fault was found, with what it shows, and its rank named where that can be known."""
        return any(
            fault.kind in (incident["kind"], *(one["kind"] for one in incident["consequences"]))
            and (FAULTY_RANK in incident["ranks"] or not fault.names_rank)
            and fault.shows in f"{incident['summary']} {incident['evidence']} {incident['consequences']}"
            for incident in self.loud
        )

    def right(self, fault: Fault | None) -> bool:
        """Whether the fault is reported and nothing else, and without one nothing."""
        return not self.loud if fault is None else self.reported(fault) and len(self.loud) == 1

    def __repr__(self) -> str:
        lines = [
            f"{one['severity']} {one['kind']} {one['ranks']} step {one['onset_step']} {one['state']}: {one['summary']}"
            f" {one['evidence']} consequences {one['consequences']}"
            for one in self.incidents
        ]
        return "\n".join([*lines, self.output[-4000:]])


class World:
    """The service, and where jobs leave their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._environment = own_environment() | {
            "XDG_CONFIG_HOME": str(folder / "config"),
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": "",
        }
        self.service = ServiceProcess(folder / "service", 0, self._environment)
        self._turns = threading.Semaphore(TRAIN_AT_A_TIME)
        self._alone = threading.Lock()

    def run(self, case: Case, fault: Fault | None) -> Outcome:
        """Run a script as it is, or let one of its ranks have a fault; again if torch aborted a process of it.

        Several threads may do so: three scripts train at a time, while those that have ended are judged. With a slow
        rank one trains at a time, and the caller starts none of the others meanwhile.
        """
        for _ in range(RUNS_MAX - 1):
            try:
                outcome = self._run(case, fault)
            except AssertionError as error:
                if ABORTED not in str(error):
                    raise
                continue
            if outcome.right(fault) or ABORTED not in outcome.output:
                return outcome
        return self._run(case, fault)

    def _run(self, case: Case, fault: Fault | None) -> Outcome:
        reported = fault and f"{fault.name} {FAULTY_RANK} {fault.step or case.step}"
        with self._turn(fault) as turn, self.job(case, reported) as job:
            if fault is not None and fault.kind == "hang":
                job.until("its first steps", lambda: self._has_begun(job) or job.ended, RUN_S)
                deadline_s = time.monotonic() + REPORTED_S
                while time.monotonic() < deadline_s and not (self._incidents(job, severity="critical") or job.ended):
                    time.sleep(LOOK_S)
                end_all(job.name, 0.5)
                return Outcome(self._incidents(job), job.output)
            interrupted = fault is None and case.name == "ctrl_c"
            if interrupted:
                job.until("its sixtieth step", lambda: "sixty steps are done" in job.output)
                os.killpg(job.process.pid, signal.SIGINT)
            code = job.process.wait(RUN_S)
            turn.close()
            assert fault is not None or interrupted or code == 0, job.output
            return self._outcome(job)

    def _turn(self, fault: Fault | None) -> contextlib.ExitStack:
        """Wait until a script may train; closed, it lets the next one do so."""
        turn = contextlib.ExitStack()
        turn.enter_context(self._alone if fault is SLOW else self._turns)
        return turn

    @contextlib.contextmanager
    def job(self, case: Case, fault: str | None) -> Iterator[Job]:
        """Start a script; at the end all of it that still runs is killed."""
        name = f"{case.name}-{uuid.uuid4().hex[:8]}"
        folder = self._folder / name
        (folder / "rings").mkdir(parents=True)
        environment = self._environment | {"RANKWATCH_JOB": name, "RANKWATCH_DIR": str(folder / "rings")}
        environment |= case.environment
        torchrun = [*TORCHRUN, f"--nproc-per-node={case.ranks}", *case.launcher]
        command = torchrun if case.torchrun else [sys.executable]
        if case.untouched:
            command = [*RANKWATCH_RUN, *command]
        if fault is not None:
            environment["ADOPTION_FAULT"] = fault
            command.append(str(FAULTY))
        with (folder / "output.txt").open("wb") as output:
            process = subprocess.Popen(
                [*command, str(case.script)],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            yield Job(name, folder, process)
        finally:
            end_all(name, 0.5)
            process.kill()
            process.wait()

    def _outcome(self, job: Job) -> Outcome:
        """What is said once all of the job has ended and everything it recorded is judged."""
        job.until("the agent's end", lambda: not working_for(job.name))
        job.until("the end of the job", lambda: self.service.find(f"/api/v1/jobs/{job.name}").get("state") == "ended")
        row = self.service.find(f"/api/v1/jobs/{job.name}")
        return Outcome(self._incidents(job), job.output, row["loss"])

    def _has_begun(self, job: Job) -> bool:
        return (self.service.find(f"/api/v1/jobs/{job.name}").get("step") or 0) > 0

    def _incidents(self, job: Job, **wanted: str) -> list[dict[str, Any]]:
        return self.service.items("/api/v1/incidents", job=job.name, **wanted)


@dataclass
class Job:
    """A launched script."""

    name: str
    """Stands in the environment of every process that works for it."""
    folder: Path
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text(errors="replace")

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def until(self, what: str, true: Callable[[], Any], within_s: float = REPORTED_S) -> None:
        """Wait until something is so."""
        deadline_s = time.monotonic() + within_s
        while not true():
            assert time.monotonic() < deadline_s, (
                f"{self.name}: {what} did not come within {within_s:.0f} s\n{self.output}"
            )
            time.sleep(LOOK_S)


@contextlib.contextmanager
def opened_world(folder: Path) -> Iterator[World]:
    """A world with its service running."""
    world = World(folder)
    world.service.start()
    try:
        yield world
    finally:
        world.service.stop()
