"""What is said of a rank from which no stack comes, tried on a real process."""

import os
import signal
from pathlib import Path

import pytest

from rankwatch.agent import hang_stacks
from rankwatch.agent.clock import HostClock
from rankwatch.agent.processes import read_stat
from rankwatch.agent.ranks import LocalRanks
from tests.support.clock import FakeClock
from tests.support.ranks.recording_rank import RecordingRank


def stopped(pid: int) -> bool:
    stat = read_stat(pid)
    return stat is not None and stat.state in hang_stacks.STOPPED_STATES


def test_a_rank_that_is_stopped_just_after_it_was_looked_at_is_called_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RecordingRank(tmp_path) as rank:
        (local,) = LocalRanks(tmp_path, "gpt").scan()
        clock = FakeClock()
        taker = hang_stacks.Stacks(clock)
        look = hang_stacks.catches

        def then_stop(pid: int, number: int) -> bool:
            found = look(pid, number)
            os.kill(pid, signal.SIGSTOP)
            while not stopped(pid):
                pass
            return found

        with monkeypatch.context() as patch:
            patch.setattr(hang_stacks, "catches", then_stop)
            taker.begin("r1", local)
        assert taker.take() == [], "a handler that runs late would still be waited for"
        clock.advance(hang_stacks.STACK_WAIT_S)
        ((_, event),) = taker.take()
        assert event.fields["reason"] == hang_stacks.STOPPED
        assert event.fields["os_state"] in hang_stacks.STOPPED_STATES
        os.kill(rank.pid, signal.SIGCONT)


def test_ranks_of_a_host_at_the_same_place_send_its_text_once_for_each_request(tmp_path: Path) -> None:
    with RecordingRank(tmp_path, 0), RecordingRank(tmp_path, 1), RecordingRank(tmp_path, 2) as other:
        other.do("hang", "forward")
        ranks = LocalRanks(tmp_path, "gpt").scan()
        taker = hang_stacks.Stacks(HostClock())
        for request in ("r1", "r2"):
            for rank in ranks:
                taker.begin(request, rank)
            events = []
            while taker.pending:
                events += [event for _, event in taker.take()]
            by_rank = {event.rank: event.fields for event in events}
            assert by_rank[0]["place"] == by_rank[1]["place"] != by_rank[2]["place"]
            assert sorted(bool(by_rank[rank]["stack"]) for rank in (0, 1)) == [False, True]
            assert "_endless_loop" in by_rank[2]["stack"]
            assert by_rank[2]["where"].startswith("_endless_loop (recording_rank.py:")
            assert {fields["reason"] for fields in by_rank.values()} == {""}
