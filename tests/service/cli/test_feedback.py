"""Feedback on incidents and precision on the command line, against a real api on a real port."""

import json

import pytest
from sqlalchemy import delete, insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, Incident, IncidentFeedback
from tests.support.values.incidents import incident_row


@pytest.fixture(autouse=True)
def incident(api):
    """One incident, about which nobody has said anything."""
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row(detected_unix_ns=api.clock.unix_ns())))
    yield
    with write(api.engine) as connection:
        for table in (IncidentFeedback, Command, Incident):
            connection.execute(delete(table))


def answers(rankwatch):
    (shown,) = rankwatch("incidents", "show", "inc_1", "--json")[1].splitlines()
    return [one["answer"] for one in json.loads(shown)["feedback"]]


def test_an_answer_is_given_shown_changed_and_withdrawn(rankwatch):
    status, _, err = rankwatch("incidents", "feedback", "inc_1", "noise")
    assert (status, err) == (0, "inc_1: noise\n")
    assert "noise (admin)" in rankwatch("incidents", "show", "inc_1")[1]
    assert rankwatch("incidents", "feedback", "inc_1", "useful")[0] == 0
    assert answers(rankwatch) == ["useful"]
    assert rankwatch("incidents", "feedback", "inc_1", "none")[2] == "inc_1: your answer is withdrawn\n"
    assert answers(rankwatch) == []


def test_another_answer_is_refused_with_those_that_there_are(rankwatch):
    status, _, err = rankwatch("incidents", "feedback", "inc_1", "great")
    assert (status, "'useful', 'noise' or 'duplicate'" in err) == (2, True)


def test_precision_is_shown_with_its_range_by_kind_and_by_job(rankwatch):
    rankwatch("incidents", "feedback", "inc_1", "useful")
    assert "straggler  100% (21% to 100%)  1" in rankwatch("precision")[1]
    assert "gpt-small" in rankwatch("precision", "--by-job")[1]
    (kind,) = rankwatch("precision", "--json")[1].splitlines()
    assert json.loads(kind)["ratio"] == 1.0


def test_false_actions_are_shown_with_precision(rankwatch, api):
    assert rankwatch("precision")[2] == "the policy has not acted in the last 30 days\n"
    row = {
        "id": "cmd_1", "job": "gpt-small", "attempt": "l.0", "action": "pause", "params": {}, "reason": "",
        "result": "", "requested_by": "policy", "incident_id": "inc_1", "state": "applied", "expires_unix_ns": 0,
        "requested_unix_ns": api.clock.unix_ns(),
    }  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Command).values(**row))
    rankwatch("incidents", "feedback", "inc_1", "noise")
    share = "1 on noise (100%), 0 on unanswered incidents"
    assert rankwatch("precision")[2] == f"actions of the policy in the last 30 days: 1, of which {share}\n"
