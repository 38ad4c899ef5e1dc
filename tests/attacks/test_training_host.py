"""Another user of a training host, and a fake service at the address of the agents, steer no rank of the job."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankwatch import wire
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import TOKEN, AgentService, until
from tests.support.ranks.recording_rank import RecordingRank
from tests.support.trials.selection import in_ci

pytestmark = pytest.mark.integration

KILL = wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch")
TRAINING = """
import rankwatch
watch = rankwatch.start(job="gpt")
for _ in watch.steps(20):
    pass
"""
NOBODY = 65534


@pytest.mark.parametrize("trick", ["a link", *in_ci(["open to all", "of another user"])])
def test_a_recorder_directory_that_another_user_made_first_is_not_used(tmp_path: Path, trick: str) -> None:
    planted, elsewhere = tmp_path / "planted", tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    if trick == "a link":
        planted.symlink_to(elsewhere)
    elif trick == "of another user" and os.geteuid() != 0:
        planted = Path("/usr")  # of root, since root alone can give a directory away
    else:
        planted.mkdir()
        planted.chmod(0o777 if trick == "open to all" else 0o700)
        if trick == "of another user":
            os.chown(planted, NOBODY, NOBODY)
    before = sorted(planted.iterdir())
    home = {"HOME": str(tmp_path / "home"), "XDG_CONFIG_HOME": "", "TMPDIR": str(tmp_path)}
    reported = subprocess.run(
        [sys.executable, "-c", TRAINING],
        env={**os.environ, **home, "RANKWATCH_DIR": str(planted)},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert sorted(planted.iterdir()) == before
    assert list(elsewhere.iterdir()) == []
    assert reported.stderr.count(f" {planted}: ") == 1, reported.stderr
    assert "RANKWATCH_DIR" not in reported.stderr, "a second line about the same"


def fake_at(service: AgentService, what: str) -> AgentService:
    """A service that has seen the tokens that were sent, but no secret of an agent, and no enrolment key."""
    fake = AgentService(port=service.port)
    fake.enrolment_key = b""
    if what == "signs with other secrets":
        fake.agents = {agent: (host, os.urandom(32)) for agent, (host, _) in service.agents.items()}
    fake.enrols = what != "signs nothing"
    fake.order(KILL)
    return fake


@pytest.mark.parametrize("what", ["signs with other secrets", *in_ci(["has the agent enrol again", "signs nothing"])])
def test_a_fake_service_at_the_agents_address_is_not_obeyed(tmp_path: Path, what: str) -> None:
    with (
        AgentService() as service,
        RecordingRank(tmp_path) as rank,
        AgentProcess(tmp_path, service.environment) as agent,
    ):
        rank.do("steps", 20)
        until(lambda: service.views)
        service.stop()
        with fake_at(service, what) as fake:
            until(lambda: len(fake.tokens) > 8)
            rank.do("steps", 20)
            assert rank.process.poll() is None
            assert set(fake.tokens) == {f"Bearer {TOKEN}"}, "the enrolment key is not sent"
        service.start()
        service.order(KILL)
        until(lambda: rank.process.poll() is not None)  # the real one is obeyed
        assert agent.running()
