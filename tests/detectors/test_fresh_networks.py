"""Networks trained from nothing: their norms grow, their losses fall in steps, and none of it is anybody's trouble."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from rankwatch_detectors.base import AttemptStart, Change, Finding, Kind, Severity
from rankwatch_detectors.catalogue import CatalogueConfig
from rankwatch_detectors.values.training_curve import CurveDetector
from suite.networks import NETWORKS, Curve, adversaries, trained
from tests.support.detection.verdicts import judge
from tests.support.values.presences import ATTEMPT, frame, topology

STEPS = 320


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small are slower on two."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def watched(curve: Curve, optimizers: int = 1) -> list[Finding]:
    """What is told of a curve that two ranks log from step 0 on."""
    config = CatalogueConfig()
    bank = [
        CurveDetector(Kind.LOSS_SPIKE, config.loss),
        CurveDetector(Kind.LOSS_DIVERGENCE, config.loss),
        CurveDetector(Kind.GRAD_NORM, config.grad_norm),
    ]
    start = AttemptStart(ATTEMPT, dataclasses.replace(topology(2), optimizers=optimizers), 0.0)
    rows = zip(*curve.values(), strict=True)
    frames = (
        frame(step, {name: [value] * 2 for name, value in zip(curve, row, strict=True)})
        for step, row in enumerate(rows)
    )
    return judge([start, *frames], bank)


@pytest.mark.parametrize(
    ("optimizer", "warm_up"), [("AdamW", 0), pytest.param("SGD with momentum", 100, marks=pytest.mark.ci)]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_new_network_opens_nothing(name: str, optimizer: str, warm_up: int) -> None:
    assert watched(trained(name, optimizer, warm_up=warm_up, seed=1, steps=STEPS)) == []


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_two_networks_that_train_against_each_other_open_nothing(optimizer: str) -> None:
    assert watched(adversaries(optimizer, seed=1, steps=2 * STEPS), optimizers=2) == []


def eightfold(points: int, seed: int = 0) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """0.28 to 2.3 in sixty steps, then level, with noise of a tenth."""
    level = 0.28 * 8.0 ** (np.clip(np.arange(points) - 10, 0, 60) / 60)
    return level * np.exp(0.1 * np.random.default_rng(seed).standard_normal(points))


@pytest.mark.parametrize("seed", range(5))
def test_a_norm_that_grows_eightfold_in_the_first_minute_opens_nothing(seed: int) -> None:
    assert watched({"grad_norm": eightfold(1000, seed)}) == []


def test_a_norm_that_explodes_later_is_told_at_once_and_for_information_only() -> None:
    norms = eightfold(300)
    norms[200] *= 60.0
    found = watched({"grad_norm": norms})
    assert (found[0].detected_step, found[0].severity) == (200, Severity.INFO)


def test_a_young_loss_that_runs_away_is_told_at_once_and_is_no_mere_information_when_it_is_not_young_any_more() -> None:
    losses = 2.3 + 0.05 * np.random.default_rng(2).standard_normal(400)
    losses[150:] += 2.0 * np.arange(250)
    found = watched({"loss": losses})
    assert (found[0].detected_step or 0) <= 152
    young = [finding for finding in found if (finding.detected_step or 0) < 250]
    assert {finding.severity for finding in young} == {Severity.INFO}
    assert found[-1].kind is Kind.LOSS_DIVERGENCE
    assert found[-1].severity is Severity.CRITICAL
    assert Change.CLOSE not in [finding.change for finding in found if finding.kind is Kind.LOSS_DIVERGENCE]
