"""NaN and Inf are reported in the step they are recorded, with the rank that had them first."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from rankwatch_detectors.base import AttemptStart, Change, Finding, Frame, Severity, StepKind
from rankwatch_detectors.values.nonfinite import NonfiniteConfig, NonfiniteDetector
from tests.support.values.presences import ATTEMPT, frame, topology

NAN, INF = math.nan, math.inf


def judged(*frames: Frame, lockstep: bool = True) -> list[Finding]:
    detector = NonfiniteDetector(NonfiniteConfig())
    detector.observe(AttemptStart(ATTEMPT, replace(topology(4), lockstep=lockstep), 0.0))
    return [finding for one in frames for finding in detector.observe(one)]


def test_the_rank_with_local_nonfinite_gradients_is_named_with_its_parameter() -> None:
    exact = {"nonfinite": [0, 0, 5, 0], "nonfinite_first": [0, 0, 1, 0]}
    (finding,) = judged(frame(7, {"loss": [1.0] * 4, "grad_norm": [NAN] * 4}, exact))
    assert (str(finding.scope), finding.ranks, finding.detected_step) == ("rank:2", (2,), 7)
    assert (finding.severity, finding.confidence) == (Severity.CRITICAL, 1.0)
    assert finding.evidence["parameter"] == "second"


def test_the_first_rank_stays_named_when_the_reduction_has_carried_it_to_all() -> None:
    first = frame(7, {"grad_norm": [NAN] * 4}, {"nonfinite": [0, 9, 0, 0]})
    then = frame(8, {"loss": [NAN] * 4, "grad_norm": [NAN] * 4}, {"nonfinite": [9, 9, 9, 9]})
    (finding,) = judged(first, then)
    assert finding.ranks == (1,)


def test_a_rank_named_by_late_values_replaces_nobody() -> None:
    everywhere = frame(8, {"loss": [NAN] * 4})
    late = frame(7, {"grad_norm": [NAN] * 4}, {"nonfinite": [0, 0, 0, 4]}, family="values")
    opened, named = judged(everywhere, late)
    assert (opened.change, opened.ranks, str(opened.scope)) == (Change.OPEN, (), "job")
    assert (named.change, named.ranks, str(named.scope), named.onset_step) == (Change.UPDATE, (3,), "job", 7)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("metric", ["loss", "grad_norm", "local_grad_norm"])
def test_any_nonfinite_training_value_is_reported(metric: str, bad: float) -> None:
    (finding,) = judged(frame(3, {metric: [1.0, 1.0, bad, 1.0]}))
    assert finding.ranks == (2,)
    assert finding.evidence["values"][metric] in ("NaN", "Inf", "-Inf")


def test_a_user_metric_is_reported_as_a_warning() -> None:
    (finding,) = judged(frame(3, {"accuracy": [0.5, NAN, 0.5, 0.5]}))
    assert (finding.severity, finding.ranks) == (Severity.WARNING, (1,))


@pytest.mark.parametrize("metric", ["busy_s", "step_time_s", "phase.forward", "tokens", "wait_s"])
def test_times_are_no_training_values(metric: str) -> None:
    assert judged(frame(3, {metric: [1.0, NAN, INF, 1.0]})) == []


def test_what_was_not_logged_is_nothing() -> None:
    one = frame(3, {"loss": [NAN, 1.0, 1.0, 1.0]})
    present = {"loss": np.asarray([False, True, True, True])}
    assert judged(Frame(ATTEMPT, "steps", 3, StepKind.TRAIN, 3.0, one.values, present)) == []


def test_a_step_left_out_by_the_loss_scaler_raises_nothing() -> None:
    skipped = {"loss": [1.0] * 4, "grad_norm": [INF] * 4, "optimizer_skipped": [1.0] * 4}
    assert judged(frame(3, skipped), frame(4, {"loss": [1.0] * 4, "grad_norm": [1.0] * 4})) == []


@pytest.mark.parametrize(
    ("skipped", "said"), [(0.0, "; the update was not skipped."), (1.0, "; the update was skipped.")]
)
def test_it_says_whether_the_update_was_skipped_where_that_is_known(skipped: float, said: str) -> None:
    gradients = {"nonfinite": [0, 1, 0, 0]}
    assert judged(frame(3, {"optimizer_skipped": [skipped] * 4}, gradients))[0].summary.endswith(said)
    assert "skipped" not in judged(frame(3, {}, gradients))[0].summary


def test_twenty_steps_left_out_in_a_row_are_reported_and_closed_when_it_ends() -> None:
    skipped = [frame(step, {"loss": [1.0] * 4, "optimizer_skipped": [1.0] * 4}) for step in range(30)]
    healthy = [frame(step, {"loss": [1.0] * 4, "grad_norm": [1.0] * 4}) for step in range(30, 40)]
    findings = judged(*skipped, *healthy)
    assert [(f.change, f.detected_step) for f in findings] == [(Change.OPEN, 19), (Change.CLOSE, 32)]
    assert findings[0].onset_step == 0


def test_a_skipped_step_excuses_no_nan_loss_and_no_local_gradient() -> None:
    assert len(judged(frame(3, {"loss": [NAN] * 4, "optimizer_skipped": [1.0] * 4}))) == 1
    assert len(judged(frame(3, {"optimizer_skipped": [1.0] * 4}, {"nonfinite": [0, 1, 0, 0]}))) == 1


def test_it_closes_after_three_finite_rows_of_what_was_bad() -> None:
    bad = frame(3, {"loss": [NAN] * 4, "accuracy": [0.5] * 4})
    unrelated = [frame(step, {"accuracy": [0.5] * 4}) for step in range(4, 9)]
    finite = [frame(step, {"loss": [1.0] * 4}) for step in range(9, 13)]
    findings = judged(bad, *unrelated, *finite)
    assert [(f.change, f.detected_step) for f in findings] == [(Change.OPEN, 3), (Change.CLOSE, 11)]


def test_a_new_attempt_closes_it_and_the_repeated_step_is_judged_anew() -> None:
    detector = NonfiniteDetector(NonfiniteConfig())
    detector.observe(AttemptStart("a.0", topology(4), 0.0))
    bad = {"nonfinite": [0, 1, 0, 0]}
    findings = [*detector.observe(frame(5, {"loss": [1.0] * 4}, bad, attempt="a.0"))]
    findings += detector.observe(AttemptStart("a.1", topology(4), 9.0))
    findings += detector.observe(frame(5, {"loss": [1.0] * 4}, {"nonfinite": [0] * 4}, attempt="a.1"))
    findings += detector.observe(frame(6, {"loss": [1.0] * 4}, {"nonfinite": [0, 0, 2, 0]}, attempt="a.1"))
    reported = [(f.change, f.attempt, f.ranks) for f in findings]
    assert reported == [(Change.OPEN, "a.0", (1,)), (Change.CLOSE, "a.0", (1,)), (Change.OPEN, "a.1", (2,))]


def test_a_loss_that_falls_silent_after_an_infinity_is_reported_as_what_it_hides() -> None:
    logged = [frame(step, {"loss": [2.0] * 4, "grad_norm": [1.0] * 4}) for step in range(8)]
    burst = frame(8, {"loss": [1e29] * 4, "grad_norm": [math.inf] * 4})
    silent = [frame(step, {"step_time_s": [1.0] * 4}) for step in range(9, 14)]
    findings = judged(*logged, burst, *silent)
    assert [(finding.change, finding.detected_step) for finding in findings] == [(Change.OPEN, 8), (Change.UPDATE, 10)]
    assert "stopped being logged" in findings[1].summary


def test_a_loss_that_is_not_logged_any_more_is_no_incident_by_itself() -> None:
    logged = [frame(step, {"loss": [2.0] * 4}) for step in range(8)]
    assert judged(*logged, *[frame(step, {"step_time_s": [1.0] * 4}) for step in range(8, 20)]) == []


@pytest.mark.parametrize(
    ("norms", "scope", "ranks", "where"),
    [
        ([1.0, INF, 1.0, 1.0], "rank:1", (1,), "Inf in the gradient norm of rank 1 in step 3."),
        ([INF, INF, None, None], "job", (), "of 2 of the 4 ranks"),
        ([INF] * 4, "job", (), "of all ranks"),
    ],
)
def test_of_norms_that_overflow_only_the_one_that_others_do_not_share_names_its_rank(norms, scope, ranks, where):
    one = frame(3, {"grad_norm": [norm or 0.0 for norm in norms]})
    one.present["grad_norm"][:] = [norm is not None for norm in norms]
    (finding,) = judged(one)
    assert (str(finding.scope), finding.ranks, where in finding.summary) == (scope, ranks, True)


def row(step: int, rank: int, name: str, value: float, *, late: bool = True) -> Frame:
    """One rank's row of a step, as it comes where ranks go at their own pace."""
    full = frame(step, {name: [value if one == rank else 0.0 for one in range(4)]})
    return replace(full, present={name: np.arange(4) == rank}, late=late)


def judged_at_own_pace(*frames: Frame) -> list[Finding]:
    return judged(*frames, lockstep=False)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "local_grad_norm"])
def test_at_its_own_pace_a_rank_far_behind_is_named(name: str) -> None:
    (finding,) = judged_at_own_pace(row(90, 0, name, 1.0, late=False), row(3, 2, name, NAN))
    assert (str(finding.scope), finding.ranks, finding.onset_step) == ("rank:2", (2,), 3)
    assert finding.severity is Severity.CRITICAL


def test_at_their_own_pace_each_rank_that_has_it_is_named_and_each_must_be_well_again() -> None:
    before, ill = row(89, 0, "accuracy", 0.5, late=False), row(90, 0, "accuracy", NAN, late=False)
    opened, grown = judged_at_own_pace(before, ill, row(3, 2, "loss", INF))
    assert (opened.severity, opened.ranks) == (Severity.WARNING, (0,))
    assert (grown.change, grown.severity, grown.ranks) == (Change.UPDATE, Severity.CRITICAL, (0, 2))
    ills = [row(3, 2, "loss", NAN)]
    others = [row(step, 0, "loss", 1.0, late=False) for step in range(90, 99)]
    well = [row(step, 2, "loss", 1.0) for step in range(4, 7)]
    assert [f.change for f in judged_at_own_pace(*ills, *others, *well[:2], row(6, 2, "loss", NAN), *well[:2])] == [
        Change.OPEN
    ]
    assert [f.change for f in judged_at_own_pace(*ills, *well, *others)] == [Change.OPEN, Change.CLOSE]


def test_the_late_row_of_the_rank_that_had_it_first_names_it() -> None:
    others = frame(35, {"grad_norm": [NAN] * 4}, {"nonfinite": [0, 0, 0, 0]})
    others.present["grad_norm"][3] = others.present["nonfinite"][3] = False
    then = frame(36, {"loss": [NAN] * 4, "grad_norm": [NAN] * 4}, {"nonfinite": [9] * 4})
    late = replace(frame(35, {"grad_norm": [NAN] * 4}, {"nonfinite": [0, 0, 0, 4]}), late=True)
    late.present["grad_norm"][:3] = late.present["nonfinite"][:3] = False
    opened, named = judged(others, then, late, late)
    assert (opened.change, opened.ranks, str(opened.scope)) == (Change.OPEN, (), "job")
    assert (named.change, named.ranks, named.onset_step) == (Change.UPDATE, (3,), 35)


def test_a_late_row_of_a_later_step_names_nobody_and_ends_nothing() -> None:
    everywhere = frame(8, {"loss": [NAN] * 4})
    victim = replace(frame(9, {"grad_norm": [NAN] * 4}, {"nonfinite": [0, 0, 0, 4]}), late=True)
    well = [replace(frame(step, {"loss": [1.0] * 4}), late=True) for step in range(3, 8)]
    assert [one.change for one in judged(everywhere, victim, *well)] == [Change.OPEN]


def test_what_comes_late_where_ranks_march_together_opens_nothing() -> None:
    assert judged(frame(9, {"loss": [1.0] * 4}), row(3, 2, "loss", NAN)) == []


def reported(found: list[Finding]) -> list[tuple[Change, Severity, str]]:
    return [(one.change, one.severity, one.summary) for one in found]


def test_a_metric_of_the_script_that_was_never_finite_is_reported_once_as_information() -> None:
    rows = [frame(step, {"loss": [1.0] * 4, "aux_loss": [NAN] * 4}) for step in range(40)]
    summary = "aux_loss has been NaN or Inf since the first value."
    assert reported(judged(*rows)) == [(Change.OPEN, Severity.INFO, summary), (Change.CLOSE, Severity.INFO, summary)]


def test_what_is_never_finite_hides_no_nan_of_the_loss_and_keeps_none_open() -> None:
    aux = {"aux_loss": [NAN] * 4}
    rows = [frame(step, {"loss": [NAN if 5 <= step < 8 else 1.0] * 4} | aux) for step in range(20)]
    assert reported(judged(*rows))[2:] == [
        (Change.OPEN, Severity.CRITICAL, "NaN in the loss of all ranks in step 5."),
        (Change.CLOSE, Severity.CRITICAL, "All values are finite again in step 10."),
    ]


def test_a_loss_that_is_nan_while_a_metric_is_makes_its_incident_critical() -> None:
    rows = [frame(step, {"loss": [1.0] * 4, "accuracy": [0.5] * 4}) for step in range(3)]
    rows += [frame(3, {"loss": [1.0] * 4, "accuracy": [NAN] * 4}), frame(4, {"loss": [NAN] * 4, "accuracy": [NAN] * 4})]
    found = judged(*rows)
    assert [(one.change, one.severity) for one in found] == [
        (Change.OPEN, Severity.WARNING),
        (Change.UPDATE, Severity.CRITICAL),
    ]


def skips(*bouts: int) -> list[Frame]:
    """Bouts of skipped steps, with fifty good ones before each and after the last."""
    frames: list[Frame] = []
    for skipped in (*[one for bout in bouts for one in (0, bout)], 0):
        for _ in range(skipped or 50):
            values = {"loss": [1.0] * 4} | ({"optimizer_skipped": [1.0] * 4} if skipped else {"grad_norm": [1.0] * 4})
            frames.append(frame(len(frames), values))
    return frames


def test_a_loss_scaler_that_skips_and_recovers_again_and_again_is_one_warning_with_a_count() -> None:
    found = [one for one in judged(*skips(22, 25, 21, 23, 24, 22)) if one.change is Change.OPEN]
    assert reported(found) == [
        (Change.OPEN, Severity.WARNING, "The loss scaler has skipped 20 steps in a row, up to step 69."),
        (
            Change.OPEN,
            Severity.INFO,
            "The loss scaler has skipped 20 steps in a row, up to step 141, for the second time.",
        ),
        (
            Change.OPEN,
            Severity.INFO,
            "The loss scaler has skipped 20 steps in a row, up to step 216, for the third time.",
        ),
    ]


@pytest.mark.parametrize("before", [(), (22, 22, 22, 22)], ids=["first", "known"])
def test_a_loss_scaler_that_skips_every_step_is_critical_when_it_lasts(before: tuple[int, ...]) -> None:
    newest = judged(*skips(*before, 200))[-2:]
    assert [one.severity for one in newest] == [Severity.CRITICAL, Severity.CRITICAL]
    assert "has skipped 60 steps in a row" in newest[0].summary
    assert newest[0].summary.endswith("nothing is trained.")
    assert newest[0].onset_step == (newest[0].detected_step or 0) - 59


def zeros(norm: float | None, first: float = 2.0, fall: float = 0.0, digits: int = 4) -> list[Finding]:
    """A loss that is exactly 0 from step 60 on."""
    rng = np.random.default_rng(0)
    frames = []
    for step in range(120):
        loss = (
            round(first * math.exp(-fall * step) + 0.01 * first * rng.standard_normal(), digits) if step < 60 else 0.0
        )
        values = {"loss": [loss] * 4}
        if norm is not None:
            values["grad_norm"] = [rng.random() if step < 60 else norm] * 4
        frames.append(frame(step, values))
    return judged(*frames)


@pytest.mark.parametrize(
    ("norm", "severity"), [(2.31, Severity.CRITICAL), (0.0, Severity.CRITICAL), (None, Severity.WARNING)]
)
def test_a_loss_of_exactly_zero_and_a_norm_that_stands_still_is_training_that_is_over(norm, severity) -> None:
    (found,) = zeros(norm)
    assert (found.severity, found.onset_step, found.detected_step) == (severity, 60, 75)
    assert found.summary.startswith("The loss has been exactly 0 since step 60")


def rows_of_zeros(begin: int, *norms: float, local: bool = False) -> list[Finding]:
    """What is found of a gradient norm that is 0 for 127 rows, after others and before these."""
    names = ["grad_norm", *(["local_grad_norm"] if local else [])]
    rows = enumerate([*[1.0] * begin, *[0.0] * 127, *norms])
    return judged(*(frame(step, {"loss": [2.0794] * 4} | {name: [norm] * 4 for name in names}) for step, norm in rows))


def test_a_gradient_norm_that_a_script_has_always_logged_as_zero_is_not_measured() -> None:
    never, closed = rows_of_zeros(0, 0.0, *[1.0] * 5)
    assert (never.severity, never.onset_step) == (Severity.INFO, 0)
    assert (closed.change, closed.detected_step) == (Change.CLOSE, never.detected_step)
    assert never.summary.startswith("The logged gradient norm has always been exactly 0: it is not measured, or")


@pytest.mark.parametrize(("begin", "local"), [(0, True), (40, False)])
def test_gradients_that_are_exactly_zero_for_long_train_nothing(begin: int, local: bool) -> None:
    def reported(*norms: float) -> list[Finding]:
        return rows_of_zeros(begin, *norms, local=local)

    assert reported(0.5, 0.0) == []
    dead, closed = reported(0.0, *[1.0] * 5)
    assert (dead.severity, dead.onset_step, closed.change) == (Severity.WARNING, begin, Change.CLOSE)
    assert dead.summary == f"All gradients have been exactly 0 since step {begin}: nothing is trained."


def test_a_loss_that_falls_to_zero_by_rounding_or_whose_norm_goes_on_is_none() -> None:
    assert zeros(0.0, first=0.004, fall=0.05) == []
    assert zeros(0.0, first=0.0004) == []
    rows = [
        frame(step, {"loss": [2.0 if step < 60 else 0.0] * 4, "grad_norm": [1.0 + step] * 4}) for step in range(120)
    ]
    assert judged(*rows) == []
