"""Lost ranks and lost telemetry: the first mover is named, and whether somebody asked for the end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Occurrence, Severity
from rankwatch_detectors.ends.rank_lost import RankLostConfig, RankLostDetector
from rankwatch_detectors.ends.restart_loop import RestartLoopConfig, RestartLoopDetector
from rankwatch_detectors.ends.telemetry_lost import TelemetryLostConfig, TelemetryLostDetector
from tests.support.values.presences import ATTEMPT, Clockwork, topology

SIGHUP, SIGINT, SIGABRT, SIGKILL, SIGTERM = 1, 2, 6, 9, 15
BROKEN = "RuntimeError: [gloo] Connection closed by peer"
INTERRUPTED = "KeyboardInterrupt: "


class Ends(Clockwork):
    """A job whose ranks end as they are told, each with its time on the clock of its host."""

    def __init__(self, ranks: int = 4, hosts: int = 1) -> None:
        self.hosts = hosts
        super().__init__(RankLostDetector(RankLostConfig()), ranks)
        on_hosts(self, hosts)
        self.train(5)

    def event(self, kind: str, rank: int, at_s: float | None, **fields: Any) -> list[Finding]:
        host = f"host-{rank * self.hosts // self.ranks}"
        unix_ns = int((1_000 + (self.now_s if at_s is None else at_s)) * 1e9)
        self.state[rank] = "left" if kind == "rank_left" else "exited"
        reported = Occurrence(kind, self.attempt, host, self.now_s, rank, self.step[rank], fields, unix_ns)
        return [*self.detector.observe(reported)]

    def exit(self, rank: int, at_s: float | None = None, **fields: Any) -> list[Finding]:
        return self.event("process_exit", rank, at_s, **{"code": None, "signal": None, "error": "", **fields})

    def raises(self, rank: int, error: str, at_s: float | None = None, **fields: Any) -> list[Finding]:
        kind, _, message = error.partition(": ")
        return self.event("exception", rank, at_s, type=kind, message=message, **fields)

    def leave(self, rank: int) -> list[Finding]:
        return self.event("rank_left", rank, None, reason="end")


def event(job: Clockwork, kind: str, rank: int | None, attempt: str = ATTEMPT, **fields: Any) -> list[Finding]:
    return [*job.detector.observe(Occurrence(kind, attempt, "host-0", job.now_s, rank, 50, fields))]


def outcome(findings: list[Finding]) -> list[tuple[Change, Severity, tuple[int, ...]]]:
    """What people see of it: everything but evidence that grows."""
    seen: list[tuple[Change, Severity, tuple[int, ...]]] = []
    for finding in findings:
        line = (finding.change, finding.severity, finding.ranks)
        if not seen or finding.change is not Change.UPDATE or line[1:] != seen[-1][1:]:
            seen.append(line)
    return seen


def on_request(findings: list[Finding]) -> bool:
    """Whether one piece of information is all that came of it."""
    closed = [finding for finding in findings if finding.change is Change.CLOSE]
    return (
        {finding.severity for finding in findings} == {Severity.INFO}
        and len({str(finding.scope) for finding in findings}) == 1
        and [finding.evidence.get("ended_on_request") for finding in closed] == [True]
    )


@pytest.mark.parametrize(
    "first",
    [
        {"signal": SIGINT},
        {"signal": SIGTERM},
        {"signal": SIGINT, "error": INTERRUPTED},
        {"code": 1, "error": INTERRUPTED},
        {"code": 130},
        {"code": 143, "error": "SystemExit: 143"},
    ],
)
def test_a_job_whose_first_rank_was_asked_to_end_has_ended_on_request_however_the_others_end(first) -> None:
    job = Ends()
    findings = job.exit(1, **first)
    job.tick()
    findings += job.exit(0, code=1, error=BROKEN)
    job.tick()
    findings += job.exit(2, signal=SIGABRT)
    findings += job.stand(29)
    findings += job.exit(3, signal=SIGKILL)
    assert on_request(findings), outcome(findings)
    assert findings[-1].summary.startswith("The job was ended ")
    assert [end["rank"] for end in findings[-1].evidence["also_ended"]] == [0, 2, 3]
    assert job.stand(100) == []


def test_the_only_rank_of_a_job_that_is_interrupted_is_one_piece_of_information() -> None:
    reported = outcome(Ends(ranks=1).exit(0, signal=SIGINT, error=INTERRUPTED))
    assert reported == [(Change.OPEN, Severity.INFO, (0,)), (Change.CLOSE, Severity.INFO, (0,))]


def test_an_interrupted_rank_whose_peer_is_gone_before_it_was_the_first_all_the_same() -> None:
    job = Ends(ranks=2)
    findings = job.raises(0, INTERRUPTED)
    job.tick()
    findings += job.exit(1, code=1, error=BROKEN)
    job.tick()
    findings += job.exit(0, signal=SIGINT, error=INTERRUPTED)
    assert on_request(findings), outcome(findings)
    assert findings[-1].ranks == (0,)


def test_an_interruption_that_is_heard_after_what_it_brought_is_the_first_mover_without_a_false_word() -> None:
    job = Ends(hosts=2)
    findings = job.exit(3, 5.4, code=1, error=BROKEN)
    job.tick()
    findings += job.exit(0, 5.1, signal=SIGINT, error=INTERRUPTED)
    findings += job.exit(1, 5.5, signal=SIGTERM) + job.exit(2, 5.5, signal=SIGTERM)
    assert on_request(findings), outcome(findings)


@pytest.mark.parametrize("error", ["SystemExit: 3", "SystemExit: no data in /data", "SystemExit: -1"])
def test_a_rank_that_its_launcher_ends_while_it_shuts_down_after_an_exit_of_its_own_was_the_first(error) -> None:
    job = Ends(ranks=2)
    findings = job.raises(1, error, 5.0) + job.raises(0, BROKEN, 5.4)
    findings += job.exit(0, 5.5, code=1, error=BROKEN, exit_order=0)
    findings += job.exit(1, 5.6, signal=SIGTERM, error=error, exit_order=1) + job.stand(60)
    assert (findings[-1].severity, findings[-1].ranks) == (Severity.CRITICAL, (1,))


@pytest.mark.parametrize(
    "crash", [{"code": 1, "error": "ValueError: broken batch"}, {"signal": SIGKILL}, {"code": 3}, {"signal": SIGABRT}]
)
@pytest.mark.parametrize("heard_last", [False, True])
def test_a_launchers_sigterm_after_a_crash_is_its_consequence(crash, heard_last) -> None:
    job = Ends()
    findings: list[Finding] = []
    for rank in (0, 1, 3, 2) if heard_last else (2, 0, 1, 3):
        findings += job.exit(2, 5.0, **crash) if rank == 2 else job.exit(rank, 5.2, signal=SIGTERM)
    findings += job.stand(60)
    assert (findings[-1].severity, findings[-1].ranks) == (Severity.CRITICAL, (2,))
    assert {finding.change for finding in findings} == {Change.OPEN, Change.UPDATE}


def test_a_job_that_others_end_because_a_host_died_was_not_ended_on_request() -> None:
    job = Ends(hosts=2)
    job.silent = {2, 3}
    findings = job.raises(0, BROKEN, 6.0) + job.raises(1, BROKEN, 6.01)
    findings += job.exit(0, 6.2, signal=SIGTERM) + job.exit(1, 6.2, signal=SIGTERM)
    findings += job.stand(60)
    assert outcome(findings) == [(Change.OPEN, Severity.CRITICAL, (0,))]


def test_a_rank_that_a_signal_ended_was_first_though_its_peer_spoke_before_it_was_gone() -> None:
    job = Ends(ranks=2)
    findings = job.raises(1, BROKEN, 6.0)
    findings += job.exit(0, 6.1, signal=SIGTERM, exit_order=0)
    findings += job.exit(1, 6.4, code=1, error=BROKEN, exit_order=1)
    assert on_request(findings), outcome(findings)


OWN_ERRORS = [
    ("TimeoutError: object store: reading shard-3.tar timed out", "train.py:9 in load"),
    ("RuntimeError: no such key in the store", "train.py:9 in load"),
    ("OSError: [Errno 5] socket file", "train.py:9 in load, in site-packages/s3fs/core.py:20 in get"),
    ("ValueError: peer review data is broken", ""),
    ("DistillationError: the teacher timed out", "train.py:9 in load"),
]


@pytest.mark.parametrize(("error", "where"), OWN_ERRORS)
@pytest.mark.parametrize("victim", [{"signal": SIGABRT}, {"code": 1, "error": BROKEN}], ids=["aborted", "broken"])
@pytest.mark.parametrize("heard_last", [False, True])
def test_an_error_of_ones_own_is_the_cause_though_it_speaks_of_time_outs_and_the_others_were_gone_first(
    error: str, where: str, victim: dict[str, Any], heard_last: bool
) -> None:
    job = Ends(ranks=3)
    findings: list[Finding] = []
    for rank in (0, 2, 1) if heard_last else (1, 0, 2):
        if rank == 1:
            findings += job.exit(1, 8.0, code=1, error=error, where=where)
        else:
            findings += job.exit(rank, 6.0, **victim)
    assert outcome(findings)[-1][1:] == (Severity.CRITICAL, (1,))


def test_an_interruption_without_a_message_is_told_once() -> None:
    findings = Ends(ranks=1).exit(0, signal=SIGINT, error=INTERRUPTED)
    assert "(SIGINT, KeyboardInterrupt)" in findings[0].summary


def test_the_sentence_takes_the_first_line_of_a_message_and_ends_with_one_full_stop() -> None:
    job = Ends(ranks=2)
    findings = job.raises(1, "RuntimeError: a worker was killed by signal: Killed. \nSee above.")
    findings += job.exit(1, code=1)
    assert findings[0].summary.endswith("RuntimeError: a worker was killed by signal: Killed.")


@pytest.mark.parametrize(
    ("error", "where"),
    [
        ("RuntimeError: [pair.cc:534] Connection closed by peer", "train.py:9 in step"),
        ("RuntimeError: wait timeout after 1800000 ms", "train.py:9 in step, in torch/autograd/graph.py:8 in run"),
        ("DistStoreError: wait for key", "train.py:9 in step, in site-packages/torch/distributed/rendezvous.py:3 in f"),
        ("DistBackendError: the operation has failed", ""),
    ],
)
def test_an_error_of_torchs_communication_is_a_victims(error: str, where: str) -> None:
    job = Ends(ranks=2)
    findings = job.exit(0, 6.0, code=1, error=error, where=where)
    findings += job.exit(1, 7.0, signal=SIGKILL)
    assert outcome(findings)[-1][1:] == (Severity.CRITICAL, (1,))


@pytest.mark.parametrize(
    ("first", "second", "named"),
    [
        ({"signal": SIGKILL}, {"signal": SIGKILL}, (0, 1)),
        ({"code": 1, "error": "ValueError: a"}, {"code": 1, "error": "ValueError: b"}, (0, 1)),
        ({"signal": SIGKILL}, {"code": 1, "error": BROKEN}, (0,)),
        ({"code": 1, "error": "SystemExit: 1"}, {"code": 1, "error": "SystemExit: 1"}, (0,)),
        ({"signal": SIGKILL}, {"signal": 11}, (0,)),
    ],
)
def test_of_ranks_that_end_alike_at_once_all_are_named(first, second, named) -> None:
    job = Ends(ranks=3)
    findings = job.exit(0, 6.0, **first) + job.exit(1, 6.3, **second) + job.exit(2, 6.5, code=1, error=BROKEN)
    assert findings[-1].ranks == named
    assert ("; so did rank 1" in findings[-1].summary) is (len(named) == 2)


def test_an_abort_among_broken_connections_is_the_cause() -> None:
    job = Ends(ranks=2)
    findings = job.exit(0, 6.0, code=1, error=BROKEN) + job.exit(1, 7.0, signal=SIGABRT)
    assert outcome(findings)[-1][1:] == (Severity.CRITICAL, (1,))


def test_a_closed_terminal_ends_the_job_in_one_sentence() -> None:
    job = Ends(ranks=2)
    findings = job.exit(0, 6.0, signal=SIGHUP) + job.exit(1, 6.1, signal=SIGHUP)
    warned = (Severity.WARNING, (0,))
    assert outcome(findings) == [(Change.OPEN, *warned), (Change.CLOSE, *warned)], "nobody may have meant it"
    assert findings[-1].summary.startswith("The job was ended by SIGHUP (its terminal was closed): all 2 ranks ended")


@pytest.mark.parametrize(
    ("reason", "done", "missed"),
    [("break", False, True), ("break", True, False), ("end", False, False)],
    ids=["the others work in that step", "the others are done too", "its loop was over"],
)
def test_one_that_leaves_before_a_step_in_which_the_others_work_is_what_they_wait_for(reason, done, missed) -> None:
    job = Ends(ranks=2)
    if done:
        job.rest(1)
    job.event("rank_left", 0, 5.0, reason=reason)
    findings = job.exit(0, 5.0, left=True) + job.stand(20)
    assert [finding.ranks for finding in findings[:1]] == [(0,)] * missed


def test_a_rank_that_went_in_good_order_and_too_early_is_what_the_others_complain_of() -> None:
    job = Ends(ranks=2)
    job.step = [50, 49]
    findings = job.raises(0, BROKEN, 6.0)
    job.event("rank_left", 1, 5.9, reason="break")
    findings += job.exit(1, 5.9, left=True) + job.exit(0, 6.0, code=1, error=BROKEN)
    assert outcome(findings)[-1][1:] == (Severity.CRITICAL, (1,))


def test_a_rank_that_broke_off_its_loop_is_named_before_its_process_is_gone() -> None:
    job = Ends(ranks=2)
    job.event("rank_left", 1, None, reason="break", where="train.py:19 in <module>")
    job.step = [50, 49]
    findings = job.stand(2)
    assert findings == []
    findings = job.stand(2)
    assert outcome(findings) == [(Change.OPEN, Severity.WARNING, (1,))]
    assert "left its loop in step 49 at train.py:19 in <module>" in findings[-1].summary
    findings += job.raises(0, BROKEN) + job.stand(1) + job.exit(0, signal=SIGTERM, error=BROKEN) + job.stand(3)
    assert outcome(findings)[1:] == [(Change.UPDATE, Severity.CRITICAL, (1,))]
    (finding,) = job.exit(1, code=3, error="SystemExit: 3", left=False)
    assert finding.summary == "Rank 1 on host-0 ended with exit code 3 at train.py:19 in <module>: SystemExit: 3."


def test_a_rank_that_was_asked_to_end_alone_is_lost_once_the_grace_is_over() -> None:
    job = Ends()
    findings = job.exit(1, signal=SIGTERM)
    findings += job.stand(44)
    assert outcome(findings) == [(Change.OPEN, Severity.INFO, (1,))]
    assert findings[0].confidence < 0.9, "a policy would act on it"
    findings += job.stand(3)
    assert outcome(findings)[1:] == [(Change.UPDATE, Severity.CRITICAL, (1,))]
    assert "3 of 4 ranks did not end within 45 s" in findings[-1].summary
    for rank in (0, 2, 3):
        findings += job.exit(rank, signal=SIGKILL)
    assert (findings[-1].change, findings[-1].severity) == (Change.UPDATE, Severity.CRITICAL)


def test_the_grace_that_the_job_tells_counts() -> None:
    job = Ends()
    findings = job.exit(1, signal=SIGTERM, grace_s=2.0)
    assert outcome(findings + job.stand(16)) == [(Change.OPEN, Severity.INFO, (1,))]
    assert outcome(job.stand(3)) == [(Change.UPDATE, Severity.CRITICAL, (1,))]


def test_ranks_whose_host_fell_silent_meanwhile_have_ended_with_it() -> None:
    job = Ends(hosts=2)
    findings = job.exit(0, signal=SIGTERM) + job.exit(1, signal=SIGTERM)
    job.silent = {2, 3}
    findings += job.stand(60)
    assert on_request(findings), outcome(findings)


def test_a_restart_ends_the_wait_for_the_others() -> None:
    job = Ends()
    findings = job.exit(1, signal=SIGTERM)
    reported = outcome(findings + job.begin("next.0") + job.stand(60))
    assert reported == [(Change.OPEN, Severity.INFO, (1,)), (Change.CLOSE, Severity.INFO, (1,))]


def test_an_exception_whose_process_does_not_end_is_told_with_its_place() -> None:
    job = Ends()
    findings = job.raises(2, "ValueError: broken batch", where="train.py:40 in <module>")
    assert findings == []
    (finding,) = job.stand(5)
    assert (finding.severity, finding.ranks) == (Severity.CRITICAL, (2,))
    assert finding.summary == "Rank 2 on host-0 ends at train.py:40 in <module>: ValueError: broken batch."
    assert finding.evidence["where"] == "train.py:40 in <module>"


def test_an_exception_after_the_loop_had_ended_is_the_jobs_own_affair() -> None:
    job = Ends(ranks=1)
    job.leave(0)
    error = "OSError: disk full"
    findings = job.raises(0, error, left=True) + job.exit(0, code=1, error=error, left=True)
    assert findings + job.stand(60) == []


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_ends_with_code_0_while_others_go_on_is_missed(leaves) -> None:
    job = Ends()
    if leaves:
        job.leave(1)
    findings = job.exit(1, code=0, left=leaves)
    job.step = [step + (rank != 1) for rank, step in enumerate(job.step)]
    findings += job.stand(8)
    assert outcome(findings) == [(Change.OPEN, Severity.WARNING, (1,))]
    assert "ended with exit code 0 at step 49, before the others were done" in findings[0].summary


@pytest.mark.parametrize("leaves", [True, False])
def test_ranks_that_train_on_without_one_do_not_miss_it(leaves) -> None:
    job = Ends()
    findings = job.leave(1) if leaves else []
    findings += job.exit(1, code=0, left=leaves) + go_on(job, 0, 2, 3)
    assert findings == []


def test_ranks_that_meet_now_and_then_miss_one_once_they_stand() -> None:
    job = Ends()
    findings = job.leave(1) + job.exit(1, code=0, left=True) + go_on(job, 0, 2, 3)
    assert findings == []
    assert outcome(job.stand(20)) == [(Change.OPEN, Severity.WARNING, (1,))]


@pytest.mark.parametrize("heard_last", [False, True])
def test_a_rank_that_breaks_off_in_the_step_in_which_the_others_lose_it_is_the_cause(heard_last) -> None:
    job = Ends(ranks=3)
    findings: list[Finding] = []
    for rank in (0, 1, 2) if heard_last else (1, 0, 2):
        if rank == 1:
            findings += job.event("rank_left", 1, None, reason="break") + job.exit(1, code=0, left=True)
        else:
            findings += job.raises(rank, BROKEN)
    findings += job.exit(0, code=1) + job.exit(2, code=1)
    assert outcome(findings)[-1][1:] == (Severity.CRITICAL, (1,))


def test_what_such_a_rank_brings_makes_it_critical() -> None:
    job = Ends()
    job.leave(1)
    findings = job.exit(1, code=0, left=True)
    job.step = [step + (rank != 1) for rank, step in enumerate(job.step)]
    for rank in (0, 2, 3):
        findings += job.exit(rank, code=1, error=BROKEN)
    assert outcome(findings)[-1] == (Change.OPEN, Severity.CRITICAL, (1,))


def at_their_own_pace() -> Ends:
    job = Ends()
    job.detector.observe(AttemptStart(job.attempt, replace(topology(4), lockstep=False), job.now_s))
    return job


def go_on(job: Ends, *ranks: int) -> list[Finding]:
    findings: list[Finding] = []
    for _ in range(60):
        job.step = [step + (rank in ranks) for rank, step in enumerate(job.step)]
        job.entered_s = [job.now_s if rank in ranks else at_s for rank, at_s in enumerate(job.entered_s)]
        findings += job.tick()
    return findings


@pytest.mark.parametrize("leaves", [True, False])
def test_a_rank_that_is_done_where_nobody_waits_for_it_is_information_that_grows(leaves) -> None:
    job = at_their_own_pace()
    findings: list[Finding] = []
    for rank, others in ((1, (0, 2, 3)), (2, (0, 3))):
        findings += job.leave(rank) if leaves else []
        findings += job.exit(rank, code=0, left=leaves) + go_on(job, *others)
    assert {finding.severity for finding in findings} == {Severity.INFO}
    assert "ended with exit code 0; the others go on at their own pace" in findings[0].summary
    assert "ended_on_request" not in findings[-1].evidence
    assert sum(finding.change is Change.OPEN for finding in findings) == 1


def test_what_ends_later_at_its_own_pace_is_a_first_mover_of_its_own() -> None:
    crashed, ended = at_their_own_pace(), at_their_own_pace()
    for job in (crashed, ended):
        assert outcome(job.exit(1, code=0) + go_on(job, 0, 2, 3)) == [(Change.OPEN, Severity.INFO, (1,))]
    assert outcome(crashed.exit(3, signal=SIGKILL)) == [(Change.OPEN, Severity.CRITICAL, (3,))]
    assert on_request([finding for rank in (0, 2, 3) for finding in ended.exit(rank, signal=SIGTERM)])


def test_ranks_that_finish_at_the_same_step_one_after_the_other_are_no_news() -> None:
    job = Ends()
    findings: list[Finding] = []
    for rank in range(4):
        findings += job.leave(rank) + job.exit(rank, code=0, left=True) + job.stand(20)
    assert findings == []


def test_answers_are_the_same_after_a_snapshot_at_any_event() -> None:
    def play(restoring: bool) -> list[Finding]:
        job = Ends(hosts=2)
        findings: list[Finding] = []

        def take(found: list[Finding]) -> None:
            findings.extend(found)
            if restoring:
                state = json.loads(json.dumps(job.detector.snapshot(), default=lambda array: array.tolist()))
                job.detector = RankLostDetector(RankLostConfig())
                job.detector.observe(AttemptStart(job.attempt, topology(4, hosts=2), 0.0))
                for name in ("_gone", "_left"):
                    state[name] = getattr(job.detector, name) | state[name]
                job.detector.restore(state)

        take(job.raises(0, INTERRUPTED))
        take(job.exit(1, code=1, error=BROKEN))
        take(job.stand(4))
        take(job.exit(0, signal=SIGINT, error=INTERRUPTED))
        take(job.exit(2, code=0))
        take(job.stand(10))
        take(job.exit(3, signal=SIGKILL))
        return findings

    assert play(restoring=True) == play(restoring=False)


def test_launches_that_were_asked_to_end_are_no_loop() -> None:
    detector = RestartLoopDetector(RestartLoopConfig(launches=3))
    for launch in range(6):
        assert detector.observe(AttemptStart(f"launch-{launch}.0", topology(2), float(launch))) == []
        for rank, signal in ((0, SIGTERM), (1, SIGKILL)):
            fields = {"code": None, "signal": signal, "error": ""}
            detector.observe(Occurrence("process_exit", f"launch-{launch}.0", "host-0", launch, rank, 5, fields))


def test_nobody_waits_for_ranks_that_left_in_good_order() -> None:
    job = Ends(ranks=2)
    job.leave(0)
    assert on_request(job.exit(1, signal=SIGTERM))


def test_a_killed_rank_is_named_with_its_signal_and_who_follows_within_the_launchers_grace_is_a_consequence() -> None:
    job = Ends()
    (first,) = findings = job.exit(2, signal=SIGKILL)
    assert (str(first.scope), first.severity, first.onset_step) == ("rank:2", Severity.CRITICAL, 49)
    assert "SIGKILL" in first.summary
    for rank in (0, 1, 3):
        job.tick()
        findings += job.exit(rank, code=1, error=BROKEN)
    assert {str(finding.scope) for finding in findings} == {"rank:2"}
    assert [finding.change for finding in findings] == [Change.OPEN, Change.UPDATE, Change.UPDATE]
    assert [other["rank"] for other in findings[-1].evidence["also_ended"]] == [0, 1, 3]
    assert findings[-1].ranks == (2,)


def test_an_end_much_later_is_an_episode_of_its_own() -> None:
    job = Ends()
    findings = job.exit(0, signal=9) + job.stand(50) + job.exit(1, signal=9)
    assert [(f.change, str(f.scope)) for f in findings] == [(Change.OPEN, "rank:0"), (Change.OPEN, "rank:1")]


@pytest.mark.parametrize("order", [{"phase": "kill", "action": "relaunch"}, {"phase": "do", "action": "stop"}])
def test_processes_ended_by_order_are_expected(order: dict[str, str]) -> None:
    job = Ends()
    event(job, "order", None, order="o", step=5, **order)
    assert job.exit(0, signal=9) + job.exit(1, signal=9) == []


def test_an_exit_that_nobody_could_read_is_told_from_the_progress_block() -> None:
    job = Ends()
    job.state[3] = "exited"
    assert job.stand(2) == []
    (finding,) = job.stand(5)
    assert finding.ranks == (3,)
    assert finding.evidence["code"] is None


def test_it_closes_with_the_next_attempt_and_forgets_who_was_gone() -> None:
    job = Ends()
    job.exit(2, signal=9)
    assert [f.change for f in job.begin("next.0")] == [Change.CLOSE]
    (finding,) = job.exit(2, code=1, error="ValueError: x")
    assert finding.attempt == "next.0"
    assert "ValueError" in finding.summary


@pytest.mark.parametrize(("running", "reported"), [("next.0", []), ("run.1", ["run.1"])])
def test_an_exit_of_an_older_launch_is_history_and_one_of_before_a_rollback_is_of_the_running_attempt(
    running, reported
):
    job = Ends()
    job.begin(running)
    exited = {"code": None, "signal": 9, "error": ""}
    assert [finding.attempt for finding in event(job, "process_exit", 2, **exited)] == reported


# ---- telemetry_lost ----


def on_hosts(job: Clockwork, hosts: int) -> None:
    if hosts > 1:
        job.attempt = "wide.0"
        job.detector.observe(AttemptStart(job.attempt, topology(job.ranks, hosts=hosts), job.now_s))


def watched_job(hosts: int = 1) -> Clockwork:
    job = Clockwork(TelemetryLostDetector(TelemetryLostConfig()), 4)
    on_hosts(job, hosts)
    job.train(10)
    return job


ALL = {0, 1, 2, 3}
BACK = [({1, 2, 3}, 2), ({2, 3}, 2), ({3}, 2)]
"""One host after the other speaks again."""


@pytest.mark.parametrize(
    ("hosts", "script", "reported"),
    [
        pytest.param(2, [({2, 3}, 10)], [], id="a host, for ten seconds"),
        pytest.param(2, [({2, 3}, 30), (set(), 2)], ["open host-1", "close host-1"], id="a host that is back"),
        pytest.param(4, [(ALL, 40), *BACK, (set(), 1)], ["open job", "close job"], id="all until the last is back"),
        pytest.param(1, [(ALL, 29), BACK[0], (set(), 8)], [], id="a restart of the service, one host"),
        pytest.param(4, [(ALL, 29), *BACK, (set(), 2)], [], id="a restart, four hosts"),
        pytest.param(4, [({0, 1, 2}, 12), (ALL, 40)], ["open host-0", "update host-0"], id="the last falls silent too"),
        pytest.param(4, [({0}, 60), ({0, 1}, 20)], ["open host-0", "open host-1"], id="another host much later"),
        pytest.param(4, [({0, 1}, 40), ({1}, 5), ({0, 1}, 40)], ["open host-0"], id="one comes and goes, another not"),
    ],
)
def test_silent_hosts_are_told_once_and_until_the_last_is_back(hosts, script, reported):
    job = watched_job(hosts)
    findings: list[Finding] = []
    for job.silent, seconds in script:
        findings += job.stand(seconds)
    assert [f"{f.change} {f.scope}".replace("host:", "") for f in findings] == reported
    assert all(f.evidence["silent_s"] > 10 for f in findings if f.change is Change.OPEN)


@pytest.mark.parametrize(("state", "silent"), [(["left"] * 4, ALL), (["running", "running", "exited", "left"], {2, 3})])
def test_ranks_that_are_gone_owe_no_telemetry_as_all_at_the_end_of_a_job(state: list[str], silent: set[int]) -> None:
    job = watched_job(hosts=2)
    job.state, job.silent = state, silent
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
    job.silent = ALL
    assert job.stand(5) == []
    job.silent = set()
    assert job.stand(20) == []


def test_a_few_missing_messages_are_no_loss_and_many_are() -> None:
    job = watched_job()
    assert event(job, "gap", None, missing=3, boot="b") + job.tick() == []
    event(job, "gap", None, missing=40, boot="b")
    (finding,) = job.tick()
    assert (finding.change, str(finding.scope)) == (Change.OPEN, "host:host-0")
    assert finding.evidence["messages_missing"] == 43
    assert [f.change for f in job.stand(70)] == [Change.CLOSE]


def test_hosts_that_fall_silent_while_the_job_is_being_ended_are_no_news() -> None:
    job = watched_job(hosts=4)
    event(job, "process_exit", 0, attempt="wide.0", signal=15, code=None)
    job.silent = {1, 2, 3}
    assert job.stand(60) == []


@pytest.mark.parametrize(
    ("goes_on", "said"), [(True, "training goes on (step "), (False, "no step has begun since step ")]
)
def test_of_a_silent_host_it_is_told_whether_training_goes_on(goes_on: bool, said: str) -> None:
    job = watched_job(hosts=4)
    job.silent = {1}
    findings = []
    for _ in range(12):
        job.step[1] -= 10 * goes_on  # nothing is heard of its steps
        findings += job.train(1) if goes_on else job.stand(1)
    (finding,) = findings
    assert finding.summary.startswith(
        "Host host-1 (1 of 4 ranks) has sent no telemetry for 11 s; the other hosts report, and "
    )
    assert (said in finding.summary, finding.evidence["steps_go_on"]) == (True, goes_on)


def test_hosts_that_fall_silent_within_seconds_are_one_episode_that_grows() -> None:
    job = watched_job(hosts=4)
    findings = []
    for rank in range(3):
        job.silent.add(rank)
        findings += job.stand(3)
    findings += job.stand(12)
    assert [f"{f.change} {f.scope}" for f in findings] == ["open host:host-0", *["update host:host-0"] * 2]
    assert findings[-1].evidence["hosts"] == ["host-0", "host-1", "host-2"]
    assert findings[-1].summary.startswith("3 of the job's 4 hosts have sent no telemetry for")
    job.silent = {2}
    assert job.stand(3) == []
    job.silent = set()
    assert [f.change for f in job.tick()] == [Change.CLOSE]


@pytest.mark.parametrize("hosts", [1, 4])
def test_that_the_stream_was_away_ends_no_silence_and_a_new_attempt_does(hosts: int) -> None:
    job = watched_job(hosts=hosts)
    job.silent = ALL
    assert [f.change for f in job.stand(40)] == [Change.OPEN]
    job.now_s += 300.0
    assert job.stand(30) == []
    assert [f.change for f in job.begin("next.0")] == [Change.CLOSE]


def test_hosts_that_lose_messages_together_are_one_episode() -> None:
    job = watched_job(hosts=4)
    findings: list[Finding] = []
    for host in ("host-0", "host-2"):
        lost = Occurrence("gap", "wide.0", host, job.now_s, None, None, {"missing": 40, "boot": "b"})
        findings += [*job.detector.observe(lost), *job.tick()]
    assert [(f.change, f.evidence["messages_missing"]) for f in findings] == [(Change.OPEN, 40), (Change.UPDATE, 80)]
    assert "2 of the job's 4 hosts lost 80 messages" in findings[-1].summary
