"""Commands that need more than a request: two people's decision, and traces, whose answers are shown."""

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from rankwatch_service.access.grants import Scope
from rankwatch_service.names import short
from rankwatch_service.orders import traces
from rankwatch_service.policy.policy import Policy
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Job
from rankwatch_service.store.settings_rows import write_policy
from tests.support.store.database import add, attempt_row, job_row, report
from tests.support.values.presences import trace_answer


@pytest.fixture(scope="module", autouse=True)
def filled(api):
    add(api.engine, Attempt, attempt_row("gpt", can=["pause", "stop", "relaunch"], world_size=128))
    add(api.engine, Job, job_row("gpt", attempt="launch.0", world_size=128))
    report(api.engine, "gpt")


@pytest.fixture
def ann(to):
    return to


@pytest.fixture
def bob(api):
    return ("--url", api.url, "--token", api.token(Scope.COMMAND, Scope.READ))


def test_the_policy_is_printed_changed_and_replaced(terminal, api, ann, tmp_path):
    with write(api.engine) as connection:
        write_policy(connection, Policy(), 1)
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


def test_two_people_are_switched_off_by_two_people(terminal, api, ann, bob):
    api.ask("PUT", "/api/v1/policy", json={"two_people": True})
    status, _, told = terminal.run("policy", "approvals", "--one-person", "--reason", "too slow", *ann)
    assert (status, "for the approval of another person: rankwatch commands approve" in told) == (0, True)
    asked = json.loads(terminal.run("commands", "--waiting", "--json", *bob)[1])
    assert (asked["job"], asked["action"], asked["reason"]) == ("*", "set_approvals", "too slow")
    assert "applied" in terminal.run("commands", "approve", short(asked["id"]), *bob)[2]
    assert json.loads(terminal.run("policy", *ann)[1])["two_people"] is False
    assert terminal.run("policy", "approvals", "--two-people", "--approval-ranks", "64", *ann)[0] == 0


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


@pytest.fixture(scope="module", autouse=True)
def traced(api):
    report(api.engine, "j")
    add(api.engine, Job, job_row("j", world_size=1))
    ranks = [{"rank": 0, "host": "h", "tp": 0, "pp": 0, "cp": 0, "ep": 0}]
    add(api.engine, Attempt, attempt_row("j", ranks=ranks, can=["trace"], world_size=1))


@pytest.fixture
def answering(api) -> Iterator[Any]:
    """A rank that answers the next trace; with an error, if it is given one."""
    over = threading.Event()
    threads = []

    def answering(error: str = "") -> None:
        def answer() -> None:
            while not over.wait(0.05):
                for command in api.get("/api/v1/commands", params={"job": "j", "state": "sent"}).json()["items"]:
                    with write(api.engine) as connection:
                        traces.store(connection, [trace_answer(command["id"], 0, error)])

        threads.append(threading.Thread(target=answer))
        threads[0].start()

    yield answering
    over.set()
    for thread in threads:
        thread.join()


def test_a_trace_is_shown_as_tables_and_can_be_shown_again(rankwatch, api, answering):
    answering()
    status, out, err = rankwatch("trace", "j", "--steps", "2")
    assert (status, "trace j: applied" in err) == (0, True)
    for text in ("41 to 43", "500.000 ms", "12.5%", "matmul", "60.0%", "mesh_dp", "12.58 MB", "sm80_gemm"):
        assert text in out
    newest = api.get("/api/v1/commands").json()["items"][0]
    assert newest["params"] == {"ranks": [0], "steps": 2}
    status, again, _ = rankwatch("commands", "trace", newest["short_id"])
    assert (status, again) == (0, out)
    status, out, _ = rankwatch("commands", "trace", newest["short_id"], "--json")
    assert (status, json.loads(out)["summary"]["spans"]) == (0, 1_000)


def test_a_trace_that_nobody_recorded_says_why_and_fails(rankwatch, answering):
    answering("a profiler of the script's own runs")
    status, out, err = rankwatch("trace", "j", "--ranks", "0")
    assert (status, out) == (1, "")
    assert "trace j: failed: rank 0: a profiler of the script's own runs" in err


def test_ranks_that_are_no_numbers_are_a_wrong_use(rankwatch):
    status, _, err = rankwatch("trace", "j", "--ranks", "0,x")
    assert (status, "--ranks is a list of numbers like 0,3, not '0,x'" in err) == (2, True)
