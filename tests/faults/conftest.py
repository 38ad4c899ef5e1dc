"""A service, ranks and their agent; and at the end of a run, which databases and brokers there were."""

import os
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService
from tests.support.kafka.broker import _kafka_node, missing
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.recordings.outcome import Lived, live_through
from tests.support.recordings.recording import Timed
from tests.support.store.postgres_server import PostgresError, _programs


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line for each."""
    terminalreporter.section("databases and brokers of the fault tests")
    for line in (f"SQLite {sqlite3.sqlite_version}", postgres(), apache(), noida()):
        terminalreporter.line(line)


def postgres() -> str:
    given = os.environ.get("RANKWATCH_TEST_POSTGRES", "")
    try:
        reported = subprocess.run([_programs() / "postgres", "--version"], capture_output=True, text=True, check=True)
    except (PostgresError, OSError, subprocess.CalledProcessError) as error:
        return f"no PostgreSQL: {error}"
    return reported.stdout.strip() + (" and a given server" if given else "")


def apache() -> str:
    given = os.environ.get("RANKWATCH_TEST_KAFKA", "")
    if why := missing("apache"):
        return why
    (jar,) = (_kafka_node().parent / "lib").glob("kafka-clients-*.jar")
    return f"Apache Kafka {jar.stem.removeprefix('kafka-clients-')}" + (f" and the one at {given}" if given else "")


def noida() -> str:
    return missing("noida") or f"noida-db {version('noida-db')}"


@pytest.fixture
def service() -> Iterator[AgentService]:
    """What takes telemetry and gives orders."""
    with AgentService() as service:
        yield service


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[RecordingRank]:
    """Rank 0 of the job gpt; the recorders lie in `tmp_path`."""
    with RecordingRank(tmp_path) as rank:
        yield rank


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[RecordingRank]:
    """Rank 1 of the same job."""
    with RecordingRank(tmp_path, 1) as peer:
        yield peer


@pytest.fixture
def agent(tmp_path: Path, service: AgentService) -> Iterator[AgentProcess]:
    """The agent of the job gpt."""
    with AgentProcess(tmp_path, service.environment) as agent:
        yield agent


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Lived]]:
    """Lets a stream process recordings, each in a database of its own."""
    lived: list[Lived] = []

    def through(entries: list[Timed], *make_detectors: Callable[[], list[Any]]) -> Lived:
        lived.append(live_through(tmp_path / str(len(lived)), entries, *make_detectors))
        return lived[-1]

    yield through
    for one in lived:
        one.engine.dispose()
