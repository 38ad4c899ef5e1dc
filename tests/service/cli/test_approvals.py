"""Two people at two terminals: one requests, the other approves or refuses."""

import json

import pytest

from rankwatch_service.access.scopes import Scope
from rankwatch_service.short_ids import short
from rankwatch_service.store.models import Attempt
from tests.support.store.rows import add, attempt_row, report


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    add(api.engine, Attempt, attempt_row("gpt", can=["pause", "stop", "relaunch"], world_size=128))
    report(api.engine, "gpt")


@pytest.fixture
def ann(to):
    return to


@pytest.fixture
def bob(api):
    return ("--url", api.url, "--token", api.token(Scope.COMMAND, Scope.READ))


def test_the_policy_is_printed_changed_and_replaced(terminal, api, ann, tmp_path):
    api.ask("PUT", "/api/v1/policy", json={})
    status, out, _ = terminal.run("policy", *ann)
    policy = json.loads(out)
    assert (status, policy["two_people"]) == (0, False)
    document = tmp_path / "policy.json"
    document.write_text(json.dumps(policy | {"two_people": True}))
    assert terminal.run("policy", "set", str(document), *ann)[0] == 0
    assert json.loads(terminal.run("policy", *ann)[1]) == policy | {"two_people": True}


@pytest.mark.parametrize("content", ["two_people: true", "[1]", '{"two_people": "yes"}', '{"two": true}'])
def test_a_document_that_is_no_policy_changes_nothing(terminal, ann, tmp_path, content):
    before = terminal.run("policy", *ann)[1]
    document = tmp_path / "policy.json"
    document.write_text(content)
    status, out, err = terminal.run("policy", "set", str(document), *ann)
    assert (status, out, bool(err.strip())) == (2, "", True)
    assert terminal.run("policy", *ann)[1] == before


def test_one_person_requests_and_another_decides(terminal, api, ann, bob):
    api.ask("PUT", "/api/v1/policy", json={"two_people": True})
    status, out, err = terminal.run("stop", "gpt", "--reason", "wrong data", "--json", *ann)
    command = json.loads(out)
    assert (status, command["state"]) == (0, "requested")
    assert f"rankwatch commands approve {short(command['id'])}" in err
    listed = terminal.run("commands", "--waiting", *bob)[1]
    for part in (short(command["id"]), "gpt", "stop", "128", "admin", "wrong data"):
        assert part in listed
    status, _, err = terminal.run("commands", "approve", short(command["id"]), *ann)
    assert (status, "somebody other than its requester" in err) == (2, True)
    assert terminal.run("commands", "approve", short(command["id"]), *bob)[0] == 0
    status, _, err = terminal.run("commands", "approve", short(command["id"]), *bob)
    assert (status, "does not wait for approval any more" in err) == (2, True)
    assert "command+read" in terminal.run("commands", "--job", "gpt", *bob)[1]
    assert "no command waits" in terminal.run("commands", "--waiting", *bob)[2]


def test_a_refusal_names_its_reason(terminal, api, ann, bob):
    api.ask("PUT", "/api/v1/policy", json={"two_people": True})
    command = json.loads(terminal.run("relaunch", "gpt", "--from-scratch", "--json", *ann)[1])
    assert command["params"] == {"from_scratch": True}
    assert terminal.run("commands", "refuse", short(command["id"]), *bob)[0] == 2
    assert terminal.run("commands", "refuse", short(command["id"]), "--reason", "nearly done", *bob)[0] == 0
    assert "by command+read: nearly done" in terminal.run("commands", *bob)[1]
