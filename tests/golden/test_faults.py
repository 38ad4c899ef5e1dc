"""What users see of 40 simulated faults, and what the database holds, is what `faults.jsonl` says."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.golden.make_faults import FAULTS, Fault, play, stored, written

STORED = stored()


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Each value that differs, with its place: `evidence.factor: 1.6 -> 1.7`."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in sorted(before.keys() | after.keys()):
            place = f"{path}.{name}" if path else name
            if name not in after:
                yield f"{place}: {before[name]!r} -> gone"
            elif name not in before:
                yield f"{place}: new {after[name]!r}"
            else:
                yield from differences(before[name], after[name], place)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif before != after:
        yield f"{path}: {before!r} -> {after!r}"


def told(before: list[str], after: list[str]) -> list[str]:
    """The rows that came and went, and of those at the same place, what differs in them."""
    kinds = [[json.loads(line)["row"] for line in lines] for lines in (before, after)]
    found = []
    for what, from_, to, other_from, other_to in difflib.SequenceMatcher(None, *kinds, autojunk=False).get_opcodes():
        if what == "equal":
            pairs = zip(before[from_:to], after[other_from:other_to], strict=True)
            for number, (one, other) in enumerate(pairs, from_ + 1):
                changed = list(differences(json.loads(one), json.loads(other)))
                found += [f"row {number}, {kinds[0][number - 1]}: {change}" for change in changed]
        else:
            found += [f"gone: {line[:300]}" for line in before[from_:to]]
            found += [f"new: {line[:300]}" for line in after[other_from:other_to]]
    return found


def test_the_file_holds_these_faults() -> None:
    assert list(STORED) == [fault.name for fault in FAULTS]
    assert len(FAULTS) == 40


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_told_as_it_was(fault: Fault) -> None:
    before, after = STORED[fault.name], written(play(fault))
    if before != after:
        pytest.fail("\n".join([f"{fault.name} {fault.script}", *told(before, after)]), pytrace=False)
