"""A script as it is, when nothing may be reported, or with a fault, which is named and nothing else.

`make ci` tries each script once. Three train at a time, while others are judged; those whose fault is a matter of time
train alone. `ADOPTION=all` (`make adoption`) tries all faults with all scripts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from tests.adoption.cases import CASES, ENDS, SLOW, Case, Fault
from tests.adoption.world import Outcome, opened_world

pytestmark = [pytest.mark.torch, pytest.mark.integration, pytest.mark.slow, pytest.mark.alone, pytest.mark.ci]

ALL = os.environ.get("ADOPTION") == "all"
pytestmark += [pytest.mark.timeout(14_400 if ALL else 900)]
AT_A_TIME = 6
"""Half of them train."""


def cases() -> list[Any]:
    """What is tried: the case, and the fault where there is one."""
    return [
        pytest.param(case, fault, id=f"{case.name}-{fault.name if fault else 'clean'}")
        for case in CASES
        for fault in ((None, *case.faults) if ALL else case.in_test)
    ]


Run = tuple[Case, Fault | None]
Outcomes = Callable[[Case, Fault | None], Outcome]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcomes]:
    """Starts what the selected tests will ask for, and waits for what one asks for."""
    wanted = [item.callspec.params for item in request.session.items if item.module is request.module]
    runs = [(one["case"], one["fault"]) for one in wanted]
    with opened_world(tmp_path_factory.mktemp("adoption")) as world, ThreadPoolExecutor(AT_A_TIME) as pool:

        def started(slow: bool) -> dict[Run, Future[Outcome]]:
            return {run: pool.submit(world.run, *run) for run in runs if (run[1] is SLOW) == slow}

        together, alone = started(slow=False), dict[Run, Future[Outcome]]()

        def outcome(case: Case, fault: Fault | None) -> Outcome:
            if fault is SLOW and not alone:
                wait(together.values())
                alone.update(started(slow=True))
            return (alone if fault is SLOW else together)[case, fault].result()

        yield outcome
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("case", "fault"), cases())
def test_a_fault_is_named_and_nothing_else_and_nothing_is_told_of_a_script_with_which_all_is_well(
    outcomes: Outcomes, case: Case, fault: Fault | None
):
    outcome = outcomes(case, fault)
    assert outcome.right(fault), str(outcome)
    if fault not in ENDS:
        arrived = outcome.loss is not None
        assert arrived == case.loss_falls, f"the loss that the script logs did not arrive: {outcome}"
