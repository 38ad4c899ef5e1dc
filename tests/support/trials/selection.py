"""Which trials run: a few of them by default, all of them with `RANKWATCH_FAULT_TRIALS=all` (`make faults`)."""

import os

import pytest

ALL = os.environ.get("RANKWATCH_FAULT_TRIALS", "") == "all"

long_trial = pytest.mark.skipif(not ALL, reason="a long trial: RANKWATCH_FAULT_TRIALS=all runs it")
