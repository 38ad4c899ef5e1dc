"""The demo's processes: ranks that are launched together, servers that are waited for, and whatever bears its name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankwatch import children
from rankwatch_service.supervise import die_with_parent

RESTARTS_MAX = 5
"""Relaunches before the job counts as failed."""
TERMINATE_S = 3.0
"""Time between SIGTERM and SIGKILL. A rank that waits in a collective runs no Python handler and ends at once."""


class JobFailedError(RuntimeError):
    """The job died more often than allowed."""


@dataclass
class Launcher:
    """Runs `command` once for each rank. Call `poll` often, since it does all the work."""

    command: Sequence[str]
    world_size: int
    job: str
    logs: Path
    """Folder for the ranks' output, one file for each launch and rank."""
    environment: Mapping[str, str]
    restarts_max: int = RESTARTS_MAX
    number: int = -1
    """Number of the current launch; the first is 0."""
    ranks: dict[int, children.Child] = field(default_factory=dict)
    finished: bool = False
    """All ranks ended by themselves, with status 0."""

    @property
    def launch(self) -> str:
        """Name of the current launch, with which the names of its attempts begin."""
        return f"{self.job}-{self.number}"

    def start(self) -> None:
        """Launch all ranks, also once more after they have finished."""
        self.number += 1
        self.finished = False
        self.logs.mkdir(parents=True, exist_ok=True)
        for rank in range(self.world_size):
            with (self.logs / f"{self.launch}-{rank}.log").open("wb") as log:
                self.ranks[rank] = children.start(
                    self.command,
                    self._rank_environment(rank),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    # Ctrl-C reaches only the launcher, which then ends the ranks in order.
                    start_new_session=True,
                )

    def poll(self) -> bool:
        """Check for ranks that ended, and relaunch if one died. Returns whether there was a new launch.

        Raises:
            JobFailedError: a rank died and no relaunch is left; all ranks have been ended.
        """
        codes = {rank: process.poll() for rank, process in self.ranks.items()}
        if self.finished or all(code is None for code in codes.values()):
            return False
        dead = {rank: code for rank, code in codes.items() if code}
        if not dead:
            self.finished = all(code == 0 for code in codes.values())
            return False
        self.stop()
        if self.number >= self.restarts_max:
            raise JobFailedError(
                f"ranks ended with {_reported(dead)} in launch {self.number}, no relaunch is left; see {self.logs}"
            )
        self.start()
        return True

    def stop(self) -> None:
        """End all ranks, within `TERMINATE_S`; none is left afterwards."""
        for process in self.ranks.values():
            # A stopped process acts on SIGTERM only once it runs again.
            for number in (signal.SIGTERM, signal.SIGCONT):
                process.send_signal(number)
        deadline_s = time.monotonic() + TERMINATE_S
        for process in self.ranks.values():
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self.ranks.clear()

    def _rank_environment(self, rank: int) -> dict[str, str]:
        return {
            **self.environment,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "RANKWATCH_LAUNCH": self.launch,
            # All ranks are on this machine. Otherwise gloo resolves the host name, which may fail or pick another
            # interface.
            "GLOO_SOCKET_IFNAME": "lo",
        }


def own_environment() -> dict[str, str]:
    """A copy of this process's environment without the variables of other jobs and services."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("RANKWATCH_", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "MASTER_"))
    }


def _reported(codes: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {signal.Signals(-code).name if code < 0 else code}" for rank, code in codes.items())


LOOK_S: Final = 0.05
LOG_CHARS_MAX: Final = 2_000
"""Length of the end of a child's log that an error contains."""


class ChildError(Exception):
    """A child ended or did not answer in time; the message is the end of its log."""


def started(
    command: Sequence[str], log: Path, answers: Callable[[], bool], within_s: float, **how: Any
) -> children.Child:
    """Start a child that the kernel ends with this process; returns when it answers.

    Args:
        command: program and arguments.
        log: file to which its output is appended.
        answers: returns whether the child answers requests.
        within_s: how long the child may take to answer, in seconds; after that it is killed.
        how: further arguments of `children.start`: user, environment.

    Raises:
        ChildError: the child ended, or does not answer.
    """
    with log.open("ab") as said:
        child = children.start(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            # Ctrl-C reaches only the parent, which then ends everything in order.
            start_new_session=True,
            preexec_fn=die_with_parent(os.getpid()),  # nothing but two system calls
            **how,
        )
    deadline_s = time.monotonic() + within_s
    while not answers():
        if child.poll() is not None or time.monotonic() > deadline_s:
            child.kill()
            child.wait()
            raise ChildError(log.read_text(errors="replace")[-LOG_CHARS_MAX:].strip())
        time.sleep(LOOK_S)
    return child


def end(child: children.Child, within_s: float, number: int = signal.SIGTERM) -> None:
    """End a child with a signal, and after `within_s` with SIGKILL."""
    child.send_signal(number)
    try:
        child.wait(within_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def free_port() -> int:
    """A free port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def working_for(name: str, module: str = "") -> list[int]:
    """Ids, ascending, of other processes that have `name` in environment or command, and `module` in the command."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal() or int(entry.name) == os.getpid():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            carried = command + (entry / "environ").read_bytes()
        except OSError:
            # It has ended, or belongs to another user.
            continue
        if name.encode() in carried and module.encode() in command:
            found.append(int(entry.name))
    return sorted(found)


def await_none(name: str, limit_s: float, module: str = "") -> bool:
    """Wait until no such process runs; False if one still does after `limit_s`."""
    deadline_s = time.monotonic() + limit_s
    while working_for(name, module):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def end_all(name: str, grace_s: float = 2.0) -> None:
    """End all processes with this name: with SIGTERM, and after `grace_s` with SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in working_for(name):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if await_none(name, grace_s):
            return
