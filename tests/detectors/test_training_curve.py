"""Loss and gradient norm: events are found once and closed; curves, noise, restarts and new networks are none."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rankwatch_detectors.base import (
    GRAVITY,
    AttemptStart,
    Change,
    Finding,
    Frame,
    Kind,
    Observation,
    Occurrence,
    Severity,
    StepKind,
)
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.statistics.level import Settling, SettlingConfig
from rankwatch_detectors.values.training_curve import CurveDetector
from suite.networks import NETWORKS, adversaries, trained
from tests.support.detection.verdicts import evaluate
from tests.support.values.presences import ATTEMPT, frame, topology


def watched(series: Iterable[float], metric: str = "loss", **how: Any) -> list[Finding]:
    return watched_curve({metric: series}, **how)


def curve(points: int, seed: int = 0, noise: float = 0.03) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """11 to 2.2, as a language model's loss falls, with noise of three hundredths."""
    steps = np.arange(points)
    return 2.2 + 8.8 * np.exp(-steps / 100) + noise * np.random.default_rng(seed).standard_t(5, points)


def changes(findings: list[Finding]) -> list[tuple[Kind, Change]]:
    return [(finding.kind, finding.change) for finding in findings]


def diverging(series: Iterable[float], step_s: float = 1.0) -> list[Finding]:
    """The findings on a divergence of the loss."""
    return [finding for finding in watched(series, step_s=step_s) if finding.kind is Kind.LOSS_DIVERGENCE]


SPIKE = [(Kind.LOSS_SPIKE, Change.OPEN), (Kind.LOSS_SPIKE, Change.CLOSE)]


@pytest.mark.parametrize("seed", range(2))
def test_a_falling_curve_with_noise_raises_nothing(seed: int) -> None:
    assert watched(curve(5000, seed)) == []


def test_a_loss_of_one_digit_that_moves_by_one_digit_raises_nothing() -> None:
    still = [0.1] * 600
    still[400] = 0.2
    assert watched(still) == []
    assert watched(0.1 * np.random.default_rng(1).integers(1, 3, 600)) == []


@pytest.mark.parametrize("family", ["steps", "values"])
def test_a_single_point_of_three_times_the_level_is_one_spike_told_at_once(family: str) -> None:
    series = curve(1500)
    series[1200] *= 3
    findings = watched(series, family=family)
    assert changes(findings) == SPIKE
    assert findings[0].detected_step == 1200
    assert (findings[1].detected_step or 0) <= 1204
    assert findings[0].severity is Severity.WARNING


@pytest.mark.parametrize(("height", "severity"), [(0.05, Severity.INFO), (1.5, Severity.WARNING)])
def test_a_jump_is_weighed_by_what_the_curve_has_learned(height: float, severity: Severity) -> None:
    noise = np.random.default_rng(4).standard_normal(900)
    series = (0.0005 + 2.3 * np.exp(-np.arange(900) / 40.0)) * np.exp(0.1 * noise)
    series[800] = height
    (opened, *_) = watched(series)
    assert (opened.kind, opened.severity) == (Kind.LOSS_SPIKE, severity)


@pytest.mark.parametrize(
    ("work", "severity"),
    [
        (lambda step: 2.25 if step >= 600 else 1.0, Severity.INFO),  # larger images from there on
        (lambda step: 0.3 if step % 50 == 49 else 1.0, Severity.CRITICAL),  # the last batch of an epoch
        (lambda step: 1.0 + step % 7 / 10, Severity.CRITICAL),  # sequences of many lengths
    ],
    ids=["grows for good", "last batches", "uneven"],
)
def test_a_loss_that_jumps_with_the_work_in_a_step_begins_anew(
    work: Callable[[int], float], severity: Severity
) -> None:
    loss = curve(800)
    loss[600:] += 9.0 * np.exp(-np.arange(200) / 100)
    reported = watched_curve({"loss": loss, "step_work": [work(step) for step in range(800)]})
    assert max((finding.severity for finding in reported), key=GRAVITY.index) is severity


def test_a_shift_of_five_sigmas_is_found_within_five_points() -> None:
    series = curve(1500)
    series[1200:] += 5 * 0.03 * math.sqrt(5 / 3)
    findings = watched(series)
    assert findings[0].onset_step in range(1198, 1201)
    assert (findings[0].detected_step or 0) <= 1205


@pytest.mark.parametrize(("good", "ends"), [(4, False), (8, True)])
def test_a_few_good_batches_do_not_end_what_lasts(good: int, ends: bool) -> None:
    series = curve(1500)
    series[1200:] *= 1.2
    series[1260 : 1260 + good] /= 1.2
    reported = diverging(series[:1300])
    assert [finding.change for finding in reported[:1]] == [Change.OPEN]
    assert any(finding.change is Change.CLOSE for finding in reported) == ends


@pytest.mark.parametrize("seed", range(2))
def test_a_slow_ramp_is_a_divergence(seed: int) -> None:
    series = curve(1500, seed)
    series[1200:] *= 1.005 ** np.arange(300)
    divergence = diverging(series)
    assert divergence[0].change is Change.OPEN
    assert Change.CLOSE not in [f.change for f in divergence]
    assert all("spikes" not in f.evidence for f in divergence)
    assert (divergence[0].detected_step or 0) <= 1240
    assert divergence[-1].severity is Severity.CRITICAL


def test_a_jump_that_stays_becomes_a_divergence_and_ends_the_spike() -> None:
    series = curve(1500)
    series[1200:] += 3.0 + 0.01 * np.arange(300)
    findings = watched(series)
    assert changes(findings)[:3] == [*SPIKE, (Kind.LOSS_DIVERGENCE, Change.OPEN)]
    assert (findings[2].detected_step or 0) <= 1221
    assert findings[2].onset_step == 1200


def test_a_new_data_mix_settles_and_stays_for_information() -> None:
    series = curve(2500)
    series[1200:] += 0.3
    findings = watched(series)
    assert {f.severity for f in findings} == {Severity.INFO}
    last = findings[-1]
    assert (last.kind, last.change) == (Kind.LOSS_DIVERGENCE, Change.UPDATE)
    assert "14 % above its best lasting level 2.196" in last.summary


def test_nan_in_the_series_blinds_nobody() -> None:
    series = curve(1500)
    series[1150:1160] = np.nan
    series[1200] = 30.0
    assert changes(watched(series)) == SPIKE


def test_a_loss_around_zero_and_below_is_judged_too() -> None:
    series = curve(1500) - 2.2
    series[1200] += 1.0
    assert changes(watched(series)) == SPIKE


def test_evaluation_rows_are_not_part_of_the_curve() -> None:
    detector = CurveDetector(Kind.LOSS_SPIKE, CatalogueConfig().loss)
    detector.observe(AttemptStart(ATTEMPT, topology(2), 0.0))
    findings: list[Finding] = []
    for step, value in enumerate(curve(800)):
        kind = StepKind.EVAL if step % 50 == 0 else StepKind.TRAIN
        findings += detector.observe(frame(step, {"loss": [value * (2 if step % 50 == 0 else 1)] * 2}, kind=kind))
    assert findings == []


def test_a_rollback_into_the_steep_part_is_no_spike() -> None:
    detector = CurveDetector(Kind.LOSS_SPIKE, CatalogueConfig().loss)
    series = curve(400)
    for attempt, steps in (("a.0", range(300)), ("a.1", range(100, 400))):
        assert [*detector.observe(AttemptStart(attempt, topology(2), 300.0 * (attempt == "a.1")))] == []
        for step in steps:
            assert [*detector.observe(frame(step, {"loss": [series[step]] * 2}, attempt=attempt))] == []


def test_a_gradient_norm_that_explodes_is_reported_and_closed() -> None:
    norms = np.exp(0.2 * np.random.default_rng(1).standard_normal(900))
    norms[600:602] = (30.0, 900.0)
    findings = watched(norms, "grad_norm")
    assert changes(findings) == [(Kind.GRAD_NORM, change) for change in (Change.OPEN, Change.UPDATE, Change.CLOSE)]
    assert findings[0].detected_step == 600


@pytest.mark.parametrize("exploded", [False, True])
def test_a_gradient_norm_that_is_measured_in_every_eighth_step_is_judged_like_any_other(exploded: bool) -> None:
    norms = np.exp(0.2 * np.random.default_rng(1).standard_normal(900))
    if exploded:
        norms[600:602] = (30.0, 900.0)
    frames = (
        frame(step, {"loss": [2.0, 2.0]} | ({"grad_norm": [norms[step // 8]] * 2} if step % 8 == 0 else {}))
        for step in range(8 * len(norms))
    )
    detector = CurveDetector(Kind.GRAD_NORM, CatalogueConfig().grad_norm)
    findings = evaluate([AttemptStart(ATTEMPT, topology(2), 0.0), *frames], [detector])
    assert [finding.change for finding in findings][:1] == ([Change.OPEN] if exploded else [])
    assert all(finding.detected_step == 600 * 8 for finding in findings[:1])


@pytest.mark.parametrize("seed", range(3))
def test_norms_that_scatter_by_a_third_raise_nothing(seed: int) -> None:
    norms = np.exp(0.3 * np.random.default_rng(seed).standard_t(6, 4000))
    assert watched(norms, "grad_norm") == []


def test_a_lasting_shift_too_small_to_matter_becomes_the_level() -> None:
    losses = 2.2 + 0.01 * np.random.default_rng(3).standard_normal(900)
    losses[500:] += 0.08
    assert watched(losses, "loss") == []


def test_a_loss_that_doubles_on_wild_batches_is_reported() -> None:
    losses = 0.6 * np.exp(0.13 * np.random.default_rng(3).standard_normal(900))
    losses[700:704] = (1.9, 1.2, 1.1, 0.9)
    spikes = [finding for finding in watched(losses, "loss") if finding.kind is Kind.LOSS_SPIKE]
    assert [finding.change for finding in spikes] == [Change.OPEN, Change.CLOSE]


def test_a_spike_that_goes_on_growing_is_reported_again_within_its_incident() -> None:
    losses = 2.2 + 0.02 * np.random.default_rng(3).standard_normal(600)
    losses[500:504] = (3.0, 6.0, 40.0, 300.0)
    spikes = [finding for finding in watched(losses, "loss") if finding.kind is Kind.LOSS_SPIKE]
    assert [finding.change for finding in spikes] == [Change.OPEN, *[Change.UPDATE] * 3, Change.CLOSE]


def test_the_further_a_loss_has_grown_the_surer_it_is_that_it_diverges() -> None:
    series = curve(1600)
    series[1200:] += 0.005 * np.arange(1, 401)
    reported = [one.confidence for one in diverging(series)]
    assert reported == sorted(reported)
    assert reported[0] < 0.9 < reported[-1] == 0.95


def test_spikes_within_a_divergence_and_just_before_it_are_recorded_with_step_and_height() -> None:
    losses = 2.2 + 0.02 * np.random.default_rng(3).standard_normal(1200)
    losses[900:] += 0.004 * np.arange(300)
    losses[889] += 0.22  # ten scales: too little to be told alone
    losses[1000:1003] += (0.6, 1.5, 0.4)
    losses[1100] += 2.0
    found = diverging(losses)
    assert [finding.change for finding in found].count(Change.OPEN) == 1
    spikes = found[-1].evidence["spikes"]
    assert [spike["step"] for spike in spikes] == [889, 1000, 1100]
    assert [spike["height"] for spike in spikes] == pytest.approx([0.22, 1.5, 2.0], abs=0.15)
    assert "peaked at" in found[-1].summary


def humps(step: int, height: float, points: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A loss at its floor, which one hump of the optimizer lifts by a share and lets fall again."""
    losses = 0.0105 * (1 + 0.02 * np.random.default_rng(11).standard_normal(6000))
    losses[step : step + points] *= 1 + height * np.sin(np.linspace(0.0, math.pi, points))
    return losses


@pytest.mark.parametrize(("height", "points"), [(0.3, 60), (0.5, 120), (0.9, 160), (0.9, 1200)])
def test_a_hump_of_seconds_at_the_floor_of_the_loss_wakes_nobody(height: float, points: int) -> None:
    found = watched(humps(3000, height, points), step_s=0.033)
    assert {finding.severity for finding in found} <= {Severity.INFO}


def test_a_rise_that_has_lasted_a_minute_is_reported_by_its_size_which_it_has_when_it_is_found_if_steps_take_long() -> (
    None
):
    losses = humps(3000, 0.0, 10)
    losses[3000:] *= 1.8
    grave = next(finding for finding in diverging(losses, step_s=0.033) if finding.severity is not Severity.INFO)
    assert (grave.detected_time_s - 3000 * 0.033) == pytest.approx(60, abs=8)
    assert diverging(losses, step_s=10.0)[0].severity is Severity.CRITICAL


def test_a_loss_of_three_times_its_level_waits_for_no_minute() -> None:
    losses = humps(3000, 0.0, 10)
    losses[3000:] *= np.minimum(1.02 ** np.arange(3000), 50.0)
    grave = next(finding for finding in diverging(losses, step_s=0.033) if finding.severity is Severity.CRITICAL)
    assert (grave.detected_step or 0) <= 3080


STEPS = 320


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def watched_curve(
    curve: Mapping[str, Iterable[float]], optimizers: int = 1, family: str = "steps", step_s: float = 1.0
) -> list[Finding]:
    """The findings on a curve that two ranks log from step 0 on."""
    start = AttemptStart(ATTEMPT, dataclasses.replace(topology(2), optimizers=optimizers), 0.0)
    return evaluate([start, *frames_of(curve, family=family, step_s=step_s)], bank_of_curves())


def bank_of_curves() -> list[CurveDetector]:
    config = CatalogueConfig()
    kinds = {Kind.LOSS_SPIKE: config.loss, Kind.LOSS_DIVERGENCE: config.loss, Kind.GRAD_NORM: config.grad_norm}
    return [CurveDetector(kind, one) for kind, one in kinds.items()]


def frames_of(
    curve: Mapping[str, Iterable[float]],
    *,
    first: int = 0,
    attempt: str = ATTEMPT,
    family: str = "steps",
    step_s: float = 1.0,
) -> list[Frame]:
    """The rows of a curve that two ranks log, one a step."""
    frames = []
    for step, row in enumerate(zip(*curve.values(), strict=True), first):
        values = {name: [value] * 2 for name, value in zip(curve, row, strict=True)}
        frames.append(frame(step, values, attempt=attempt, family=family, time_s=step * step_s))
    return frames


@pytest.mark.parametrize(
    ("optimizer", "warm_up"), [("AdamW", 0), pytest.param("SGD with momentum", 100, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_network_opens_nothing(name: str, optimizer: str, warm_up: int) -> None:
    assert watched_curve(trained(name, optimizer, warm_up=warm_up, seed=1, steps=STEPS)) == []


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_two_networks_that_train_against_each_other_open_nothing(optimizer: str) -> None:
    assert watched_curve(adversaries(optimizer, seed=1, steps=2 * STEPS), optimizers=2) == []


def eightfold(points: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """0.28 to 2.3 in sixty steps, then level, with noise of a tenth."""
    level = 0.28 * 8.0 ** (np.clip(np.arange(points) - 10, 0, 60) / 60)
    return level * np.exp(0.1 * np.random.default_rng(seed).standard_normal(points))


@pytest.mark.parametrize("seed", range(2))
def test_a_norm_that_grows_eightfold_in_the_first_minute_opens_nothing(seed: int) -> None:
    assert watched_curve({"grad_norm": eightfold(1000, seed)}) == []


def test_a_norm_that_explodes_later_is_reported_at_once_and_for_information_only() -> None:
    norms = eightfold(300)
    norms[200] *= 60.0
    found = watched_curve({"grad_norm": norms})
    assert (found[0].detected_step, found[0].severity) == (200, Severity.INFO)


def test_a_young_loss_that_runs_away_is_reported_at_once_and_is_no_mere_information_when_it_is_not_young_any_more() -> (
    None
):
    losses = 2.3 + 0.05 * np.random.default_rng(2).standard_normal(400)
    losses[150:] += 2.0 * np.arange(250)
    found = watched_curve({"loss": losses})
    assert (found[0].detected_step or 0) <= 152
    young = [finding for finding in found if (finding.detected_step or 0) < 250]
    assert {finding.severity for finding in young} == {Severity.INFO}
    assert found[-1].kind is Kind.LOSS_DIVERGENCE
    assert found[-1].severity is Severity.CRITICAL
    assert Change.CLOSE not in [finding.change for finding in found if finding.kind is Kind.LOSS_DIVERGENCE]


def declared(step: int | None, what: str = "another model: Net, Adam", kind: str = "model") -> Occurrence:
    return Occurrence("declared", ATTEMPT, "h", float(step or 0), 0, step, {"kind": kind, "what": what, "detail": ""})


def folds(count: int, points: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """A loss that begins anew, as high as at first, with each fold."""
    return np.concatenate(
        [0.2 + 1.4 * np.exp(-np.arange(points) / 40) + curve(points, fold) / 100 for fold in range(count)]
    )


@pytest.mark.parametrize("points", [400, 60])
@pytest.mark.parametrize("before", [0, 2], ids=["with its rows", "before them"])
def test_another_model_begins_a_new_curve(points: int, before: int) -> None:
    losses = folds(5, points)
    observed: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    for row in frames_of({"loss": losses, "grad_norm": 4 * losses}):
        fold, within = divmod(row.step + before, points)
        observed += [*[declared(fold * points)] * (3 if fold and not within else 0), row]
    grave = [found for found in evaluate(observed, bank_of_curves()) if found.severity is not Severity.INFO]
    assert [(found.kind, found.detected_step) for found in grave] == []


def with_changes(series: np.ndarray[tuple[int], np.dtype[np.float64]], *steps: int, late: int = 0) -> list[Finding]:
    """The findings on a loss in which a change was declared before each of these steps, or so many rows too late."""
    observed: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    for row in frames_of({"loss": series}):
        observed += [declared(row.step - late)] if row.step - late in steps else []
        observed.append(row)
    return evaluate(observed, bank_of_curves())


def raised(points: int, onset: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    series = curve(points)
    series[onset:] += 5.0
    return series


def test_a_change_ends_nothing_that_is_open_before_the_new_level_has_stayed() -> None:
    *_, marked, ended = with_changes(raised(1700, 1480), 1500)
    assert (marked.kind, marked.change, marked.evidence["declared_step"]) == (Kind.LOSS_DIVERGENCE, Change.UPDATE, 1500)
    assert marked.severity is Severity.CRITICAL
    assert marked.summary.endswith("Training goes on with another model: Net, Adam.")
    assert (ended.change, ended.detected_step) == (Change.CLOSE, 1626)
    assert ended.summary == "The loss has stayed at a new level of 7.202 since a change was declared."


def test_a_change_in_an_open_divergence_hides_no_growth() -> None:
    series = raised(2000, 1480)
    series[1500:] *= np.exp(np.arange(500) / 100)
    found = [one for one in with_changes(series, *range(1500, 2000, 10)) if one.kind is Kind.LOSS_DIVERGENCE]
    assert Change.CLOSE not in [one.change for one in found]
    assert any("keeps growing" in one.summary for one in found if one.detected_step and one.detected_step > 1700)


@pytest.mark.parametrize("apart", [10, 40, 200])
def test_changes_declared_one_after_the_other_hide_no_loss_that_grows(apart: int) -> None:
    series = curve(1600)
    series[1000:] *= np.exp(np.arange(600) / 170)  # thirtyfold
    opened = [one for one in with_changes(series, *range(1000, 1600, apart)) if one.change is Change.OPEN]
    assert [(one.kind, one.severity) for one in opened if one.severity is not Severity.INFO][:1] == [
        (Kind.LOSS_DIVERGENCE, Severity.WARNING)
    ]


def test_growth_that_a_person_accepts_is_not_reported_again() -> None:
    series = curve(1200)
    series[1000:1100] *= np.exp(np.arange(100) / 40)
    series[1100:] *= np.exp(2.5)
    observed: list[Observation] = [AttemptStart(ATTEMPT, topology(2), 0.0)]
    for row in frames_of({"loss": series}):
        observed += [declared(1000)] if row.step == 1000 else []
        if row.step == 1150:
            fields = {"kinds": ["loss_divergence"]}
            observed.append(Occurrence("accepted", ATTEMPT, "", 0.0, None, None, fields))
        observed.append(row)
    found = [one for one in evaluate(observed, bank_of_curves()) if one.kind is Kind.LOSS_DIVERGENCE]
    assert [one.change for one in found if one.change is not Change.UPDATE] == [Change.OPEN, Change.CLOSE]


@pytest.mark.parametrize("late", [0, 1, 30])
def test_a_loss_that_is_higher_from_a_declared_step_on_is_its_level(late: int) -> None:
    found = with_changes(raised(1700, 1500), 1500, late=late)
    assert bool(found) == bool(late)
    changes = [one.change for one in found if one.change is not Change.UPDATE]
    assert changes == [Change.OPEN, Change.CLOSE] * (len(changes) // 2)


def grave(findings: Iterable[Finding]) -> list[tuple[Kind, int | None]]:
    return [(one.kind, one.detected_step) for one in findings if one.severity is not Severity.INFO]


def tasks(
    share: float, height: float, points: int = 2000, seed: int = 0
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Two tasks at random, the losses of one of them so many times higher; both fall."""
    rng, steps = np.random.default_rng(seed), np.arange(points)
    lower = (0.3 + 1.2 * np.exp(-steps / 300)) * (1 + 0.05 * rng.standard_normal(points))
    higher = height * (0.3 + np.exp(-steps / 400)) * rng.chisquare(16, points) / 16
    return np.where(rng.random(points) < share, higher, lower)


@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
@pytest.mark.parametrize(("share", "height"), [(0.01, 20), (0.1, 20), (0.1, 2.5), (0.3, 20)])
def test_a_curve_of_two_levels_is_learned(share: float, height: float, metric: str) -> None:
    found = watched(tasks(share, height), metric)
    assert grave(found) == []
    assert len([one for one in found if one.change is Change.OPEN]) <= 6


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_a_loss_of_two_levels_that_leaves_them_is_a_divergence_within_forty_points(share: float) -> None:
    series = tasks(share, 20)
    series[1500:] += 12.0
    opened = [one for one in diverging(series) if one.severity is Severity.CRITICAL]
    assert 1500 <= (opened[0].detected_step or 0) <= 1540


@pytest.mark.parametrize("length", [1, 6, 30])
def test_what_came_and_went_is_reported_once_and_then_known(length: int) -> None:
    series = curve(4000)
    for begin in range(600, 3600, 300):
        series[begin : begin + length] *= 3
    found = watched(series)
    opened = [one for one in found if one.change is Change.OPEN]
    assert len(opened) <= 6
    assert all((one.detected_step or 0) < 1300 for one in opened)
    known = [one.summary for one in found if one.change is Change.CLOSE][-1]
    assert known.endswith("It has come back 3 times: such jumps are not reported any more.")


def test_a_jump_higher_or_longer_than_all_that_came_and_went_is_reported() -> None:
    series = curve(4000)
    series[600:2400:300] *= 2
    series[2600] *= 8
    series[3000:] *= 2
    found = [one for one in watched(series) if (one.detected_step or 0) >= 2500]
    assert (Kind.LOSS_SPIKE, 2600) in grave(found)
    assert (Kind.LOSS_DIVERGENCE, Change.OPEN) in changes(found)
    assert found[-1].severity is Severity.CRITICAL


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("metric", ["loss", "grad_norm"])
def test_a_value_of_few_digits_that_moves_in_the_last_one_raises_nothing(metric: str, single: bool) -> None:
    rng = np.random.default_rng(0)
    for level, digit in ((0.0001, 0.0001), (2.3026, 0.0001), (0.0, 0.0001), (12.0, 1.0)):
        series = level + digit * (rng.random(1500) < 0.02)
        assert watched(series.astype(np.float32) if single else np.round(series, 4), metric) == []


def test_a_constant_that_is_left_is_reported() -> None:
    series = np.full(1500, 2.3026)
    series[800:] = 5.0
    found = watched(series)
    assert found[0].summary == "The loss jumped to 5 in step 800, 2.2 times its usual 2.303."


@pytest.mark.parametrize("growth", [0.01, 0.03, 0.1])
def test_growth_from_the_first_step_is_no_mere_information_once_it_lasts(growth: float) -> None:
    noise = 1 + 0.03 * np.random.default_rng(0).standard_normal(400)
    found = watched(2.3 * np.exp(growth * np.arange(400)) * noise)
    critical = [one for one in found if one.severity is Severity.CRITICAL]
    assert critical[0].kind is Kind.LOSS_DIVERGENCE
    assert (critical[0].detected_step or 0) <= 330


def test_a_loss_that_grows_and_slows_down_does_not_run_away() -> None:
    steps = np.arange(440)
    noise = 1 + 0.3 * np.abs(np.random.default_rng(0).standard_normal(440))
    assert grave(watched((0.01 + 5 * (1 - np.exp(-steps / 300))) * noise)) == []


def test_sentences_have_the_words_of_training() -> None:
    norms = np.exp(0.1 * np.random.default_rng(0).standard_normal(900))
    norms[700] = 32.0
    losses = 4.78 + 0.01 * np.random.default_rng(1).standard_normal(900)
    losses[600:] += 6.7
    reported = [one.summary for one in watched_curve({"loss": losses, "grad_norm": norms})]
    assert "The gradient norm jumped to 32 in step 700, 32 times its usual 1.01" in " ".join(reported)
    assert any(
        one.startswith("The loss has been high since step 600: 11.") and "2.4 times its usual 4.7" in one
        for one in reported
    )
    assert not any("sigma" in one or "grad_norm" in one for one in reported)


def test_a_curve_that_goes_back_runs_away_from_a_level_that_it_still_has() -> None:
    settling = Settling(SettlingConfig())
    for steps, rate in ((range(300), 0.995), (range(100, 300), 1.03)):
        settling.interrupt()
        settling.resume(steps[0])
        for step in steps:
            settling.advance(step)
            settling.learn(3.0 * rate ** (step - steps[0]))
            if settling.runs_away:
                break
    assert settling.runs_away
    assert 100 <= settling.lowest_step < step


def resumed(at: int, ratio: float, attempt: str = "run.1", ahead: int = 600, noise: float = 0.03) -> list[Finding]:
    """The findings after 900 steps of a training that then goes on at a step, with so many times the loss."""
    series = curve(3000, noise=noise)
    again = series[at : at + ahead] * ratio
    norms = np.exp(0.1 * np.random.default_rng(3).standard_normal(3000))
    before = frames_of({"loss": series[:900], "grad_norm": norms[:900]})
    after = frames_of({"loss": again, "grad_norm": norms[at : at + ahead]}, first=at, attempt=attempt)
    after = [dataclasses.replace(one, time_s=one.time_s + 900) for one in after]
    starts = [AttemptStart(ATTEMPT, topology(2), 0.0), AttemptStart(attempt, topology(2), 900.0)]
    return evaluate([starts[0], *before, starts[1], *after], bank_of_curves())


@pytest.mark.parametrize("attempt", ["run.1", "again.0"], ids=["same process", "relaunch"])
@pytest.mark.parametrize("at", [50, 100, 500, 900])
def test_a_training_that_goes_back_goes_on_as_it_was_there(at: int, attempt: str) -> None:
    assert resumed(at, 1.0, attempt) == []


@pytest.mark.parametrize("attempt", ["run.1", "again.0"], ids=["same process", "relaunch"])
@pytest.mark.parametrize("at", [500, 900, 1200])
def test_a_loss_that_is_higher_after_a_resume_than_before_is_reported(at: int, attempt: str) -> None:
    found = resumed(at, 1.6, attempt)
    assert found[0].kind is Kind.LOSS_SPIKE
    assert found[0].onset_step == at
    assert [one.severity for one in found if one.kind is Kind.LOSS_DIVERGENCE][-1] is Severity.CRITICAL
    assert resumed(at, 0.7, attempt) == []


def test_the_memory_of_a_long_curve_is_bounded() -> None:
    settling = Settling(SettlingConfig())
    for step in range(200_000):
        settling.advance(step)
        settling.learn(1.0 + step)
    assert len(settling.snapshot()["_history"]) <= 64
    assert settling.resume(100_000) == pytest.approx(100_000, abs=8_000)


def test_a_schedule_that_restarts_is_no_divergence() -> None:
    steps = np.arange(2400) % 600
    rates = 1e-3 * (0.505 + 0.495 * np.cos(np.pi * steps / 600))
    losses = curve(2400) + np.where(np.arange(2400) >= 600, 1.4 * np.exp(-steps / 80), 0.0)
    found = watched_curve({"loss": losses, "lr": rates})
    assert grave(found) == []
    assert len([one for one in found if one.change is Change.OPEN]) <= 6
