"""What users see of 40 simulated faults, and what the database holds, is as `faults.txt` says."""

from __future__ import annotations

import pytest

from tests.golden.make_faults import FAULTS, Fault, digests, play, stored, written

STORED = stored()
SHOWN_MAX = 20


def test_the_file_holds_these_faults() -> None:
    assert list(STORED) == [fault.name for fault in FAULTS]
    assert len(FAULTS) == 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_reported_as_it_was(fault: Fault) -> None:
    before, lines = STORED[fault.name], written(play(fault))
    after = digests(lines)
    if before != after:
        gone = [f"- {line}" for line in before if line not in after]
        come = [f"+ {line}" for line, digest in zip(lines, after, strict=True) if digest not in before]
        changes = [*gone[:SHOWN_MAX], *come[:SHOWN_MAX]] or ["the order of its rows"]
        pytest.fail("\n".join([f"{fault.name} {fault.script}", *changes]), pytrace=False)
