"""Feedback on incidents and precision on the command line, against a real api on a real port."""

import json

import pytest
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident
from tests.support.service.served_api import served_api
from tests.support.service.terminal import Terminal
from tests.support.values.incidents import incident_row


@pytest.fixture
def terminal(capsys, monkeypatch, tmp_path):
    return Terminal(capsys, monkeypatch, tmp_path)


@pytest.fixture(scope="module")
def to(tmp_path_factory):
    """Options that name the service, which has one incident."""
    with served_api(tmp_path_factory.mktemp("api")) as (api, url):
        with write(api.engine) as connection:
            connection.execute(insert(Incident).values(**incident_row(detected_unix_ns=api.clock.unix_ns())))
        yield "--url", url, "--token", api.admin


def answers(terminal, to):
    (shown,) = terminal.run("incidents", "show", "inc_1", "--json", *to)[1].splitlines()
    return [one["answer"] for one in json.loads(shown)["feedback"]]


def test_an_answer_is_given_shown_changed_and_withdrawn(terminal, to):
    status, _, err = terminal.run("incidents", "feedback", "inc_1", "noise", *to)
    assert (status, err) == (0, "inc_1: noise\n")
    assert "noise (admin)" in terminal.run("incidents", "show", "inc_1", *to)[1]
    assert terminal.run("incidents", "feedback", "inc_1", "useful", *to)[0] == 0
    assert answers(terminal, to) == ["useful"]
    assert terminal.run("incidents", "feedback", "inc_1", "none", *to)[2] == "inc_1: your answer is withdrawn\n"
    assert answers(terminal, to) == []


def test_another_answer_is_refused_with_those_that_there_are(terminal, to):
    status, _, err = terminal.run("incidents", "feedback", "inc_1", "great", *to)
    assert (status, "'useful', 'noise' or 'duplicate'" in err) == (2, True)


def test_precision_is_shown_with_its_range_by_kind_and_by_job(terminal, to):
    terminal.run("incidents", "feedback", "inc_1", "useful", *to)
    shown = terminal.run("precision", *to)[1]
    assert "straggler  100% (21% to 100%)  1" in shown
    assert "gpt-small" in terminal.run("precision", "--by-job", *to)[1]
    (kind,) = terminal.run("precision", "--json", *to)[1].splitlines()
    assert json.loads(kind)["ratio"] == 1.0
    terminal.run("incidents", "feedback", "inc_1", "none", *to)
