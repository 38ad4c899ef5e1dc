"""Which jobs and commands a list shows, and in which order."""

import pytest
from sqlalchemy import insert

from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, Job, JobHostDevice, JobProject
from tests.service.api.test_reads import job_row


def command(number, **changes):
    """One that is over: the driver leaves it alone."""
    return {
        "id": f"cmd_{number}", "job": "j", "attempt": "l.0", "action": "rollback", "params": {}, "reason": "",
        "requested_by": "token:ann", "state": "applied", "result": "", "requested_unix_ns": number,
        "expires_unix_ns": 2**62,
    } | changes  # fmt: skip


@pytest.fixture
def names(api):
    """What a list of the api names, by path, list of the names and query."""

    def found(path, name, **query):
        answer = api.get(f"/api/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return [one[name] for one in answer.json()["items"]]

    return found


def test_commands_are_found_by_action_attempt_and_time_and_come_in_the_order_asked_for(api, names):
    now = api.clock.unix_ns()
    rows = [
        command(1, requested_unix_ns=now + 1, finished_unix_ns=now + 90),
        command(2, requested_unix_ns=now + 2, action="stop", attempt="l.1"),
        command(3, requested_unix_ns=now + 3, action="trace", applied_unix_ns=now + 50),
    ]
    with write(api.engine) as connection:
        for row in rows:
            connection.execute(insert(Command).values(**row))

    def found(**query):
        return names("commands", "id", **query)

    assert found() == ["cmd_3", "cmd_2", "cmd_1"]
    assert found(order="oldest") == ["cmd_1", "cmd_2", "cmd_3"]
    assert found(order="changed") == ["cmd_1", "cmd_3", "cmd_2"]
    assert found(action=["stop", "trace"]) == ["cmd_3", "cmd_2"]
    assert found(attempt="l.1") == ["cmd_2"]
    assert found(from_unix_ns=now + 2) == ["cmd_3", "cmd_2"]
    assert found(from_unix_ns=now + 2, to_unix_ns=now + 3) == ["cmd_2"]
    assert api.get("/api/v1/commands?action=nonsense").status_code == 422


def test_jobs_are_found_by_owner_host_and_time_and_come_in_the_order_asked_for(api, names):
    rows = [
        job_row(name="a", world_size=8, first_seen_unix_ns=1, last_seen_unix_ns=10),
        job_row(name="b", world_size=64, first_seen_unix_ns=20, last_seen_unix_ns=30),
        job_row(name="c", world_size=4, first_seen_unix_ns=5, last_seen_unix_ns=40),
    ]
    device = {"job": "c", "kind": "host", "number": 0, "host": "node-1", "index": 0, "uuid": ""}
    with write(api.engine) as connection:
        connection.execute(insert(Job), rows)
        connection.execute(insert(JobProject).values(job="b", project="nlp", owner="ann"))
        connection.execute(insert(JobHostDevice).values(**device))

    def found(**query):
        return names("jobs", "name", **query)

    assert found() == ["c", "b", "a"]
    assert found(order="newest") == ["b", "c", "a"]
    assert found(order="size") == ["b", "a", "c"]
    assert found(owner="ann") == ["b"]
    assert found(host="node-1") == ["c"]
    assert found(from_unix_ns=30) == ["c", "b"]
    assert found(from_unix_ns=10, to_unix_ns=20) == ["c", "a"]
