"""Lost ranks and lost telemetry: told apart, once, with the first mover named."""

from __future__ import annotations

from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Occurrence, Severity
from rankwatch_detectors.ends.rank_lost import RankLostConfig, RankLostDetector
from rankwatch_detectors.ends.telemetry_lost import TelemetryLostConfig, TelemetryLostDetector
from tests.support.values.presences import ATTEMPT, Clockwork, topology


def lost_job(ranks: int = 4) -> Clockwork:
    return Clockwork(RankLostDetector(RankLostConfig()), ranks)


def event(job: Clockwork, kind: str, rank: int | None, attempt: str = ATTEMPT, **fields: Any) -> list[Finding]:
    return list(job.detector.observe(Occurrence(kind, attempt, "host-0", job.now_s, rank, 50, fields)))


def exited(job: Clockwork, rank: int, **fields: Any) -> list[Finding]:
    return event(job, "process_exit", rank, **{"code": None, "signal": None, "how": "pidfd", "error": "", **fields})


CONNECTION = "RuntimeError: [gloo] Connection closed by peer"


def test_a_killed_rank_is_named_with_its_signal() -> None:
    (finding,) = exited(lost_job(), 2, signal=9)
    assert (str(finding.scope), finding.ranks, finding.severity) == ("rank:2", (2,), Severity.CRITICAL)
    assert "SIGKILL" in finding.summary
    assert finding.onset_step == 50


def test_ranks_that_follow_within_the_launchers_grace_are_consequences() -> None:
    job = lost_job()
    findings = exited(job, 2, signal=9)
    for rank in (0, 1, 3):
        job.tick()
        findings += exited(job, rank, code=1, error=CONNECTION)
    assert {str(finding.scope) for finding in findings} == {"rank:2"}
    assert [finding.change for finding in findings] == [Change.OPEN, Change.UPDATE, Change.UPDATE]
    assert [other["rank"] for other in findings[-1].evidence["also_ended"]] == [0, 1, 3]
    assert findings[-1].ranks == (2,)


def test_a_crash_that_is_heard_after_its_consequences_becomes_the_first_mover() -> None:
    job = lost_job()
    findings = exited(job, 0, code=1, error=CONNECTION) + exited(job, 3, signal=11)
    assert [(f.change, f.ranks) for f in findings] == [(Change.OPEN, (3,))]
    assert "SIGSEGV" in findings[-1].summary
    assert findings[-1].evidence["also_ended"][0]["rank"] == 0


def test_an_end_much_later_is_an_episode_of_its_own() -> None:
    job = lost_job()
    findings = exited(job, 0, signal=9) + job.stand(50) + exited(job, 1, signal=9)
    assert [(f.change, str(f.scope)) for f in findings] == [(Change.OPEN, "rank:0"), (Change.OPEN, "rank:1")]


def test_a_rank_that_left_its_loop_is_not_lost() -> None:
    job = lost_job()
    assert event(job, "rank_left", 1, reason="end") + exited(job, 1, code=0) == []


@pytest.mark.parametrize("order", [{"phase": "kill", "action": "relaunch"}, {"phase": "do", "action": "stop"}])
def test_processes_ended_by_order_are_expected(order: dict[str, str]) -> None:
    job = lost_job()
    event(job, "order", None, order="o", step=5, **order)
    assert exited(job, 0, signal=9) + exited(job, 1, signal=9) == []


def test_an_exit_that_nobody_could_read_is_told_from_the_progress_block() -> None:
    job = lost_job()
    job.state[3] = "exited"
    assert job.stand(2) == []
    (finding,) = job.stand(5)
    assert finding.ranks == (3,)
    assert finding.evidence["code"] is None


def test_it_closes_with_the_next_attempt_and_forgets_who_was_gone() -> None:
    job = lost_job()
    exited(job, 2, signal=9)
    assert [f.change for f in job.begin("next.0")] == [Change.CLOSE]
    (finding,) = event(
        job, "process_exit", 2, attempt="next.0", code=1, signal=None, how="pidfd", error="ValueError: x"
    )
    assert finding.attempt == "next.0"
    assert "ValueError" in finding.summary


def test_an_exit_of_an_older_launch_is_history() -> None:
    job = lost_job()
    job.begin("next.0")
    assert exited(job, 2, signal=9) == []


def test_an_exit_after_a_rollback_inside_the_processes_belongs_to_the_running_attempt() -> None:
    job = lost_job()
    job.begin("run.1")
    (finding,) = exited(job, 2, signal=9)
    assert finding.attempt == "run.1"


# ---- telemetry_lost ----


def watched_job(hosts: int = 1) -> Clockwork:
    job = Clockwork(TelemetryLostDetector(TelemetryLostConfig()), 4)
    if hosts > 1:
        job.attempt = "wide.0"
        job.detector.observe(AttemptStart("wide.0", topology(4, hosts=hosts), job.now_s))
    job.train(10)
    return job


def test_a_silent_host_is_told_after_ten_seconds_and_closed_when_it_is_back() -> None:
    job = watched_job(hosts=2)
    job.silent = {2, 3}
    findings = job.stand(10)
    assert findings == []
    findings = job.stand(20)
    job.silent = set()
    findings += job.stand(2)
    assert [(f.change, str(f.scope), f.ranks) for f in findings] == [
        (Change.OPEN, "host:host-1", ()),
        (Change.CLOSE, "host:host-1", ()),
    ]
    assert findings[0].evidence["silent_s"] > 10


def test_all_hosts_silent_at_once_are_told_as_one() -> None:
    job = watched_job(hosts=4)
    job.silent = {0, 1, 2, 3}
    findings = job.stand(60)
    assert [(f.change, str(f.scope)) for f in findings] == [(Change.OPEN, "job")]
    job.silent = set()
    assert [(f.change, str(f.scope)) for f in job.stand(2)] == [(Change.CLOSE, "job")]


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_restart_of_the_service_before_the_stream_is_nobodys_silence(hosts: int) -> None:
    job = watched_job(hosts=hosts)
    job.silent = {0, 1, 2, 3}
    findings = job.stand(29)
    for rank in range(4):
        job.silent.discard(rank)
        findings += job.stand(2)
    assert findings == []


def test_what_was_told_of_some_hosts_stays_open_when_the_last_one_falls_silent_too() -> None:
    job = watched_job(hosts=4)
    job.silent = {0, 1, 2}
    assert [f.change for f in job.stand(12)] == [Change.OPEN]
    job.silent = {0, 1, 2, 3}
    assert [f.change for f in job.stand(40)] == [Change.UPDATE]


def test_the_normal_end_of_a_job_is_no_loss() -> None:
    job = watched_job()
    job.state = ["left"] * 4
    job.silent = {0, 1, 2, 3}
    assert job.stand(100) == []


def test_ranks_that_are_gone_owe_no_telemetry() -> None:
    job = watched_job(hosts=2)
    job.state[2:] = ["exited", "left"]
    job.silent = {2, 3}
    assert job.stand(100) == []


def test_a_host_whose_ranks_turn_out_to_have_ended_is_closed() -> None:
    job = watched_job(hosts=2)
    job.silent = {2, 3}
    assert len(job.stand(20)) == 1
    job.state[2:] = ["exited", "exited"]
    (finding,) = job.tick()
    assert finding.change is Change.CLOSE
    assert "ended" in finding.summary


def test_the_absence_of_the_stream_itself_is_nobodys_silence() -> None:
    job = watched_job()
    job.now_s += 300.0
    job.silent = {0, 1, 2, 3}
    assert job.stand(5) == []
    job.silent = set()
    assert job.stand(20) == []


def test_a_few_missing_messages_are_no_loss_and_many_are() -> None:
    job = watched_job()
    assert event(job, "gap", None, missing=3, boot="b") + job.tick() == []
    event(job, "gap", None, missing=40, boot="b")
    (finding,) = job.tick()
    assert (finding.change, str(finding.scope), finding.evidence["messages_missing"]) == (
        Change.OPEN,
        "host:host-0",
        43,
    )
    assert [f.change for f in job.stand(70)] == [Change.CLOSE]


def test_hosts_that_fall_silent_while_the_job_is_being_ended_are_no_news() -> None:
    job = watched_job(hosts=4)
    event(job, "process_exit", 0, attempt="wide.0", signal=15, code=None)
    job.silent = {1, 2, 3}
    assert job.stand(60) == []


def test_a_new_attempt_ends_what_was_said_about_the_old_one() -> None:
    job = watched_job()
    job.silent = {0, 1, 2, 3}
    job.stand(40)
    assert [f.change for f in job.begin("next.0")] == [Change.CLOSE]


def test_hosts_that_fall_silent_within_seconds_are_one_episode_that_grows() -> None:
    job = watched_job(hosts=4)
    findings = []
    for rank in range(3):
        job.silent.add(rank)
        findings += job.stand(3)
    findings += job.stand(12)
    assert [(f.change, str(f.scope)) for f in findings] == [
        (Change.OPEN, "host:host-0"),
        (Change.UPDATE, "host:host-0"),
        (Change.UPDATE, "host:host-0"),
    ]
    assert findings[-1].evidence["hosts"] == ["host-0", "host-1", "host-2"]
    assert findings[-1].summary.startswith("3 of the job's 4 hosts have sent no telemetry for")
    job.silent = {2}
    assert job.stand(3) == []
    job.silent = set()
    assert [f.change for f in job.tick()] == [Change.CLOSE]


def test_a_host_that_falls_silent_much_later_is_an_episode_of_its_own() -> None:
    job = watched_job(hosts=4)
    job.silent = {0}
    findings = job.stand(60)
    job.silent = {0, 1}
    findings += job.stand(20)
    assert [(f.change, str(f.scope)) for f in findings] == [
        (Change.OPEN, "host:host-0"),
        (Change.OPEN, "host:host-1"),
    ]


def test_a_host_that_comes_and_goes_while_others_stay_silent_is_not_told_again() -> None:
    job = watched_job(hosts=4)
    job.silent = {0, 1}
    assert len(job.stand(40)) == 1
    job.silent = {1}
    assert job.stand(5) == []
    job.silent = {0, 1}
    assert job.stand(40) == []


def test_hosts_that_come_back_one_after_the_other_leave_the_episode_open_until_the_last_one() -> None:
    job = watched_job(hosts=4)
    job.silent = {0, 1, 2, 3}
    assert [str(f.scope) for f in job.stand(40)] == ["job"]
    for rank in (0, 1, 2):
        job.silent.discard(rank)
        assert job.stand(2) == []
    job.silent.clear()
    assert [f.change for f in job.tick()] == [Change.CLOSE]


@pytest.mark.parametrize("hosts", [1, 4])
def test_that_the_stream_was_away_ends_no_silence(hosts: int) -> None:
    job = watched_job(hosts=hosts)
    job.silent = {0, 1, 2, 3}
    assert [f.change for f in job.stand(40)] == [Change.OPEN]
    job.now_s += 300.0
    assert job.stand(30) == []


def test_hosts_that_lose_messages_together_are_one_episode() -> None:
    job = watched_job(hosts=4)
    findings: list[Finding] = []
    for host in ("host-0", "host-2"):
        lost = Occurrence("gap", "wide.0", host, job.now_s, None, None, {"missing": 40, "boot": "b"})
        findings += [*job.detector.observe(lost), *job.tick()]
    assert [(f.change, f.evidence["messages_missing"]) for f in findings] == [(Change.OPEN, 40), (Change.UPDATE, 80)]
    assert "2 of the job's 4 hosts lost 80 messages" in findings[-1].summary
