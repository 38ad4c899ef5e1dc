"""The agent dies; the job does not notice, and nothing is lost."""

import shutil
import time
from pathlib import Path

import pytest

from tests.support.agent.process import AgentProcess
from tests.support.agent.service import AgentService, until
from tests.support.ranks.recording_rank import RecordingRank

pytestmark = pytest.mark.integration


def test_a_killed_worker_is_back_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    with (
        AgentService() as service,
        RecordingRank(tmp_path) as rank,
        AgentProcess(tmp_path, service.environment) as agent,
    ):

        def lose_a_worker() -> None:
            before = len(service.rows())
            killed = agent.kill_worker()
            begin_s = time.monotonic()
            rank.do("steps", 20)
            until(lambda: agent.worker not in (0, killed))
            assert time.monotonic() - begin_s < 10.0
            until(lambda: len(service.rows()) == before + 20)

        rank.do("steps", 20)
        until(lambda: len(service.rows()) == 20)
        for _ in range(3):
            lose_a_worker()
        rank.say("exit", 0)
        rank.wait()
        assert agent.wait() == 0
    assert sorted(step for _, step, _ in service.rows()) == list(range(80))
    assert len({batch.boot for batch in service.batches}) == 4
    assert service.lost() == {}


def test_when_worker_and_supervisor_are_killed_the_rank_goes_on_and_the_next_agent_tells_it_all(tmp_path: Path) -> None:
    with AgentService() as service, RecordingRank(tmp_path) as rank:
        with AgentProcess(tmp_path, service.environment) as agent:
            rank.do("steps", 10)
            until(lambda: len(service.rows()) == 10)
        until(lambda: not agent.running())
        rank.do("steps", 1_000)
        with AgentProcess(tmp_path, service.environment):
            until(lambda: len(service.rows()) == 1_010)
        assert service.lost() == {}


def test_an_agent_whose_directory_is_removed_ends_with_its_rank(tmp_path: Path) -> None:
    directory = tmp_path / "recorders"
    directory.mkdir()
    with (
        AgentService() as service,
        RecordingRank(directory) as rank,
        AgentProcess(directory, service.environment) as agent,
    ):
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 5)
        shutil.rmtree(directory.rename(tmp_path / "removed"))  # at once: the agent writes there meanwhile
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 10)
        agent.kill_worker()
        assert agent.wait() == 0
        assert rank.process.poll() is None
