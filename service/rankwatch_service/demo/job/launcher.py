"""Starts the ranks of one job as processes, ends them together, and restarts them, as torchrun does.

When one rank dies the others cannot go on: they are ended, and the job is relaunched under the next launch name,
so that no two launches can be confused. The ranks decide from which checkpoint they continue.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
    ranks: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
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
                self.ranks[rank] = subprocess.Popen(
                    self.command,
                    env=self._rank_environment(rank),
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
                f"ranks ended with {_told(dead)} in launch {self.number}, no relaunch is left; see {self.logs}"
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


def _told(codes: Mapping[int, int]) -> str:
    return ", ".join(f"rank {rank}: {signal.Signals(-code).name if code < 0 else code}" for rank, code in codes.items())
