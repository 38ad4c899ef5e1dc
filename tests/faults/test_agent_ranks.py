"""Ranks end, crash, stop and hang; the agent reports how."""

import os
import signal
import time
from pathlib import Path

import pytest

from rankwatch import wire
from tests.support.agent.host import AgentProcess
from tests.support.agent.service import AgentService, until
from tests.support.ranks.recording_rank import RecordingRank

pytestmark = pytest.mark.integration


def exits(service: AgentService) -> dict[int, dict[str, object]]:
    return {event.rank: event.fields for event in service.events("process_exit") if event.rank is not None}


def blocks(service: AgentService, phase: str | None = None) -> list[wire.Progress]:
    reported = [block for batch in list(service.batches) for block in batch.progress]
    return [block for block in reported if phase in (None, block.phase)]


def settle(service: AgentService, count: int) -> None:
    """Wait until the agent watches this many ranks."""
    until(lambda: len({info.rank for batch in service.batches for info in batch.ranks}) == count)


def test_exit_codes_signals_and_exceptions_are_reported_within_a_second(tmp_path, service, rank):
    coded = rank
    with (
        RecordingRank(tmp_path, 1) as killed,
        RecordingRank(tmp_path, 2) as raising,
        RecordingRank(tmp_path, 3) as last,
        AgentProcess(tmp_path, service.environment),
    ):
        settle(service, 4)
        begin_s = time.monotonic()
        coded.say("exit", 3)
        coded.wait()
        killed.process.kill()
        killed.wait()
        raising.say("raise", "connection-reset-by-peer")
        raising.wait()
        until(lambda: len(exits(service)) == 3)
        assert time.monotonic() - begin_s < 15.0
        reported = exits(service)
        assert last.process.poll() is None
    assert (reported[0]["code"], reported[0]["signal"]) == (3, None)
    assert (reported[1]["code"], reported[1]["signal"]) == (None, signal.SIGKILL)
    assert (reported[2]["code"], reported[2]["signal"]) == (1, None)
    assert reported[2]["error"] == "ConnectionError: connection-reset-by-peer"
    assert {reported[rank]["how"] for rank in reported} <= {"pidfd", "zombie"}
    assert [reported[rank]["exit_order"] for rank in (0, 1, 2)] == [0, 1, 2]
    assert not any(reported[rank]["left"] for rank in reported)


def test_the_first_mover_is_the_one_whose_process_died_first_however_fast_the_others_follow(tmp_path, service):
    ranks = [RecordingRank(tmp_path, rank) for rank in range(6)]
    with AgentProcess(tmp_path, service.environment):
        settle(service, 6)
        order = [4, 1, 5, 0, 2, 3]
        for rank in order:
            ranks[rank].process.kill()
            ranks[rank].wait()
        until(lambda: len(exits(service)) == 6)
    for each in ranks:
        each.close()
    reported = exits(service)
    assert sorted(reported, key=lambda rank: int(str(reported[rank]["exit_order"]))) == order


def test_an_exit_is_reported_by_the_excepthook_or_as_unknown_when_the_process_was_gone_before_the_agent_came(
    tmp_path, service
):
    with RecordingRank(tmp_path, 0) as raising, RecordingRank(tmp_path, 1) as killed:
        raising.say("raise", "boom")
        raising.wait()
        killed.do("steps", 5)
        killed.process.kill()
        killed.wait()
    with AgentProcess(tmp_path, service.environment) as agent:
        assert agent.wait() == 0
    reported = exits(service)
    assert (reported[0]["how"], reported[0]["error"]) == ("excepthook", "ConnectionError: boom")
    assert (reported[0]["code"], reported[0]["abrupt"]) == (1, False)
    # Nobody is left who knows the signal, but that Python had no time to say anything says much.
    assert (reported[1]["how"], reported[1]["code"], reported[1]["signal"]) == ("unknown", None, None)
    assert reported[1]["abrupt"] is True
    assert len(service.rows()) == 5
    assert not list(tmp_path.glob("*.ring*"))


def test_an_agent_that_comes_up_late_still_reads_how_a_rank_ended_while_nobody_has_waited_for_it(
    tmp_path, service, rank
):
    killed = rank
    killed.do("steps", 5)
    killed.process.kill()
    until(lambda: Path(f"/proc/{killed.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with AgentProcess(tmp_path, service.environment):
        until(lambda: exits(service))
    assert (exits(service)[0]["signal"], exits(service)[0]["how"]) == (signal.SIGKILL, "zombie")


def test_an_agent_that_is_told_to_stop_tells_how_its_ranks_ended_first(tmp_path, service, rank, peer, agent):
    settle(service, 2)
    os.killpg(agent.supervisor.pid, signal.SIGTERM)
    rank.process.terminate()
    rank.wait()
    until(lambda: exits(service))
    os.killpg(agent.supervisor.pid, signal.SIGINT)
    boots = {batch.boot for batch in service.batches}
    agent.kill_worker()
    until(lambda: service.batches[-1].boot not in boots)
    peer.process.kill()
    peer.wait()
    ended_s = time.monotonic()
    assert agent.wait() == 143
    assert time.monotonic() - ended_s < 20.0
    reported = [(event.rank, event.fields["signal"]) for event in service.events("process_exit")]
    assert (reported[0], reported[-1]) == ((0, signal.SIGTERM), (1, signal.SIGKILL))
    assert [event.fields["reason"] for event in service.events("agent_stop")] == ["told to stop"]
    assert not list(tmp_path.glob("*.ring*"))


def test_an_agent_that_is_told_to_stop_and_has_no_rank_stops(service, agent):
    until(agent.running)
    os.killpg(agent.supervisor.pid, signal.SIGTERM)
    assert agent.wait(9.0) in (143, -signal.SIGTERM)


def test_a_loop_that_was_broken_off_by_an_exit_is_reported_with_status_and_place(service, rank, peer, agent):
    settle(service, 2)
    rank.say("loop_exit", 3)
    assert rank.wait() == 3
    until(lambda: exits(service))
    reported = exits(service)[0]
    assert (reported["code"], reported["error"], reported["left"]) == (3, "SystemExit: 3", False)
    assert "recording_rank.py:" in str(reported["where"])


def test_a_normal_end_is_distinguished_and_the_agent_ends_and_leaves_no_recorder(tmp_path, service, agent, rank):
    rank.do("steps", 5)
    began_s = time.monotonic()
    rank.say("end")
    assert rank.wait() == 0
    assert agent.wait() == 0
    assert time.monotonic() - began_s > 1.5, "it did not wait for another rank"
    assert exits(service)[0]["left"] is True
    assert [event.rank for event in service.events("rank_left")] == [0]
    assert len(service.rows()) == 5
    assert [event.kind for event in service.batches[-1].events] == ["agent_stop"]
    assert not list(tmp_path.glob("*.ring*"))
    assert not list(tmp_path.glob("**/*.seg"))


def test_a_process_that_closes_its_recorder_and_goes_on_is_let_go(service, agent, rank):
    rank.do("steps", 5)
    rank.do("close")
    assert agent.wait() == 0
    assert rank.process.poll() is None
    assert exits(service) == {}
    assert blocks(service)[-1].state == "left"
    assert len(service.rows()) == 5


def test_between_two_steps_the_agent_says_for_how_long_and_within_one_it_does_not(service, rank, agent):
    rank.do("steps", 5)
    until(lambda: len(blocks(service)) >= 3)
    first, *_, last = blocks(service)
    assert 0 <= first.outside_s < last.outside_s <= last.step_age_s
    rank.do("hang", "forward")
    until(lambda: blocks(service)[-1].step == 5)
    assert blocks(service)[-1].outside_s == -1.0


def test_torn_records_are_counted_and_the_others_arrive(tmp_path, service, rank):
    rank.do("steps", 3)
    rank.do("tear")
    rank.do("steps", 3)
    with AgentProcess(tmp_path, service.environment):
        until(lambda: len(service.rows()) == 5 and service.lost())
    assert sorted(step for _, step, _ in service.rows()) == [0, 1, 3, 4, 5]
    assert service.lost() == {"torn": 1}


def test_what_the_ring_could_not_keep_is_counted_exactly(tmp_path, service, rank):
    rank.do("steps", 20_000)
    with AgentProcess(tmp_path, service.environment):
        until(lambda: service.lost() and ("l.0", 19_999, 0) in service.rows())
    assert len(service.rows()) + service.lost()["ring"] == 20_000


def test_progress_is_reported_every_second_with_phase_ages_and_cpu_time(service, rank, agent):
    rank.do("steps", 3)
    rank.do("hang", "forward")
    until(lambda: len(blocks(service, "forward")) >= 3)
    first, *between, last = blocks(service, "forward")
    assert last.step == 3
    assert 0.7 < (last.phase_age_s - first.phase_age_s) / (len(between) + 1) < 2.0
    assert last.cpu_s > first.cpu_s
    assert last.state == "running"


def test_the_age_of_a_phase_counts_from_the_step_where_no_phase_has_a_name(service, rank, agent):
    rank.do("steps", 6, 0.5)
    until(lambda: any(block.step >= 5 for block in blocks(service)))
    late = [block for block in blocks(service) if block.step >= 3]
    assert {block.phase for block in late} == {""}
    assert all(block.phase_age_s == block.step_age_s for block in late)


def stacks(service: AgentService) -> list[wire.Event]:
    return service.events("stack_dump")


def test_a_hung_rank_shows_its_python_stack_once_for_each_request(service, rank, agent):
    settle(service, 1)
    rank.do("hang", "backward")
    service.order(stacks=(wire.StackRequest("r1", "l.0", (0,)),))
    until(lambda: stacks(service))
    service.order(stacks=(wire.StackRequest("r1", "l.0", (0,)), wire.StackRequest("r2", "l.0")))
    until(lambda: len(stacks(service)) == 2)
    service.order(stacks=(wire.StackRequest("other", "m.0", (0,)), wire.StackRequest("r3", "l.0", (0, 9))))
    until(lambda: len(stacks(service)) == 3)
    assert [event.fields["order"] for event in stacks(service)] == ["r1", "r2", "r3"]
    for event in stacks(service):
        assert "_endless_loop" in event.fields["stack"]
        assert event.fields["stack"].count("do_hang") == 1
        assert (event.rank, event.fields["phase"], event.fields["reason"]) == (0, "backward", "")
        assert event.fields["os_state"] == "R"
    assert rank.process.poll() is None


def test_a_hung_rank_shows_its_stack_before_it_is_killed(service, rank, agent):
    settle(service, 1)
    rank.do("hang", "backward")
    kill = wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch", culprits=(0,))
    service.order(kill, stacks=(wire.StackRequest("r1", "l.0", (0,)),))
    assert rank.wait() == -signal.SIGKILL
    until(lambda: stacks(service))
    assert "_endless_loop" in stacks(service)[0].fields["stack"]


def test_a_stopped_rank_has_no_python_stack_but_its_last_phase_and_step(service, rank, agent):
    settle(service, 1)
    rank.do("steps", 4)
    rank.do("hang", "forward")
    os.kill(rank.pid, signal.SIGSTOP)
    service.order(stacks=(wire.StackRequest("r1", "l.0", (0,)),))
    until(lambda: stacks(service))
    event = stacks(service)[0]
    assert (event.rank, event.step) == (0, 4)
    assert event.fields["reason"] == "stopped by a signal"
    assert (event.fields["stack"], event.fields["os_state"], event.fields["phase"]) == ("", "T", "forward")
    assert event.fields["cpu_ticks"] > 0
    os.kill(rank.pid, signal.SIGCONT)
    until(lambda: service.batches[-1].progress and service.batches[-1].progress[0].os_state == "R")


def test_a_rank_that_dies_while_its_stack_is_awaited_ends_no_agent(service, rank, peer, agent):
    settle(service, 2)
    rank.do("hang", "forward")
    service.order(stacks=(wire.StackRequest("r1", "l.0"),))
    rank.process.kill()
    until(lambda: exits(service) and len(stacks(service)) >= 1)
    until(lambda: {event.rank for event in stacks(service)} >= {1})
    assert "restart" not in agent.log


def ranks_of(service: AgentService, attempt: str) -> set[int]:
    """The ranks of an attempt that the agent has reported, some of them perhaps more than once."""
    return {rank.rank for batch in service.batches if batch.attempt == attempt for rank in batch.ranks}


def test_exits_are_numbered_anew_in_each_launch(tmp_path, service, agent):
    for launch in ("first", "second"):
        with RecordingRank(tmp_path, 0, launch=launch) as one, RecordingRank(tmp_path, 1, launch=launch) as two:
            until(lambda attempt=f"{launch}.0": ranks_of(service, attempt) == {0, 1})
            two.process.kill()
            two.wait()
            one.process.kill()
            one.wait()
    until(lambda: len(service.events("process_exit")) == 4)
    reported = [(event.rank, event.fields["exit_order"]) for event in service.events("process_exit")]
    assert sorted(reported[:2]) == sorted(reported[2:]) == [(0, 1), (1, 0)]
