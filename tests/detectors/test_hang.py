"""A standstill is told soon, the rank that did not arrive is named, and patience is had where it is due."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rankwatch_detectors.base import UNREPORTED, Change, Finding, Occurrence
from rankwatch_detectors.episodes import since
from rankwatch_detectors.progress.hang import HangDetector
from rankwatch_detectors.progress.progress_timeout import HangConfig, ProgressTimeout
from tests.support.detection.verdicts import opened
from tests.support.values.presences import Clockwork

RUNBOOK = Path(__file__).parents[2] / "docs" / "incidents" / "hang.md"


def training_job(ranks: int = 4, seconds: int = 20) -> Clockwork:
    """Ten steps a second for a while; then every rank waits in a collective."""
    job = Clockwork(HangDetector(HangConfig()), ranks)
    assert job.train(seconds) == []
    return job


def gravity(findings: list[Finding]) -> list[str]:
    """What each finding says, and how grave it is."""
    return [f"{finding.change} {finding.severity}" for finding in findings]


def everybody_waits(job: Clockwork, *, but: int) -> None:
    for rank in range(job.ranks):
        if rank != but:
            job.phase[rank] = "backward"
            job.sequence[rank] += 1


@pytest.mark.parametrize("readings", [1, 2])
def test_a_rank_stopped_in_the_first_seconds_is_found_though_nobody_knows_how_long_a_step_takes(readings: int) -> None:
    job = Clockwork(HangDetector(HangConfig()))
    job.now_s += 50.0  # the first step compiles
    job.step = [49] * job.ranks
    job.train(readings)
    job.os_state[1] = "T"
    (finding,) = opened(job.stand(12))
    assert (finding.severity, finding.ranks) == ("critical", (1,))
    assert finding.detected_time_s - finding.onset_time_s <= 10.0


@pytest.mark.parametrize(("steps_per_s", "known"), [(20, True), (2, False)])
def test_many_steps_in_a_few_readings_are_enough_to_know_how_long_one_takes(steps_per_s: int, known: bool) -> None:
    job = Clockwork(HangDetector(HangConfig()))
    job.train(4, steps_per_s=steps_per_s)
    everybody_waits(job, but=1)
    assert len(opened(job.stand(9))) == known
    assert [finding.ranks for finding in opened(job.stand(60))] == [(1,)] * (not known)


def test_a_debugger_that_stops_a_rank_for_a_moment_makes_no_hang_of_long_steps() -> None:
    job = Clockwork(HangDetector(HangConfig()))
    job.train(2, steps_per_s=1)
    for second in range(50):
        job.os_state[1] = "t" if second % 10 == 0 else "R"
        assert job.tick() == []


@pytest.mark.parametrize(
    ("witness", "reason"),
    [
        ("os_state", "stopped by a signal"),
        ("step", "it is in an earlier step"),
        ("sequence", "it has entered fewer collectives"),
        ("phase", "it is not in a collective, the others are"),
        ("cpu", "it computes, the others wait"),
        ("left", "it left its loop, the others wait"),
        ("silent", "it has stopped reporting"),
    ],
)
def test_each_witness_alone_names_the_rank_that_did_not_arrive(witness: str, reason: str) -> None:
    job = training_job()
    job.phase = ["backward"] * 4
    match witness:
        case "os_state":
            job.os_state[1] = "T"
        case "step":
            job.step = [step + (rank != 1) for rank, step in enumerate(job.step)]
        case "sequence":
            job.sequence = [number + (rank != 1) for rank, number in enumerate(job.sequence)]
        case "phase":
            job.phase[1] = "forward"
        case "left":
            job.state[1] = "left"
        case "silent":
            job.silent.add(1)
    findings = job.tick()
    for _ in range(9):
        job.cpu_s[1] += 1.0 if witness == "cpu" else 0.0
        findings += job.tick()
    assert [(f.ranks, f.evidence["decided_by"]) for f in findings] == [((1,), reason)] * 2


def test_when_nothing_tells_the_ranks_apart_nobody_is_named() -> None:
    job = training_job()
    job.phase = ["backward"] * 4
    (finding,) = opened(job.stand(8))
    assert finding.ranks == ()
    assert finding.confidence < 0.5


def test_a_rank_that_only_its_cpu_time_gives_away_later_is_named_by_an_update() -> None:
    job = training_job()
    job.phase = ["backward"] * 4
    findings = job.stand(6)
    for _ in range(20):
        job.cpu_s[2] += 1.0
        findings += job.tick()
    assert [(f.change, f.ranks) for f in findings] == [(Change.OPEN, ()), (Change.UPDATE, ()), (Change.UPDATE, (2,))]


def test_a_hang_opens_once_becomes_critical_once_and_closes_on_progress() -> None:
    job = training_job()
    everybody_waits(job, but=0)
    findings = job.stand(60) + job.train(3)
    assert gravity(findings) == ["open info", "update critical", "close critical"]
    opening, graver, closed = findings
    assert opening.evidence["waiting"] == [{"step": opening.onset_step, "phase": "backward", "ranks": 3}]
    assert graver.detected_time_s - graver.onset_time_s == 5.0
    assert all(since(opening.onset_time_s) in finding.summary for finding in (opening, graver))
    assert closed.evidence["age_s"] == closed.detected_time_s - opening.onset_time_s > 60


def test_an_onset_is_told_as_a_time_of_day_where_times_have_a_date() -> None:
    assert since(1_764_027_175.9) == "since 23:32:55 UTC"
    assert since(59.4) == "since 59 s"


def test_a_second_hang_is_told_again() -> None:
    job = training_job()
    everybody_waits(job, but=0)
    findings = job.stand(30)
    job.phase, job.sequence = [""] * 4, [job.sequence[1]] * 4
    findings += job.train(30)
    everybody_waits(job, but=3)
    findings += job.stand(30)
    assert gravity(findings) == ["open info", "update critical", "close critical", "open info", "update critical"]
    assert findings[-1].ranks == (3,)


def test_a_new_attempt_closes_the_hang() -> None:
    job = training_job()
    everybody_waits(job, but=0)
    job.stand(30)
    (finding,) = job.begin("run2.0")
    assert (finding.change, finding.attempt) == (Change.CLOSE, "run.0")


@pytest.mark.parametrize(("step_s", "jitter_s"), [(2, 0.0), (4, 0.0), (6, 0.3), (10, 1.0), (30, 2.0)])
def test_a_standstill_is_told_within_eight_seconds_or_twice_the_slowest_steps(step_s: int, jitter_s: float) -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    for count in range(40):
        assert job.stand(step_s) == []
        job.step = [job.step[0] + 1] * 4
        # Blocks say since when the step lasts, to a fraction of the tick.
        job.entered_s = [job.now_s - jitter_s * (count % 2)] * 4
    everybody_waits(job, but=1)
    findings = job.stand(5 * step_s + 10)
    assert gravity(findings) == ["open info", "update critical"]
    reported, critical = (finding.detected_time_s - finding.onset_time_s for finding in findings)
    assert reported <= max(8.0, 2 * (step_s + jitter_s))
    # A second more for progress blocks and ticks, which come once a second.
    assert critical <= max(5.0, 4.5 * step_s, 2 * (step_s + jitter_s)) + 1 + jitter_s
    assert findings[1].ranks == (1,)


@pytest.mark.parametrize(
    ("step_s", "slow_s", "critical_s"), [(0.03, 0.03, 5.0), (1.0, 1.0, 5.0), (1.6, 1.6, 7.2), (1.0, 3.9, 7.8)]
)
def test_a_standstill_within_a_step_is_critical_after_the_longest_of_three(step_s, slow_s, critical_s):
    progress_timeout = ProgressTimeout(HangConfig())
    for took_s in (*[step_s] * 97, *[slow_s] * 3):
        progress_timeout.learn_steps(took_s, 1)
    assert progress_timeout.in_step(log=False, cold=False, first="").critical_s == pytest.approx(critical_s)


def test_the_runbook_has_the_figures_of_the_settings() -> None:
    config = HangConfig()
    rows = {line.split(" | ")[0]: line for line in RUNBOOK.read_text().splitlines() if line.startswith("| ")}
    (phases,) = (row for start, row in rows.items() if start.startswith("| `compile`"))
    inside, outside = rows["| inside a step"], rows["| all outside"]
    assert (config.steps, config.slow_steps_factor, config.pause_factor, config.long_factor) == (3, 2, 3, 3)
    assert "after three usual steps" in inside
    assert f"at least {config.floor_s:g} s and at most {config.prompt_s:g} s, or twice what one step" in inside
    assert f"after {config.floor_s:g} s, {config.critical_steps:g} usual steps and twice what one step" in inside
    assert f"after max({config.pause_s:g} s, {config.pause_steps:g} usual steps)" in outside
    longest = "times the longest pause that ended well in this job"
    assert f"{config.pause_usual_factor:g} {longest}" in outside
    assert (
        f"three {longest}, at least {config.pause_known_s / 60:g} minutes; {config.pause_unknown_s / 60:g} min"
        in outside
    )
    minutes = [seconds / 60 for _, seconds in config.long_phases]
    *most, last = [f"{figure:g}" for figure in (*minutes, config.first_step_s / 60)]
    assert f"three times the longest seen, at least a minute; {', '.join(most)} and {last} minutes before" in phases
    stopped = rows[f"| a rank has been stopped by a signal for {config.stopped_s:g} s"]
    assert f"| {config.stopped_s:g} s, however long" in stopped


def test_one_slow_step_among_many_does_not_stretch_the_deadline() -> None:
    job = training_job(seconds=40)
    assert job.stand(3) + job.train(20) == []
    everybody_waits(job, but=2)
    assert gravity(job.stand(5)) == ["open info", "update critical"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("phase", ["backward", "backward", phase, "backward"]) for phase in ("eval", "checkpoint_save", "compile")),
        ("state", ["held"] * 4),
        ("state", ["running"] * 3 + ["exited"]),
        ("silent", {0, 1, 2, 3}),
    ],
    ids=["one evaluates", "one saves", "one compiles", "held by an order", "one is lost", "nothing is heard"],
)
def test_a_standstill_with_a_reason_or_without_evidence_is_no_hang(field: str, value: Any) -> None:
    job = training_job()
    setattr(job, field, value)
    assert job.stand(300) == []


def test_the_first_step_may_take_minutes_until_it_was_seen() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    job.phase = ["forward"] * 4
    job.step = [0] * 4
    assert job.stand(1500) == []
    assert len(job.stand(400)) == 1


@pytest.mark.parametrize(("line_s", "quiet_s", "sent_s"), [(22, 170, 180), (6, 45, 52), (1, 7, 9)])
def test_a_log_whose_lines_tell_of_nothing_between_them_is_waited_for_eight_lines(line_s, quiet_s, sent_s):
    job = Clockwork(HangDetector(HangConfig()), 1)
    job.step, job.phase = [0], [UNREPORTED]
    for line in range(30):
        # An evaluation of three lines now and then.
        assert job.stand(line_s if line % 10 else 3 * line_s) == []
        job.step, job.entered_s = [job.step[0] + 32], [job.now_s]
    assert job.stand(quiet_s) == []
    (hang,) = job.stand(sent_s - quiet_s)
    assert hang.summary.startswith("Training stands still in step 960")


def test_after_a_relaunch_the_first_step_is_known() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    job.stand(30)
    job.train(30)
    job.begin("again.0")
    job.phase = ["forward"] * 4
    assert job.stand(80) == []
    assert len(job.stand(60)) == 1


def test_between_hold_and_go_nothing_is_judged_and_after_it_all_is() -> None:
    job = training_job()
    everybody_waits(job, but=1)
    for phase, seconds, reported in (("do", 100, 0), ("go", 10, 1)):
        fields = {"order": "o", "action": "pause", "step": 5, "phase": phase}
        job.detector.observe(Occurrence("order", job.attempt, "", job.now_s, None, None, fields))
        assert len(job.stand(seconds)) == reported


def test_irregular_steps_raise_the_deadline() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    assert [finding for _ in range(30) for finding in job.train(4, steps_per_s=1) + job.stand(3)] == []


def test_slow_first_steps_after_a_restart_are_no_hang_and_a_hang_among_them_is() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    for _ in range(60):
        assert job.train(1, steps_per_s=1) + job.stand(19) == []
    job.begin("again.0")
    job.step = [59] * 4
    for _ in range(5):
        assert job.train(1, steps_per_s=1) + job.stand(59) == []
    assert gravity(job.stand(100)) == ["open info", "update critical"]


def after_s(job: Clockwork, seconds: int) -> list[tuple[str, int]]:
    """What is told while all stand still, and how many seconds later."""
    begin_s = job.now_s
    return [(f"{f.change} {f.severity}", round(f.detected_time_s - begin_s)) for f in job.stand(seconds)]


def others_go_on_without(job: Clockwork, paused: int) -> None:
    """One rank pauses; all others enter the next step, and wait for it there."""
    job.pause(paused)
    for rank in range(job.ranks):
        if rank != paused:
            job.step[rank] += 1
            job.entered_s[rank] = job.now_s
            job.phase[rank] = "backward"


def test_an_endless_pause_is_information_after_a_minute_and_critical_after_a_quarter_of_an_hour() -> None:
    job = training_job()
    job.pause()
    job.cpu_s = [1e6] * 4  # busy or not: who evaluates computes
    assert after_s(job, 1200) == [("open info", 60), ("update critical", 900)]


def test_a_job_of_long_steps_may_pause_for_twenty_of_them() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    for _ in range(30):
        job.stand(5)
        job.step = [step + 1 for step in job.step]
        job.entered_s = [job.now_s] * 4
    job.pause()
    assert after_s(job, 1200) == [("open info", 100), ("update critical", 900)]


@pytest.mark.parametrize(("known_s", "sent_s", "critical_s"), [(10, 60, 300), (50, 75, 300), (400, 600, 1200)])
def test_a_pause_that_ended_well_says_how_long_the_next_one_may_last(known_s: int, sent_s: int, critical_s: int):
    job = training_job()
    job.pause()
    job.stand(known_s)
    job.train(60)
    job.pause()
    assert after_s(job, 1500) == [("open info", sent_s), ("update critical", critical_s)]


def do(job: Clockwork, *doing: str) -> None:
    """Let ranks do this, and the agent see it two seconds later."""
    job.stand(2)
    job.doing, job.os_state = list(doing), ["S"] * job.ranks


@pytest.mark.parametrize("between_steps", [True, False], ids=["between steps", "within a step"])
def test_where_all_wait_in_a_collective_nobody_comes_and_that_is_critical_at_once(between_steps: bool) -> None:
    job = training_job()
    if between_steps:
        job.pause()
    do(job, *["collective"] * 4)
    findings = job.stand(60)
    assert gravity(findings) == ["open info", "update critical"]
    assert findings[-1].detected_time_s - findings[-1].onset_time_s <= 6
    assert findings[-1].summary.endswith("all 4 ranks wait in a collective.")


@pytest.mark.parametrize(
    ("phase", "doing"),
    [("", "own"), ("data_wait", ""), ("", "data")],
    ids=["own code", "data phase", "a loader's code"],
)
def test_where_all_do_work_of_their_own_within_a_step_nobody_waits_and_people_have_a_minute(phase: str, doing: str):
    job = training_job()
    job.phase = [phase] * 4
    do(job, *[doing] * 4)
    reported = after_s(job, 1200)
    assert [what for what, _ in reported] == ["open info", "update warning", "update critical"]
    assert (reported[0][1] <= 3, reported[1][1], reported[2][1]) == (True, 58, 898)


def test_work_of_their_own_that_ended_well_is_this_jobs_way() -> None:
    job = training_job()
    reported = []
    for _ in range(4):
        do(job, *["own"] * 4)
        reported.append(gravity(job.stand(18)))
        job.doing = [""] * 4
        job.train(10)
    assert reported == [["open info"], [], [], []]


def test_one_that_is_not_in_a_collective_like_the_others_is_named_and_critical() -> None:
    job = training_job()
    do(job, "collective", "own", "collective", "collective")
    reported, critical = findings = job.stand(30)
    assert (gravity(findings), reported.ranks, critical.ranks) == (["open info", "update critical"], (1,), (1,))


@pytest.mark.parametrize(("phase", "doing"), [("data_wait", ""), ("", "data")])
def test_one_that_waits_for_its_data_has_as_long_as_loader_workers_take_to_start(phase: str, doing: str) -> None:
    job = training_job()
    job.phase[1] = phase
    do(job, "collective", doing, "collective", "collective")
    reported = after_s(job, 60)
    assert [what for what, _ in reported] == ["open info", "update critical"]
    assert 12 <= reported[1][1] <= 16


def test_a_host_that_waits_for_its_device_busily_is_not_known_to_do_work_of_its_own() -> None:
    job = training_job()
    do(job, *["own"] * 4)
    job.os_state = ["R"] * 4
    assert gravity(job.stand(30)) == ["open info", "update critical"]


@pytest.mark.parametrize(("ranks", "who"), [((2,), "rank 2 on host-0 (it"), ((1, 2), "ranks 1, 2 on host-0 (each")])
def test_ranks_whose_python_shuts_down_while_the_others_wait_are_named(ranks: tuple[int, ...], who: str) -> None:
    job = training_job()
    job.phase = ["collective"] * 4
    job.sequence = [job.sequence[0]] * 4
    do(job, *("ending" if rank in ranks else "collective" for rank in range(4)))
    finding = job.stand(10)[-1]
    assert (finding.ranks, finding.evidence["decided_by"]) == (ranks, "it is shutting down")
    assert finding.summary.endswith(f"; the others wait for {who} is shutting down).")


@pytest.mark.parametrize("ended", [1, 4])
def test_what_ranks_do_after_training_is_no_hang_and_takes_back_an_open_one(ended: int) -> None:
    job = training_job()
    job.pause()
    opened_before = gravity(job.stand(70))
    for rank in range(ended):
        job.state[rank] = "left"
    closed = job.stand(2000)
    assert (opened_before, gravity(closed)) == (["open info"], ["close info"])
    assert "Training is over" in closed[0].summary


def test_one_that_leaves_while_the_others_wait_in_the_same_step_is_what_they_wait_for() -> None:
    job = Clockwork(HangDetector(HangConfig()), 2)
    job.train(20)
    job.state[0], job.phase[1] = "left", "backward"
    finding = job.stand(10)[-1]
    assert (finding.severity, finding.ranks, finding.evidence["decided_by"]) == (
        "critical", (0,), "it left its loop, the others wait",
    )  # fmt: skip


@pytest.mark.parametrize("ends_well", [True, False])
def test_what_a_job_has_shown_survives_a_snapshot_and_a_relaunch_and_a_pause_that_this_ends_did_not_end_well(ends_well):
    job = training_job()
    job.pause()
    job.stand(100)
    job.train(20 * ends_well)
    saved = job.detector.snapshot()
    json.dumps(saved, default=lambda array: array.tolist())
    job.detector = HangDetector(HangConfig())
    job.detector.restore(saved)
    job.begin("next.0")
    job.train(20)
    job.pause()
    assert after_s(job, 400) == [("open info", 150 if ends_well else 60), *[("update critical", 300)] * ends_well]


def test_a_rank_that_is_stopped_in_a_pause_is_told_and_critical_as_soon_as_within_a_step() -> None:
    job = training_job()
    job.pause()
    job.os_state[2] = "T"
    reported, critical = findings = job.stand(30)
    assert (gravity(findings), reported.ranks, critical.ranks) == (["open info", "update critical"], (2,), (2,))
    assert critical.detected_time_s - critical.onset_time_s <= 8.0


def test_one_rank_that_saves_while_the_others_wait_is_known_once_it_was_seen() -> None:
    job = training_job()
    reported = []
    for _ in range(10):
        others_go_on_without(job, 0)
        reported.append(gravity(job.stand(8)))
        job.step, job.phase = [job.step[1]] * 4, [""] * 4
        job.train(5)
    assert reported == [["open info"], *([[]] * 9)]


def test_one_rank_that_does_not_come_out_of_its_pause_while_the_others_wait_is_critical_after_a_minute() -> None:
    job = training_job()
    others_go_on_without(job, 0)
    reported, critical = findings = job.stand(100)
    assert (gravity(findings), reported.ranks, critical.ranks) == (["open info", "update critical"], (0,), (0,))
    assert reported.detected_time_s - reported.onset_time_s <= 5
    assert 60 <= critical.detected_time_s - critical.onset_time_s <= 61


def test_one_that_saves_for_nobody_is_critical_after_a_quarter_of_a_minute() -> None:
    job = training_job()
    others_go_on_without(job, 2)
    reported, critical = findings = job.stand(100)
    assert (gravity(findings), reported.ranks, critical.ranks) == (["open info", "update critical"], (2,), (2,))
    assert 15 <= critical.detected_time_s - critical.onset_time_s <= 16


def test_a_rank_that_ends_between_two_steps_while_the_others_wait_does_not_save() -> None:
    job = training_job()
    others_go_on_without(job, 0)
    do(job, "ending", *["collective"] * 3)
    critical = job.stand(10)[-1]
    assert (critical.severity, critical.ranks) == ("critical", (0,))


def test_where_all_are_ending_nobody_waits() -> None:
    job = training_job()
    job.pause()
    do(job, *["ending"] * 4)
    assert job.stand(2000) == []


def test_where_steps_follow_at_once_the_others_wait_for_the_rank_that_has_not_begun_its_work() -> None:
    job = training_job()
    job.rest(0)
    job.phase[1:] = ["forward"] * 3
    opening, graver = findings = job.stand(100)
    assert (gravity(findings), opening.ranks, graver.ranks) == (["open info", "update critical"], (0,), (0,))
    assert "it has not begun its step, the others have" in opening.summary
    assert 60 <= graver.detected_time_s - graver.onset_time_s <= 61


def test_rests_after_each_of_several_optimizers_are_no_part_of_the_step_that_they_share() -> None:
    job = training_job()
    for _ in range(3):
        job.pause()
        assert job.stand(20) == []
        job.outside_since_s = [None] * job.ranks
        assert job.stand(1) == []
    assert "critical" in {finding.severity for finding in job.stand(17)}


@pytest.mark.parametrize("resting", [range(4), [0]], ids=["all", "one, and the others wait"])
def test_a_rest_between_two_steps_is_no_part_of_the_work_that_follows_it(resting) -> None:
    """A loop without `watch.steps` evaluates or draws after its optimizer's step; then a forward begins."""
    job = training_job()
    for rank in resting:
        job.rest(rank)
    assert gravity(job.stand(40)) == ["open info"] * (len(resting) == 1)
    job.outside_since_s, job.phase = [None] * job.ranks, ["forward"] * job.ranks
    assert "critical" not in {finding.severity for finding in job.stand(3)}
    assert "critical" in {finding.severity for finding in job.stand(17)}


def test_a_log_in_which_no_line_comes_is_information_and_critical_after_a_minute() -> None:
    job = Clockwork(HangDetector(HangConfig()), 1)
    job.phase = [UNREPORTED]
    job.train(20, steps_per_s=1)
    assert after_s(job, 100) == [("open info", 8), ("update critical", 60)]


def test_a_rank_that_never_finishes_its_step_while_the_others_pause_is_a_hang_within_the_step() -> None:
    job = training_job()
    job.pause(0, 1, 3)
    job.phase[2] = "forward"
    assert gravity(job.stand(10)) == ["open info", "update critical"]


def test_a_labelled_evaluation_keeps_its_own_deadline_between_steps() -> None:
    job = training_job()
    for seconds, reported in ((40, []), (40, []), (200, [("open critical", 120)])):
        job.pause()
        job.phase = ["eval"] * 4
        assert after_s(job, seconds) == reported
        job.phase = [""] * 4
        job.train(20)


def test_a_step_that_was_slow_and_then_done_is_no_hang_while_the_job_evaluates() -> None:
    job = training_job()
    assert gravity(job.stand(4)) == ["open info"]
    job.pause()
    (closed,) = job.stand(50)
    assert closed.summary == f"The work of step {job.step[0]} is done."


def test_pauses_do_not_make_the_watch_over_steps_more_patient() -> None:
    job = training_job()
    for _ in range(30):
        job.pause()
        assert job.stand(20) + job.train(5) == []
    assert after_s(job, 10) == [("open info", 4), ("update critical", 5)]


def test_one_hiccup_of_little_more_than_twice_the_usual_step_wakes_nobody() -> None:
    job = Clockwork(HangDetector(HangConfig()), 4)
    findings: list[Finding] = []
    for count in range(60):
        for _ in range(39 if count == 50 else 15):
            job.now_s += 0.1 - 1.0  # ten ticks a second
            findings += job.tick()
        job.step = [step + 1 for step in job.step]
        job.entered_s = [job.now_s] * 4
    assert {str(f.severity) for f in findings} <= {"info"}


def test_stalls_that_end_by_themselves_again_and_again_are_soon_known_to_be_this_jobs_way() -> None:
    """An evaluation within the loop's body that nothing tells apart from a step: twice told, then waited for."""
    job = training_job(seconds=100)
    reported = []
    for _ in range(40):
        reported.append(len(job.stand(8)))
        job.train(3)
    assert sum(reported[:6]) > 0
    assert sum(reported[6:]) == 0


def test_a_rank_stopped_again_and_again_never_becomes_this_jobs_way() -> None:
    job = training_job(seconds=100)
    for _ in range(20):
        job.os_state[1] = "T"
        assert "critical" in {f.severity for f in job.stand(8)}
        job.os_state[1] = "R"
        job.train(3)
