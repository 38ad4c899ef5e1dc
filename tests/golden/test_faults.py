"""What users see of 40 simulated faults, and what the database holds, is what `faults.jsonl` says."""

from __future__ import annotations

import difflib

import pytest

from tests.golden.make_faults import FAULTS, Fault, play, stored, written

STORED = stored()


def test_the_file_holds_these_faults() -> None:
    assert list(STORED) == [fault.name for fault in FAULTS]
    assert len(FAULTS) == 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_as_it_was(fault: Fault) -> None:
    before, after = STORED[fault.name], written(play(fault))
    if before != after:
        changes = difflib.unified_diff(before, after, "stored", "played", n=0, lineterm="")
        pytest.fail("\n".join([f"{fault.name} {fault.script}", *changes]), pytrace=False)
