"""A training host: recorders and spool of its own, the real agent, and ranks that obey orders; all can be killed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from rankwatch import layout, wire
from rankwatch.spawn import lock_is_held
from tests.support.agent.service import until
from tests.support.ranks.recording_rank import RecordingRank


class AgentProcess:
    """An agent of one job in a directory."""

    def __init__(
        self, directory: Path, environment: Mapping[str, str], job: str = "gpt", arguments: Sequence[str] = ()
    ) -> None:
        self._lock = layout.agent_lock_path(str(directory), job)
        self._log = directory / f"{layout.file_stem(job)}.agent.log"
        home = {"HOME": str(directory / "home"), "XDG_CONFIG_HOME": ""}
        self.supervisor = subprocess.Popen(
            [sys.executable, "-m", "rankwatch.agent", "--dir", str(directory), "--job", job, *arguments],
            env={**os.environ, **home, **environment},
            start_new_session=True,
        )

    @property
    def worker(self) -> int:
        """PID of the worker; 0 without one."""
        children = Path(f"/proc/{self.supervisor.pid}/task/{self.supervisor.pid}/children")
        with contextlib.suppress(OSError):
            for pid in children.read_text().split():
                return int(pid)
        return 0

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    def running(self) -> bool:
        return lock_is_held(self._lock)

    def wait(self, seconds: float = 60.0) -> int:
        return self.supervisor.wait(seconds)

    def kill_worker(self) -> int:
        """SIGKILL the worker; returns its PID."""
        until(lambda: self.worker)
        worker = self.worker
        os.kill(worker, signal.SIGKILL)
        return worker

    def kill(self) -> None:
        """SIGKILL both, the supervisor first, so that it starts no other."""
        worker = self.worker
        self.supervisor.kill()
        self.supervisor.wait(60)
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


STEPS = 10**9
"""More than any test waits for."""


class TrainingHost:
    """A machine of a job under a name of its own, played in a folder."""

    def __init__(self, folder: Path, name: str, job: str, url: str, token: str) -> None:
        self.name = name
        self.directory = folder / name
        self.directory.mkdir(mode=0o700)
        self._job = job
        self._environment = {"RANKWATCH_URL": url, "RANKWATCH_TOKEN": token}
        self._output = self.directory / "output.txt"
        self.ranks: list[RecordingRank] = []
        self.agent: AgentProcess | None = None

    def launch(self, launch: str, ranks: Iterable[int], world_size: int) -> None:
        """End the ranks of the launch before, as a launcher does, and start these; they do not step yet."""
        self.kill_ranks()
        with self._output.open("ab") as output:
            reported = {"job": self._job, "launch": launch, "world_size": world_size, "host": self.name}
            self.ranks = [RecordingRank(self.directory, rank, output=output, **reported) for rank in ranks]
        if self.agent is None or not self.agent.running():
            self.start_agent()

    def train(self) -> None:
        """Let the ranks step until they are killed."""
        for rank in self.ranks:
            rank.do("follow_orders", STEPS)

    def start_agent(self) -> None:
        if self.agent is not None:
            self.agent.kill()
        self.agent = AgentProcess(self.directory, self._environment, self._job)
        until(self.agent.running)

    def kill_ranks(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.ranks = []

    def kill(self) -> None:
        """The whole machine is gone at once; its agent first, which would report the ranks' ends."""
        if self.agent is not None:
            self.agent.kill()
        self.kill_ranks()

    @property
    def output(self) -> str:
        """What its ranks have printed."""
        return self._output.read_text()

    @property
    def identity(self) -> wire.Enrolled | None:
        """What its agent keeps since it has enrolled."""
        path = Path(layout.agent_identity_path(str(self.directory), self._job))
        return msgspec.json.decode(path.read_bytes(), type=wire.Enrolled) if path.exists() else None
