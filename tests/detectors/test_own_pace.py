"""Where ranks do not wait for each other, each is judged against its own past, and none against another."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Floats, Frame, Kind, Occurrence, Severity, StepKind
from rankwatch_detectors.pace.own_past import OwnPastConfig, OwnPastDetector
from rankwatch_detectors.progress.hang import HangDetector
from rankwatch_detectors.progress.own_pace import OwnPaceDetector
from rankwatch_detectors.progress.progress_timeout import HangConfig
from rankwatch_detectors.scope import WHOLE_JOB, IncidentScope
from tests.support.detection.verdicts import closed, evaluate, opened, restored_all_along
from tests.support.values.presences import ATTEMPT, Clockwork, topology

STEP_S = (1, 3, 7, 20)
"""What a step of each rank takes."""


def rollouts(*, lockstep: bool = False, hang: bool = False) -> Clockwork:
    job = Clockwork(HangDetector(HangConfig()) if hang else OwnPaceDetector(HangConfig()), len(STEP_S))
    job.detector.observe(AttemptStart(job.attempt, dataclasses.replace(topology(4), lockstep=lockstep), 0.0))
    job.step = [0] * 4
    return job


def roll(job: Clockwork, seconds: int, *, but: tuple[int, ...] = ()) -> list[Finding]:
    findings: list[Finding] = []
    for _ in range(seconds):
        for rank, step_s in enumerate(STEP_S):
            if rank not in but and (job.now_s + 1) % step_s == 0:
                job.step[rank] += 1
                job.entered_s[rank] = job.now_s + 1
        findings += job.tick()
    return findings


def reported(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return [(f.change, f.severity, str(f.scope)) for f in findings]


def test_ranks_that_go_at_their_own_pace_are_no_hang() -> None:
    assert roll(rollouts(), 600) == []


@pytest.mark.parametrize(("rank", "limit_s"), [(0, 60), (1, 60), (2, 140), (3, 400)])
def test_a_rank_that_stands_is_found_by_its_own_past_while_the_others_go_on(rank: int, limit_s: int) -> None:
    job = rollouts()
    roll(job, 600)
    findings = roll(job, 500, but=(rank,))
    assert reported(findings) == [("open", "warning", f"rank:{rank}")]
    assert findings[0].detected_time_s - findings[0].onset_time_s == pytest.approx(limit_s, abs=2)
    assert reported(roll(job, 40)) == [("close", "warning", f"rank:{rank}")]


def test_a_rank_that_a_signal_stopped_is_critical_sooner() -> None:
    job = rollouts()
    roll(job, 600)
    job.os_state[1] = "T"
    findings = roll(job, 60, but=(1,))
    assert reported(findings) == [("open", "critical", "rank:1")]
    assert findings[0].detected_time_s - findings[0].onset_time_s <= 15


def test_a_job_of_which_every_rank_stands_is_critical() -> None:
    job = rollouts()
    roll(job, 600)
    findings = job.stand(600)
    assert {str(f.scope) for f in findings if f.severity == "critical"} >= {"rank:3"}


def test_pauses_that_ended_well_are_a_ranks_past() -> None:
    job = rollouts()
    roll(job, 600)
    roll(job, 55, but=(0,))
    roll(job, 100)
    findings = roll(job, 300, but=(0,))
    assert findings[0].detected_time_s - findings[0].onset_time_s == pytest.approx(165, abs=5)


def test_ranks_that_march_together_are_left_to_the_job_as_a_whole() -> None:
    job = rollouts(lockstep=True)
    roll(job, 600)
    assert job.stand(600) == []
    apart = rollouts(hang=True)
    assert roll(apart, 600) + apart.stand(600) == []


def test_before_it_is_known_that_ranks_do_not_wait_one_that_goes_on_is_progress() -> None:
    job = rollouts(lockstep=True, hang=True)
    assert roll(job, 100) + roll(job, 120, but=(0, 2, 3)) == []


def test_a_hang_of_the_job_ends_when_ranks_turn_out_to_go_at_their_own_pace() -> None:
    job = rollouts(lockstep=True, hang=True)
    roll(job, 100)
    assert reported(job.stand(60))[-1][1] == "critical"
    apart = dataclasses.replace(topology(4), lockstep=False)
    (closed,) = job.detector.observe(AttemptStart(job.attempt, apart, job.now_s))
    assert closed.change == "close"


def test_a_snapshot_goes_on_with_the_same_answers() -> None:
    job = rollouts()
    roll(job, 600)
    again = OwnPaceDetector(HangConfig())
    again.restore(job.detector.snapshot())
    job.detector = again
    assert reported(roll(job, 200, but=(1,))) == [("open", "warning", "rank:1")]


def test_a_rank_that_is_stopped_in_its_first_seconds_is_found_before_its_pace_is_known() -> None:
    job = rollouts()
    roll(job, 1)
    job.os_state[1] = "T"
    assert reported(roll(job, 12, but=(1,))) == [("open", "critical", "rank:1")]


Draw = Callable[[np.random.Generator, int], Floats]
SLOW_AT_S = 2000.0
FOR_GOOD_S = 1e9


def lognormal(random: np.random.Generator, rows: int) -> Floats:
    return np.exp(0.5 * random.standard_normal(rows))


def some_long(random: np.random.Generator, rows: int) -> Floats:
    """One episode of ten is eight times as long as the others."""
    return np.exp(0.3 * random.standard_normal(rows)) * np.where(random.random(rows) < 0.1, 8.0, 1.0)


def two_kinds(random: np.random.Generator, rows: int) -> Floats:
    """Short tasks and long ones, in turns of some ten."""
    turns = np.repeat(random.random(rows // 8 + 1) < 0.4, 8)[:rows]
    return np.exp(0.2 * random.standard_normal(rows)) * np.where(turns, 3.0, 1.0)


def slowly_longer(random: np.random.Generator, rows: int) -> Floats:
    """A curriculum: episodes come to twice as long, on top of their scatter."""
    return lognormal(random, rows) * np.linspace(1.0, 2.0, rows)


def observed_rollouts(
    ranks: int,
    rows: int,
    seed: int,
    draw: Draw = lognormal,
    slow: dict[int, tuple[float, float, float]] | None = None,
    *,
    lockstep: bool = False,
) -> list[AttemptStart | Frame]:
    """Every rank at its own pace, up to three times as fast as the slowest; each row comes when its step is done.

    Args:
        ranks: how many.
        rows: of the slowest rank, about.
        seed: of everything random.
        draw: durations of one rank, around 1.
        slow: by rank, how many times slower it is from one second to another.
        lockstep: what the topology says.
    """
    random = np.random.default_rng(seed)
    rows_of, ends = [], []
    for rank in range(ranks):
        seconds = 2.0 * random.uniform(1.0, 3.0) * draw(random, 3 * rows)
        ratio, begin_s, until_s = (slow or {}).get(rank, (1.0, 0.0, 0.0))
        begun = np.cumsum(seconds)
        seconds[(begun > begin_s) & (begun < begin_s + (until_s - begin_s) / ratio)] *= ratio
        rows_of.append(seconds)
        ends.append(np.cumsum(seconds))
    until_s = min(end[-1] for end in ends)
    order = sorted(
        (float(ends[rank][row]), rank, row)
        for rank in range(ranks)
        for row in range(int(np.searchsorted(ends[rank], until_s)))
    )
    start = AttemptStart(ATTEMPT, dataclasses.replace(topology(ranks), lockstep=lockstep), 0.0)
    newest, frames = -1, []
    for time_s, rank, row in order:
        frames.append(one_row(ranks, rank, row, time_s, float(rows_of[rank][row]), late=row <= newest))
        newest = max(newest, row)
    return [start, *frames]


def one_row(ranks: int, rank: int, step: int, time_s: float, seconds: float, *, late: bool = True) -> Frame:
    column, here = np.zeros(ranks), np.zeros(ranks, dtype=np.bool_)
    column[rank], here[rank] = seconds, True
    return Frame(
        ATTEMPT, "steps", step, StepKind.TRAIN, time_s, {"step_time_s": column}, {"step_time_s": here}, late=late
    )


def found(*args: object, **options: object) -> list[Finding]:
    return evaluate(observed_rollouts(*args, **options), [OwnPastDetector(OwnPastConfig())])  # type: ignore[arg-type]


@pytest.mark.parametrize("draw", [lognormal, some_long, two_kinds, slowly_longer])
@pytest.mark.parametrize(("ranks", "rows"), [(8, 800), (64, 150)])
def test_durations_that_differ_by_factors_open_nothing(draw: Draw, ranks: int, rows: int) -> None:
    assert found(ranks, rows, 1, draw) == []


@pytest.mark.parametrize(("ratio", "delay_max_s"), [(1.5, 1500.0), (3.0, 900.0)])
def test_the_one_rank_of_many_that_became_slower_is_named(ratio: float, delay_max_s: float) -> None:
    (finding,) = found(16, 500, 1, slow={5: (ratio, SLOW_AT_S, FOR_GOOD_S)})
    assert (finding.kind, finding.scope, finding.ranks) == (Kind.STRAGGLER, IncidentScope.of_rank(5), (5,))
    assert 0 < finding.detected_time_s - SLOW_AT_S < delay_max_s
    assert finding.severity is Severity.WARNING or finding.evidence["ratio"] < 1.5
    assert finding.evidence["ratio"] == pytest.approx(ratio, rel=0.3)
    assert finding.evidence["compared_with"] == "its own past"


def test_it_ends_when_the_rank_is_as_fast_as_before() -> None:
    opens, ends = found(16, 500, 1, slow={5: (3.0, SLOW_AT_S, SLOW_AT_S + 700)})
    assert (opens.change, ends.change) == (Change.OPEN, Change.CLOSE)
    assert 0 < ends.detected_time_s - SLOW_AT_S - 700 < 400


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_ranks_that_become_slower_together_are_one_slowdown_of_the_job(ratio: float) -> None:
    findings = found(16, 400, 1, slow=dict.fromkeys(range(16), (ratio, 1500.0, FOR_GOOD_S)))
    reported = opened(findings)
    (job,) = [finding for finding in reported if finding.kind is Kind.SLOWDOWN]
    assert (job.scope, job.ranks) == (WHOLE_JOB, ())
    assert len(reported) - len(closed(findings)) == 1
    assert len(reported) <= 2


def test_a_job_that_is_as_fast_as_before_is_slow_no_more() -> None:
    findings = found(8, 500, 1, slow=dict.fromkeys(range(8), (2.0, 1000.0, 2200.0)))
    assert [(f.kind, f.change) for f in findings] == [(Kind.SLOWDOWN, Change.OPEN), (Kind.SLOWDOWN, Change.CLOSE)]


def test_a_rank_that_becomes_slower_still_than_its_slow_job_is_named() -> None:
    observations = observed_rollouts(8, 700, 2, slow=dict.fromkeys(range(8), (2.0, 1000.0, FOR_GOOD_S)))
    for one in observations:
        if isinstance(one, Frame) and one.time_s > 3500.0 and one.present["step_time_s"][3]:
            one.values["step_time_s"][3] *= 3.0
    reported = opened(evaluate(observations, [OwnPastDetector(OwnPastConfig())]))
    assert [(f.kind, f.ranks) for f in reported] == [(Kind.SLOWDOWN, ()), (Kind.STRAGGLER, (3,))]


def test_a_job_of_two_that_is_slow_outlives_the_slowness_of_each_rank_by_itself() -> None:
    observations = observed_rollouts(2, 2500, 3, slow=dict.fromkeys(range(2), (2.0, 1500.0, FOR_GOOD_S)))
    for one in observations:
        for rank, begin_s in enumerate((6000.0, 4000.0)):
            if isinstance(one, Frame) and one.present["step_time_s"][rank] and begin_s < one.time_s < begin_s + 1200.0:
                one.values["step_time_s"][rank] *= 4.0
    findings = evaluate(observations, [OwnPastDetector(OwnPastConfig())])
    kinds = [(f.kind, f.ranks) for f in opened(findings)]
    assert kinds[:3] == [(Kind.SLOWDOWN, ()), (Kind.STRAGGLER, (1,)), (Kind.STRAGGLER, (0,))]
    assert {f.kind for f in closed(findings)} == {Kind.STRAGGLER}


def test_what_may_pass_by_itself_is_for_information_until_it_has_not() -> None:
    findings = found(8, 1200, 3, slow={5: (1.4, 2 * SLOW_AT_S, FOR_GOOD_S)})
    assert [f.severity for f in findings][-1] is Severity.WARNING
    assert {f.scope for f in findings} == {IncidentScope.of_rank(5)}


def test_a_slowness_of_seconds_is_a_long_episode() -> None:
    observations = observed_rollouts(4, 600, 1, slow={2: (4.0, SLOW_AT_S, SLOW_AT_S + 400)})
    quick = [
        dataclasses.replace(one, values={name: column / 50 for name, column in one.values.items()})
        if isinstance(one, Frame)
        else one
        for one in observations
    ]
    assert evaluate(quick, [OwnPastDetector(OwnPastConfig())]) == []


def reported_of_a_slow_rank(said: Occurrence) -> list[Finding]:
    """The findings on rank 5, three times as slow for good since 1,000 s, if this is declared at 1,800 s."""
    observations = observed_rollouts(8, 400, 1, slow={5: (3.0, 1000.0, FOR_GOOD_S)})
    at = next(n for n, one in enumerate(observations) if isinstance(one, Frame) and one.time_s > 1800.0)
    return evaluate([*observations[:at], said, *observations[at:]], [OwnPastDetector(OwnPastConfig())])


def test_what_a_person_accepts_is_the_new_past() -> None:
    findings = reported_of_a_slow_rank(Occurrence("accepted", ATTEMPT, "", 0.0, None, None, {"kinds": ["straggler"]}))
    assert [f.change for f in findings] == [Change.OPEN, Change.CLOSE]
    assert findings[-1].summary == "The level was accepted."


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"what": "longer episodes"}, "The job declared a change: longer episodes."),
        ({"what": "another model: Net", "kind": "model"}, "Training goes on with another model: Net."),
    ],
)
def test_a_slow_rank_stays_one_after_a_declared_change_until_its_new_level_has_stayed(fields, why) -> None:
    opened, marked, closed = reported_of_a_slow_rank(Occurrence("declared", ATTEMPT, "", 0.0, None, None, fields))
    assert (opened.change, marked.change, closed.change) == (Change.OPEN, Change.UPDATE, Change.CLOSE)
    assert (marked.severity, marked.summary) == (opened.severity, f"{opened.summary} {why}")
    assert closed.summary == "Rank 5 has stayed at a new level since a change was declared."


def test_where_ranks_march_together_others_judge() -> None:
    assert found(8, 400, 1, slow={5: (3.0, 1000.0, FOR_GOOD_S)}, lockstep=True) == []


def test_a_detector_restored_all_along_goes_on_as_if_nothing_had_happened() -> None:
    slow = {2: (2.0, 900.0, 1500.0), **dict.fromkeys(range(3, 8), (1.8, 1800.0, FOR_GOOD_S))}
    assert restored_all_along(lambda: OwnPastDetector(OwnPastConfig()), observed_rollouts(8, 500, 4, slow=slow), 101)
