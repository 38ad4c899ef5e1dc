"""Each script once as it is, when nothing may be told, and once with a fault, which is named and nothing else.

`make adoption` tries all faults with all scripts, three times, also beside CPU burners.
"""

import pytest

from tests.adoption.cases import CASES, Case, Fault, rotated
from tests.adoption.world import opened_world

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.slow, pytest.mark.timeout(300)]

FAULTS = [(case, fault) for case in CASES for fault in (case.faults if case.all_in_test else [rotated(case)])]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    with opened_world(tmp_path_factory.mktemp("adoption")) as world:
        yield world


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_nothing_is_told_of_a_script_with_which_all_is_well(world, case: Case):
    outcome = world.clean(case)
    assert outcome.loud == [], outcome


@pytest.mark.parametrize(("case", "fault"), FAULTS, ids=lambda one: one.name)
def test_a_fault_is_named_and_nothing_else(world, case: Case, fault: Fault):
    outcome = world.faulty(case, fault, rank=1)
    assert outcome.told(fault, 1), outcome
    assert len(outcome.loud) == 1, outcome
