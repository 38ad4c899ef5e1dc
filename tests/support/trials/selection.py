"""The trials that run: a few by default, more with the marker `ci` (`make ci`), and all of them with
`RANKWATCH_FAULT_TRIALS=all` (`make faults`, `make long`).
"""

import os
from collections.abc import Iterable
from typing import Any

import pytest

ALL = os.environ.get("RANKWATCH_FAULT_TRIALS", "") == "all"

long_trial = pytest.mark.skipif(not ALL, reason="a long trial: RANKWATCH_FAULT_TRIALS=all runs it")


def in_ci(cases: Iterable[Any]) -> list[Any]:
    """Further cases of a matrix, as parameters that run with `make ci`: another case shows what they have in common."""
    return [pytest.param(case, marks=pytest.mark.ci) for case in cases]


def trials(usual: int, long: int) -> int:
    """How many trials there are where their input is drawn."""
    return long if ALL else usual
