"""The table of kinds, and every other place that names them: all name the same ones."""

from pathlib import Path

import pytest

from rankwatch_detectors.base import Kind
from rankwatch_service.api.routes.receivers import ReceiverSettings
from rankwatch_service.incidents.answers import impact, normal
from rankwatch_service.incidents.kinds import KINDS
from rankwatch_service.policy.actions import POLICY_ACTIONS, Action
from rankwatch_service.policy.suggestion import WAIT

ROOT = Path(__file__).parents[3]


def test_every_kind_has_its_row():
    assert set(KINDS) == set(Kind)


def test_every_kind_has_a_runbook_and_every_runbook_a_kind():
    assert {page.stem for page in (ROOT / "docs" / "incidents").glob("*.md")} == {str(kind) for kind in KINDS}


def test_a_receiver_can_be_limited_to_any_kind():
    assert ReceiverSettings(url="kafka:", kinds=list(KINDS)).kinds == list(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_something_to_do_first(kind):
    assert KINDS[kind].first_steps


def test_every_kind_says_in_its_own_words_what_is_normal_and_how_bad_it_is():
    for answers in ([normal(kind, {}) for kind in KINDS], [impact(kind, "critical", {}) for kind in KINDS]):
        assert len(set(answers)) == len(KINDS)
        assert not any(answer.endswith(".") for answer in answers)


def test_the_page_of_answers_says_of_every_kind_what_the_incident_says():
    page = (ROOT / "docs" / "answers.md").read_text()
    rows = [line for line in page.splitlines() if "](incidents/" in line]
    assert rows == [
        f"| [{row.label}](incidents/{kind}.md) | {usual} | {impact(kind, 'critical', {})} | {row.first_steps[0]} |"
        for kind, row in KINDS.items()
        for usual in [normal(kind, {})]
    ], "docs/answers.md has the rows of KINDS, in that order"


def test_what_is_no_fault_or_has_ended_by_itself_has_no_impact():
    assert impact("rank_lost", "info", {}) == "none: nothing is wrong"
    assert impact("hang", "critical", {"ended_by_itself": True}) == "none any more: it has ended by itself"


@pytest.mark.parametrize("kind", KINDS)
def test_what_helps_is_an_action_or_waiting(kind):
    assert KINDS[kind].actions
    assert set(KINDS[kind].actions) <= {WAIT, Action.TRACE, *POLICY_ACTIONS}
