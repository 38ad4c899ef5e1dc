"""Each line of the labelled suite, with one seed: found, rightly named, soon enough, and nothing else said.

The goal of each line stands in `suite.cases` and `suite.conditions`; `benchmarks/detection.py` prints the figures
over many seeds. A quarter and two steps are added here, so that another version of numpy is no failure.
"""

from __future__ import annotations

import math

import pytest

from rankwatch_service.notify.message_limit import MESSAGES_PER_HOUR
from suite.cases import FAULTS, SILENT, Case, straggler, stragglers
from suite.conditions import combined, conditions_alone, on_accelerators, slow_changes, wandering_pace
from suite.scoring import score
from tests.support.trials.selection import ALL, in_ci

LINES = [*stragglers((8,)), *FAULTS]
LARGE_LINES = in_ci([*stragglers((1024,)), straggler(16_384, 1.05)])
DEVICE_LINES = in_ci(on_accelerators([*stragglers((8, 1024)), *FAULTS]))
SIZES = (16, 64, 1024) if ALL else (16, 1024)
WANDERING_SIZES = (8, 64, 256) if ALL else (8, 256)
COMBINED = [*combined((16,))]
SLOW = [*slow_changes((16,))]
TOLD_PER_CAUSE_MAX = 3.0
"""What grows is reported again, and again when it becomes critical; `benchmarks/cascades.py` has the mean."""


@pytest.mark.parametrize("case", [*LINES, *LARGE_LINES, *DEVICE_LINES], ids=lambda case: case.name)
def test_a_fault_is_found_and_named_in_time_and_nothing_else_is_said(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert got.caused == got.named
    assert math.isinf(case.delay_max) or max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.told <= TOLD_PER_CAUSE_MAX * got.roots


@pytest.mark.parametrize("case", SILENT, ids=lambda case: case.name)
def test_where_nothing_is_wrong_nobody_is_disturbed(case: Case) -> None:
    got = score(case, range(1))
    assert got.false == []
    assert got.told <= MESSAGES_PER_HOUR


@pytest.mark.parametrize(
    "case", [*COMBINED[::2], *in_ci([*COMBINED[1::2], *combined(SIZES[1:])])], ids=lambda case: case.name
)
def test_a_fault_in_a_job_with_a_way_of_its_own_is_one_incident_found_and_named(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.incidents == got.roots


@pytest.mark.parametrize(
    "case",
    [
        *conditions_alone((16,)),
        *wandering_pace((8,)),
        *in_ci([*conditions_alone(SIZES[1:]), *wandering_pace(WANDERING_SIZES[1:])]),
    ],
    ids=lambda case: case.name,
)
def test_a_jobs_own_way_disturbs_nobody(case: Case) -> None:
    got = score(case, range(1))
    assert (got.named, got.false, got.incidents) == (got.labels, [], got.roots)
    assert got.labels or got.told <= MESSAGES_PER_HOUR


@pytest.mark.parametrize("case", [*SLOW[::2], *in_ci(SLOW[1::2])], ids=lambda case: case.name)
def test_what_changes_slowly_or_on_one_rank_alone_is_found_and_named_beside_anything_else(case: Case) -> None:
    got = score(case, range(1))
    assert (got.found, got.named) == (got.labels, got.labels)
    assert max(got.delays) <= 1.25 * case.delay_max + 2
    assert got.false == []
    assert got.incidents <= got.roots
