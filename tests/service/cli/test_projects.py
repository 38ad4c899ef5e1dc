"""Projects and owners on the command line, against a real api on a real port."""

import json

import pytest
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Job
from tests.support.values.incidents import incident_row


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    """The service has the jobs a and b."""
    with write(api.engine) as connection:
        for name in ("a", "b"):
            row = {"state": "running", "attempt": "l.0", "world_size": 4, "ranks_reporting": 4, "step": 5}
            seen = {"first_seen_unix_ns": 1, "last_seen_unix_ns": 2}
            connection.execute(insert(Job).values(name=name, **row, **seen))
            connection.execute(insert(Incident).values(**incident_row(id=f"inc_of_{name}", job=name)))


def rows(terminal, *arguments):
    return [json.loads(line) for line in terminal.run(*arguments, "--json")[1].splitlines()]


def test_a_job_gets_project_and_owner_and_lists_are_restricted_to_a_project(terminal, to):
    status, _, err = terminal.run("jobs", "edit", "a", "--project", "nlp", "--owner", "ann", *to)
    assert (status, err) == (0, "a: project nlp, owner ann\n")
    assert terminal.run("jobs", "edit", "a", "--owner", "bob", *to)[0] == 0
    (job,) = rows(terminal, "jobs", "--project", "nlp", *to)
    assert (job["name"], job["project"], job["owner"]) == ("a", "nlp", "bob")
    listed = terminal.run("jobs", *to)[1]
    assert "nlp" in listed
    assert "bob" in listed
    assert [one["job"] for one in rows(terminal, "incidents", "--project", "nlp", *to)] == ["a"]
    assert rows(terminal, "incidents", "--project", "other", *to) == []
    assert terminal.run("jobs", "edit", "a", "--project", "", *to)[2] == "a: project none, owner bob\n"


def test_an_edit_without_anything_to_set_says_so(terminal, to):
    status, _, err = terminal.run("jobs", "edit", "a", *to)
    assert (status, "--project, --owner" in err) == (2, True)
