"""Precision is a figure with its uncertainty, and a low one proposes what to change."""

import pytest

from rankwatch_service.policy.policy import Mode, Policy, Rule, demotion
from rankwatch_service.policy.precision import Precision

LOW = Precision(useful=2, noise=3)
HANGS = Rule("hangs", Mode.ACT, kind="hang", action="relaunch")
ALL = Rule("all", Mode.ACT, action="pause")


@pytest.mark.parametrize(
    ("useful", "noise", "ratio", "interval"),
    [
        (0, 0, None, (0.0, 1.0)),
        (1, 0, 1.0, (0.207, 1.0)),
        (0, 1, 0.0, (0.0, 0.793)),
        (5, 5, 0.5, (0.237, 0.763)),
        (90, 10, 0.9, (0.826, 0.945)),
    ],
)
def test_the_ratio_comes_with_wilsons_interval(useful, noise, ratio, interval):
    precision = Precision(useful, noise)
    assert precision.ratio == ratio
    assert precision.interval == pytest.approx(interval, abs=5e-4)


@pytest.mark.parametrize(("useful", "noise", "low"), [(0, 4, False), (2, 3, True), (3, 3, False), (0, 5, True)])
def test_a_precision_is_low_below_one_half_of_five_answers_or_more(useful, noise, low):
    assert Precision(useful, noise).is_low is low
    assert (demotion("hang", Precision(useful, noise), Policy()) != "") is low


@pytest.mark.parametrize(
    ("rules", "proposed"),
    [
        ((), "no rule acts on it: leave it out of the receivers that page people"),
        ((Rule("s", Mode.SUGGEST, kind="hang", action="stop"),), "no rule acts on it"),
        ((Rule("other", Mode.ACT, kind="straggler", action="stop"),), "no rule acts on it"),
        ((HANGS,), "set the mode of hangs to suggest"),
        ((HANGS, ALL), "put a rule for hang with mode suggest before hangs, all"),
    ],
)
def test_what_is_proposed_depends_on_the_rules_that_act_on_the_kind(rules, proposed):
    assert demotion("hang", LOW, Policy(rules)).startswith(proposed)
