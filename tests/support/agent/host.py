"""A training host: recorders and spool of its own, its agent, and ranks that obey orders; all of them can be killed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from rankwatch import layout, wire
from tests.support.agent.process import AgentProcess
from tests.support.agent.service import until
from tests.support.ranks.recording_rank import RecordingRank

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
            told = {"job": self._job, "launch": launch, "world_size": world_size, "host": self.name}
            self.ranks = [RecordingRank(self.directory, rank, output=output, **told) for rank in ranks]
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
        """The whole machine is gone at once; its agent first, which would tell of the ranks' ends."""
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
