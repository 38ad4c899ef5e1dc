"""The numbers of a sentence about pace agree with each other, whatever they are."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from rankwatch_detectors.pace.step_parts import shifted
from rankwatch_detectors.statistics.shift import Crossing
from rankwatch_detectors.words import duration, more_than, slower_than

UNIT_S = {"ms": 1e-3, "s": 1.0}


def times_of(sentence: str) -> list[float]:
    return [float(number) * UNIT_S[unit] for number, unit in re.findall(r"([\d.]+) (ms|s)\b", sentence)]


def ratio_of(sentence: str) -> tuple[float, float]:
    """The ratio in a sentence, and by how much it may be rounded."""
    if found := re.search(r"([\d.]+) % (slower|more)", sentence):
        told = found[1]
        return 1 + float(told) / 100, 0.5 * 10.0 ** -(2 + len(told.partition(".")[2]))
    found = re.search(r"([\d.]+) times as (slow|much)", sentence)
    assert found, sentence
    return float(found[1]), 0.05


@pytest.mark.parametrize("shared", [False, True])
def test_per_cent_and_seconds_agree(shared: bool) -> None:
    random = np.random.default_rng(1)
    for ratio, seconds in zip(
        np.exp(random.uniform(0.01, 3.0, 5000)), np.exp(random.uniform(-7, 7, 5000)), strict=True
    ):
        crossing = Crossing(0, math.log(ratio), 120, 20, 30.0)
        told = shifted(crossing, float(seconds), 0.02, 8, shared=shared, grown_s={}, cause="")
        now_s, usual_s = times_of(told["summary"].partition("(")[2])
        said, rounded = ratio_of(told["summary"])
        assert said > 1.0
        assert now_s / usual_s == pytest.approx(said, abs=1.01 * rounded + 0.011 * said), told["summary"]
        assert told["evidence"]["cost_gpu_hours_per_hour"] > 0.0


def test_no_number_is_one_that_nobody_reads() -> None:
    for ratio in np.exp(np.random.default_rng(2).uniform(0.01, 5.0, 5000)):
        for sentence in (slower_than(ratio, "its peers"), more_than(ratio, "CPU time", "before")):
            assert not re.search(r"\de[+-]|-|\b0 %|\b1\.\d times", sentence), sentence
    for seconds in np.exp(np.random.default_rng(3).uniform(-12, 9, 5000)):
        assert "e+" not in duration(seconds)
