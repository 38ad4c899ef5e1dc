"""The real agent, supervisor and worker, started as ranks start it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankwatch import layout
from rankwatch.spawn import lock_is_held
from tests.support.agent.service import until


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

    def __enter__(self) -> "AgentProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
