"""The agent dies, or the service is away, silent, full or refuses: what fits is kept, and the rest is counted."""

import os
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

from rankwatch import layout, wire
from rankwatch.spawn import lock_is_held
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import KEY, AgentService, small_disk, until
from tests.support.ranks.recording_rank import RecordingRank

pytestmark = pytest.mark.integration


def spooled_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("**/*.seg"))


def leave_a_spool(folder: Path, environment: dict[str, str], **reported: str) -> str:
    """Let a job of 50 steps end with 7 while nobody answers; the log of its agent."""
    with (
        RecordingRank(folder, **reported) as rank,
        AgentProcess(folder, environment, job=reported.get("job", "gpt")) as agent,
    ):
        rank.do("steps", 50)
        until(lambda: "rank 0" in agent.log)
        rank.say("exit", 7)
        rank.wait()
        assert agent.wait() == 0
        return agent.log


def test_everything_of_an_outage_arrives_once_afterwards_and_in_order(tmp_path, service, rank, agent):
    rank.do("steps", 10)
    until(lambda: len(service.rows()) == 10)
    service.stop()
    rank.do("steps", 500)
    until(lambda: spooled_bytes(tmp_path) > 500 * 60)
    rank.do("steps", 500)
    service.start()
    until(lambda: len(service.rows()) == 1_010)
    steps = [step for batch in service.batches for step in steps_of(batch)]
    assert steps == sorted(steps)
    assert max(service.rows().values()) == 1
    assert [batch.seq for batch in service.batches] == list(range(len(service.batches)))
    assert service.lost() == {}
    assert spooled_bytes(tmp_path) == 0
    assert "accepts telemetry again" in agent.log


def steps_of(batch: wire.Batch) -> list[int]:
    if batch.steps is None:
        return []
    column = batch.steps.columns["step"]
    return [int(step) + column.base for step in np.frombuffer(column.data, f"<{column.dtype}")]


def test_a_service_that_accepts_and_never_answers_holds_up_neither_the_loop_nor_the_end(tmp_path, service, rank, agent):
    until(lambda: service.batches)
    service.silent.set()
    rank.do("steps", 300)
    rank.say("exit", 4)
    rank.wait()
    # The sender waits for its answer; the loop goes on and finds the exit, which arrives when answers come again.
    until(lambda: "ended" in next(tmp_path.glob("*.log")).read_text())
    service.silent.clear()
    until(lambda: service.events("process_exit"))
    until(lambda: len(service.rows()) == 300)
    assert service.lost() == {}


def test_a_job_that_ends_during_an_outage_leaves_a_spool_that_the_next_agent_sends(tmp_path, service):
    service.stop()
    leave_a_spool(tmp_path, service.environment, launch="first")
    assert not list(tmp_path.glob("*.ring"))
    service.start()
    with RecordingRank(tmp_path, launch="second") as rank, AgentProcess(tmp_path, service.environment):
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 55)
    assert [event.fields["code"] for event in service.events("process_exit")] == [7]
    assert spooled_bytes(tmp_path) == 0


@pytest.mark.parametrize("by", ["the agent of another job", "rankwatch agent drain"])
def test_what_a_job_left_in_its_spool_is_sent_though_it_never_starts_again(tmp_path, service, by: str) -> None:
    service.stop()
    log = leave_a_spool(tmp_path, service.environment, job="over")
    drain = [sys.executable, "-m", "rankwatch.agent", "drain", "--dir", str(tmp_path)]
    environment = {**os.environ, "RANKWATCH_DIR": str(tmp_path), **service.environment}
    assert subprocess.run(drain, env=environment, check=False).returncode == 1, "there is still no service"
    service.start()
    if by == "rankwatch agent drain":
        assert subprocess.run(drain, env=environment, check=False).returncode == 0, log
    else:
        with RecordingRank(tmp_path), AgentProcess(tmp_path, service.environment):
            until(lambda: service.events("process_exit"))
    until(lambda: len([row for row in service.rows() if row[0] == "l.0"]) == 50)
    assert [event.fields["code"] for event in service.events("process_exit")] == [7]
    until(lambda: not spooled_bytes(tmp_path))


def test_what_was_meant_for_one_service_is_not_sent_to_another_by_the_agent_of_another_job(tmp_path, service) -> None:
    with AgentService() as gone:
        gone.stop()
        leave_a_spool(tmp_path, gone.environment, job="over")
    waiting = spooled_bytes(tmp_path)
    with RecordingRank(tmp_path) as rank, AgentProcess(tmp_path, service.environment) as agent:
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 5)
        rank.say("exit", 0)
        rank.wait()
        assert agent.wait() == 0
    assert {batch.job for batch in service.batches} == {"gpt"}
    assert spooled_bytes(tmp_path) == waiting


def test_without_a_service_the_agent_spools_says_so_in_one_line_and_finds_it_when_it_comes(tmp_path, service, rank):
    with AgentProcess(tmp_path, {}) as agent:
        rank.do("steps", 40)
        until(lambda: spooled_bytes(tmp_path) > 0)
        assert agent.log.count("no service is configured") == 1
        file = tmp_path / "home/.config/rankwatch/ingest.json"
        file.parent.mkdir(parents=True)
        file.write_text(f'{{"url": "{service.url}", "token": "from-the-file.k{KEY.hex()}"}}')
        until(lambda: len(service.rows()) == 40, 30.0)
        assert set(service.tokens) == {"Bearer from-the-file"}


@pytest.mark.parametrize("spool", ["on a full disk", "not a folder"])
def test_where_the_spool_cannot_be_written_it_is_said_once_memory_has_to_do_and_nothing_is_lost(
    tmp_path, spool, service, rank
):
    service.stop()
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with small_disk(tmp_path, 64) if spool == "on a full disk" else nullcontext(blocked) as path:
        with AgentProcess(tmp_path, {**service.environment, "RANKWATCH_SPOOL": str(path)}) as agent:
            rank.do("steps", 2_000)
            until(lambda: "kept in memory" in agent.log)
            service.start()
            until(lambda: len(service.rows()) == 2_000)
        assert spool != "not a folder" or agent.log.count("kept in memory") == 1
        assert service.lost() == {}


def test_two_agents_race_and_one_of_them_ends_at_once(tmp_path, service, rank):
    agents = [AgentProcess(tmp_path, service.environment) for _ in range(4)]
    try:
        until(lambda: sum(agent.supervisor.poll() == 0 for agent in agents) == 3)
        rank.do("steps", 100)
        until(lambda: len(service.rows()) == 100)
        assert max(service.rows().values()) == 1
        assert len({batch.boot for batch in service.batches}) == 1
    finally:
        for agent in agents:
            agent.kill()


def test_an_agent_reads_only_its_own_job(tmp_path, service):
    with (
        RecordingRank(tmp_path, job="gpt") as ours,
        RecordingRank(tmp_path, job="other") as theirs,
        AgentProcess(tmp_path, service.environment) as agent,
    ):
        theirs.do("steps", 5)
        ours.do("steps", 5)
        until(lambda: len(service.rows()) == 5)
        ours.say("end")
        assert agent.wait() == 0
        assert {batch.job for batch in service.batches} == {"gpt"}
        assert len(list(tmp_path.glob("*.ring"))) == 1


def test_the_daemon_gives_every_job_its_agent(tmp_path, service):
    with RecordingRank(tmp_path, job="a") as a, RecordingRank(tmp_path, job="b") as b:
        environment = {**os.environ, **service.environment}
        with subprocess.Popen(
            [sys.executable, "-m", "rankwatch.agent", "--dir", str(tmp_path)], env=environment
        ) as daemon:
            try:
                a.do("steps", 5)
                b.do("steps", 7)
                until(lambda: len(service.rows()) == 7)
                until(lambda: {batch.job for batch in service.batches} == {"a", "b"})
                a.say("end")
                b.say("end")
                until(lambda: not list(tmp_path.glob("*.ring")))
            finally:
                daemon.terminate()
            assert daemon.wait(60) == 0
        until(lambda: not any(lock_is_held(layout.agent_lock_path(str(tmp_path), job)) for job in ("a", "b")))


def test_told_to_stop_the_agent_stays_with_its_rank_then_sends_what_it_has_and_ends(service, rank, agent):
    until(lambda: service.batches)
    agent.supervisor.terminate()
    rank.do("steps", 20)
    rank.say("end")
    assert agent.wait() == 143
    assert len(service.rows()) == 20
    assert service.events("agent_stop")[0].fields == {"reason": "told to stop"}
    until(lambda: not agent.running())


def test_a_killed_worker_is_back_at_once_and_nothing_is_lost(service, rank, agent):
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


def test_when_worker_and_supervisor_are_killed_the_rank_goes_on_and_the_next_agent_tells_it_all(
    tmp_path, service, rank
):
    with AgentProcess(tmp_path, service.environment) as agent:
        rank.do("steps", 10)
        until(lambda: len(service.rows()) == 10)
    until(lambda: not agent.running())
    rank.do("steps", 1_000)
    with AgentProcess(tmp_path, service.environment):
        until(lambda: len(service.rows()) == 1_010)
    assert service.lost() == {}


def test_an_agent_whose_directory_is_removed_ends_with_its_rank(tmp_path, service):
    directory = tmp_path / "recorders"
    directory.mkdir()
    with RecordingRank(directory) as rank, AgentProcess(directory, service.environment) as agent:
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 5)
        shutil.rmtree(directory.rename(tmp_path / "removed"))  # at once: the agent writes there meanwhile
        rank.do("steps", 5)
        until(lambda: len(service.rows()) == 10)
        agent.kill_worker()
        assert agent.wait() == 0
        assert rank.process.poll() is None
