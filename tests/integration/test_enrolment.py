"""Agents keep their place in a job through what happens to honest ones: whatever ends and comes back, telemetry is
taken, nothing of it counts as forged, and commands are obeyed.

Each host of a job is a folder with recorders, spool and agent of its own; agents, ranks and service are real processes.
"""

import itertools
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select

from rankwatch_service.job.attempts import RANK_FREE_S
from rankwatch_service.store.engine import open_engine, read
from rankwatch_service.store.models import Agent, AgentView, DeadLetter
from tests.support.agent.host import TrainingHost
from tests.support.service.process import Up, free_port, until

pytestmark = [pytest.mark.integration, pytest.mark.ci]

BUSY_S = 20.0
"""What a busy machine may take beyond the time after which a rule lets others in."""


class Service(Up):
    """A service at a port that stays, with its database."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, port=free_port())

    def job_token(self, job: str, hosts: int) -> str:
        """Of this job, for so many agents at a time."""
        asked = {"name": f"agents of {job}", "scopes": ["ingest"], "job": job, "hosts_max": hosts}
        answer = self.http.ask("POST", "/api/v1/tokens", json=asked)
        assert answer.status_code == 201, answer.text
        return answer.json()["token"]

    def rows(self, *columns: Any) -> list[tuple[Any, ...]]:
        engine = open_engine(f"sqlite:///{self.data}/rankwatch.db")
        with read(engine) as connection:
            found = [tuple(row) for row in connection.execute(select(*columns))]
        engine.dispose()
        return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service(tmp_path_factory.mktemp("service"))
    service.start()
    yield service
    service.stop()


class TrainingJob:
    """A job of two ranks on each of its hosts, with a token that admits no more hosts than it has."""

    def __init__(self, service: Service, folder: Path, name: str, hosts: int) -> None:
        self.name = name
        self._service = service
        self._folder = folder
        self._token = service.job_token(name, hosts)
        self._numbers = itertools.count()
        self._launches = itertools.count()
        self.all_hosts: list[TrainingHost] = []
        self.hosts = [self.host() for _ in range(hosts)]

    def host(self) -> TrainingHost:
        """A further machine with the job's token."""
        self.all_hosts.append(
            TrainingHost(self._folder, f"node-{next(self._numbers)}", self.name, self._service.url, self._token)
        )
        return self.all_hosts[-1]

    def launch(self) -> str:
        """Start two ranks on each host; returns the attempt."""
        launch = f"launch-{next(self._launches)}"
        for number, host in enumerate(self.hosts):
            host.launch(launch, (2 * number, 2 * number + 1), 2 * len(self.hosts))
        for host in self.hosts:
            host.train()
        return f"{launch}.0"

    def now(self) -> dict[str, Any]:
        answer = self._service.http.ask("GET", f"/api/v1/jobs/{self.name}")
        return answer.json() if answer.status_code == 200 else {"attempt": "", "step": -1, "world_size": 0}

    def await_attempt(self, attempt: str) -> None:
        """Wait until the service watches it, with all its ranks."""

        def watched() -> bool:
            now = self.now()
            return (now["attempt"], now["world_size"]) == (attempt, 2 * len(self.hosts)) and now["step"] >= 0

        until(f"{attempt} with all ranks", watched, 60.0)

    def assert_well(self) -> None:
        """Steps arrive, a pause is obeyed by all ranks, and nothing was refused as forged."""
        before = self.now()["step"]
        until("steps", lambda: self.now()["step"] > before, 30.0)
        for action in ("pause", "resume"):
            command = until(f"{action} is possible", lambda action=action: self._command(action), 30.0)
            done = until(f"end of {action}", lambda command=command: self._ended(command["id"]), 60.0)
            assert done["state"] == "applied", str(done)
        before = self.now()["step"]
        until("steps after the pause", lambda: self.now()["step"] > before, 30.0)
        incidents = self._service.http.ask("GET", f"/api/v1/incidents?job={self.name}").json()["items"]
        assert "forged_telemetry" not in {one["kind"] for one in incidents}
        assert self._service.rows(DeadLetter.reason) == []

    def agents(self) -> set[str]:
        """Those that have enrolled and have their place still."""
        return {agent for job, agent in self._service.rows(Agent.job, Agent.id) if job == self.name}

    def boots(self) -> set[str]:
        return {boot for job, boot in self._service.rows(AgentView.job, AgentView.boot) if job == self.name}

    def _command(self, action: str) -> dict[str, Any] | None:
        answer = self._service.http.ask("POST", f"/api/v1/jobs/{self.name}/commands", json={"action": action})
        # Right after a start not all agents have reported yet.
        return answer.json() if answer.is_success else None

    def _ended(self, command: str) -> dict[str, Any] | None:
        reported = self._service.http.ask("GET", f"/api/v1/commands/{command}").json()
        return reported if reported["state"] not in ("requested", "approved", "sent", "accepted") else None


@pytest.fixture
def job_of(service: Service, tmp_path: Path) -> Iterator[Callable[..., TrainingJob]]:
    """Makes a job of so many hosts; its processes end with the test."""
    with ExitStack() as stack:

        def job_of(name: str, hosts: int, at: Service = service) -> TrainingJob:
            job = TrainingJob(at, tmp_path, name, hosts)
            stack.callback(lambda: [host.kill() for host in job.all_hosts])
            return job

        yield job_of


def test_a_killed_agent_comes_back_with_its_identity_and_a_killed_rank_is_launched_again(job_of):
    job = job_of("killed", 2)
    job.await_attempt(job.launch())
    agents, boots = job.agents(), job.boots()
    assert len(agents) == len(boots) == 2
    host = job.hosts[0]
    identity = host.identity
    host.agent.kill_worker()
    until("the next worker", lambda: len(job.boots() - boots) == 1)
    job.assert_well()
    host.agent.kill()
    host.start_agent()
    until("the next agent", lambda: len(job.boots() - boots) == 1 and host.agent.worker)
    job.assert_well()
    os.kill(host.ranks[0].pid, signal.SIGKILL)
    job.await_attempt(job.launch())
    job.assert_well()
    assert (job.agents(), host.identity) == (agents, identity)


def test_another_host_enters_for_one_that_is_gone_and_none_beyond_those_that_the_token_admits(job_of):
    job = job_of("replaced", 2)
    job.await_attempt(job.launch())
    stranger = job.host()
    stranger.launch("elsewhere", [0], 1)
    stranger.train()
    until("it is told", lambda: "this token admits 2 hosts at a time, and as many report" in stranger.output, 30.0)
    stranger.kill()
    job.assert_well()
    gone, job.hosts[1] = job.hosts[1], job.host()
    gone_s = time.monotonic()
    gone.kill()
    attempt = job.launch()
    until("the next host has entered", lambda: job.hosts[1].identity, 60.0)
    entered_s = time.monotonic() - gone_s
    job.await_attempt(attempt)
    print(f"another host entered {entered_s:.1f} s after one was gone")
    assert RANK_FREE_S - 1.5 < entered_s < RANK_FREE_S + BUSY_S
    job.assert_well()
    assert len(job.agents()) == 2


def test_agents_go_on_without_enrolling_again_when_the_service_was_killed(job_of, tmp_path):
    service = Service(tmp_path / "service")
    service.start()
    job = job_of("restarted", 2, at=service)
    attempt = job.launch()
    job.await_attempt(attempt)
    agents, boots = job.agents(), job.boots()
    service.http.close()
    service.kill()
    service.start()
    assert job.now()["attempt"] == attempt
    job.assert_well()
    assert (job.agents(), job.boots()) == (agents, boots)
    assert service.stop() == 0
