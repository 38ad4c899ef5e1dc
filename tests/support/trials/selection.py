"""The trials that run: a few by default, all with `RANKWATCH_FAULT_TRIALS=all` (`make faults`, `make long`)."""

import os

import pytest

ALL = os.environ.get("RANKWATCH_FAULT_TRIALS", "") == "all"

long_trial = pytest.mark.skipif(not ALL, reason="a long trial: RANKWATCH_FAULT_TRIALS=all runs it")


def trials(usual: int, long: int) -> int:
    """How many trials there are where their input is drawn."""
    return long if ALL else usual
