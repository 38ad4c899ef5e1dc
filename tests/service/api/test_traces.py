"""Traces by REST: which ranks are asked, what is refused, and what the command shows afterwards."""

import pytest
from sqlalchemy import delete, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.orders import traces
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Audit, Command, Incident, Job, RankTrace
from tests.support.store.database import add, attempt_row, job_row, report
from tests.support.values.incidents import incident_row
from tests.support.values.presences import SUMMARY, trace_answer


@pytest.fixture
def job(api):
    """A job of four ranks that can be traced."""
    report(api.engine, "j", api.clock.unix_ns())
    add(api.engine, Job, job_row("j"))
    ranks = [{"rank": rank, "host": "h", "tp": 0, "pp": 0, "cp": 0, "ep": 0} for rank in range(4)]
    add(api.engine, Attempt, attempt_row("j", ranks=ranks, can=["pause", "trace"]))
    return "j"


def asked(api, **params):
    return api.post("/api/v1/jobs/j/commands", {"action": "trace", "params": params})


def test_a_trace_without_ranks_asks_the_first_one_for_three_steps(api, job):
    assert asked(api).json()["params"] == {"ranks": [0], "steps": 3}


@pytest.mark.parametrize("kind", ["straggler", "slowdown"])
def test_a_trace_without_ranks_asks_who_is_slow_and_a_healthy_one(api, job, kind):
    row = incident_row(id="inc_1", job="j", kind=kind, ranks=[0, 2], state="open")
    add(api.engine, Incident, row)
    command = asked(api, steps=5).json()
    assert (command["params"], command["incident_id"]) == ({"ranks": [0, 1], "steps": 5}, "inc_1")


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"steps": 0}, "params.steps must be 1 to 10"),
        ({"steps": 11}, "params.steps must be 1 to 10"),
        ({"steps": True}, "params.steps must be 1 to 10"),
        ({"ranks": []}, "params.ranks must be a list of 1 to 8 ranks"),
        ({"ranks": list(range(9))}, "params.ranks must be a list of 1 to 8 ranks"),
        ({"ranks": ["0"]}, "params.ranks must be a list of 1 to 8 ranks"),
        ({"ranks": 0}, "params.ranks must be a list of 1 to 8 ranks"),
        ({"ranks": [0, 4]}, "rank 4 is not one of the job's ranks"),
        ({"mode": "full"}, "trace has no parameter mode"),
    ],
)
def test_what_cannot_be_asked_is_refused(api, job, params, said):
    answer = asked(api, **params)
    assert (answer.status_code, answer.json()["detail"]) == (422, said)


def test_a_job_has_one_trace_at_a_time(api, job):
    first = asked(api).json()["id"]
    refused = asked(api)
    assert refused.status_code == 409
    assert "job j is being traced already: " in refused.json()["detail"]
    assert api.post(f"/api/v1/commands/{first}/cancel", {}).status_code == 200
    assert asked(api).status_code == 201


def test_a_trace_needs_the_scope_of_commands_and_is_in_the_audit_trail(api, job):
    body = {"action": "trace"}
    assert api.post("/api/v1/jobs/j/commands", body, token=api.token(Scope.READ)).status_code == 403
    command = asked(api).json()
    with write(api.engine) as connection:
        lines = connection.execute(select(Audit.action, Audit.fields)).all()
    assert [fields["id"] for action, fields in lines if action == "command.trace"] == [command["id"]]


def test_no_rule_of_the_policy_traces(api):
    rule = {"mode": "act", "action": "trace", "kind": "straggler"}
    assert api.ask("PUT", "/api/v1/policy", json={"rules": [rule]}).status_code == 422


def test_what_the_ranks_recorded_is_shown_with_the_command(api, job):
    command = asked(api, ranks=[0, 3]).json()["id"]
    with write(api.engine) as connection:
        traces.store(connection, [trace_answer(command, 3), trace_answer(command, 0, "no")])
    shown = api.get(f"/api/v1/commands/{command}").json()["traces"]
    assert [(one["rank"], one["error"], one["summary"]) for one in shown] == [(0, "no", {}), (3, "", SUMMARY)]


def test_what_was_recorded_goes_with_its_command(api, job):
    command = asked(api).json()["id"]
    with write(api.engine) as connection:
        traces.store(connection, [trace_answer(command, 0)])
        connection.execute(delete(Command))
        assert connection.execute(select(RankTrace.rank)).all() == []
