"""Enrolment, signed messages and signed orders over HTTP."""

import msgspec
import pytest
from sqlalchemy import select

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity, ForgedOrdersError, OrderCheck
from rankwatch.signed import Purpose, nonce_of, proof_of, sign
from rankwatch.trust import trust_of
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token, issue_token
from rankwatch_service.api.ingest import EVERY_S
from rankwatch_service.policy.control_records import TelemetryRefused
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import AgentView, Command, LogRecord
from tests.support.clock import FakeClock
from tests.support.store.database import add, command_row, rows_of
from tests.support.values.batches import batch, progress

CLOCK = FakeClock
NONCE = "0123456789abcdef" * 2
BODY = wire.encode(batch())
VIEW = wire.encode(wire.View("gpt", "l.0", "node-1", "b", 1, (progress(0, 5),)))


@pytest.fixture
def clock(api):
    return api.clock


def enrol(api, job="gpt", host="node-1", token=None, **fields):
    return api.ask("POST", "/api/v1/agents/enrol", json={"job": job, "host": host} | fields, token=token)


@pytest.fixture
def agent(api) -> AgentIdentity:
    reported = enrol(api).json()
    return AgentIdentity(reported["agent"], bytes.fromhex(reported["secret"]))


def forgeries(api):
    return [record.fields for record in api.reported(TelemetryRefused)]


def job_token(api, job="gpt", hosts_max=None):
    with write(api.engine) as connection:
        now = api.clock.unix_ns()
        return create_token(connection, TokenKind.JOB, "agents", [Scope.INGEST], now, job=job, hosts_max=hosts_max)[1]


def test_a_signed_batch_is_stored_as_it_was_signed(api, agent):
    body = agent.sign(Purpose.BATCH, BODY)
    assert api.send(body).status_code == 202
    with read(api.engine) as connection:
        assert connection.scalar(select(LogRecord.value)) == body


def test_who_holds_the_token_alone_can_send_nothing_for_a_job_that_has_agents(api, agent):
    thief = AgentIdentity("f" * 16, bytes(32))
    forged = {
        "unsigned": BODY,
        "another id": thief.sign(Purpose.BATCH, BODY),
        "another secret": sign(Purpose.BATCH, agent.agent, bytes(32), BODY),
        "another purpose": agent.sign(Purpose.VIEW, BODY),
        "another host": agent.sign(Purpose.BATCH, wire.encode(batch(host="node-2"))),
        "another job": agent.sign(Purpose.BATCH, wire.encode(batch(job="other"))),
    }
    statuses = {what: api.send(body).status_code for what, body in forged.items()}
    assert statuses == {
        "unsigned": 403,
        "another id": 409,
        "another secret": 403,
        "another purpose": 403,
        "another host": 409,
        "another job": 409,
    }
    assert api.send(VIEW, "agents/view").status_code == 403
    assert api.send(sign(Purpose.VIEW, agent.agent, bytes(32), VIEW), "agents/view").status_code == 403
    assert rows_of(api.engine, select(LogRecord.value)) == rows_of(api.engine, select(AgentView.host)) == []


def test_forgeries_are_counted_and_told_to_the_stream_but_no_flood_of_them(api, agent, clock):
    for _ in range(50):
        api.send(BODY)
    assert forgeries(api) == [{"what": "unsigned", "host": "node-1", "agent": "", "source": "testclient", "count": 1}]
    clock.advance(EVERY_S)
    api.send(BODY)
    assert [one["count"] for one in forgeries(api)] == [1, 50]
    assert 'rankwatch_forged_messages_total{what="unsigned"} 51.0' in api.ask("GET", "/metrics").text


def test_views_say_which_agent_they_are_from(api, agent):
    assert api.send(agent.sign(Purpose.VIEW, VIEW), "agents/view").status_code == 200
    assert rows_of(api.engine, select(AgentView.host, AgentView.agent)) == [(f"node-1/{agent.agent}", agent.agent)]


def test_the_answer_to_a_view_is_signed_for_this_view(api, agent):
    add(api.engine, Command, command_row("c1", job="gpt", action="stacks", params={"ranks": [0]}, state="sent"))
    request = agent.sign(Purpose.VIEW, VIEW)
    answer = api.send(request, "agents/view").content
    assert OrderCheck().answer(agent, answer, request).stacks == (wire.StackRequest("c1", "l.0", (0,)),)
    with pytest.raises(ForgedOrdersError):
        OrderCheck().answer(agent, answer, agent.sign(Purpose.VIEW, VIEW[:-1] + b"\x06"))
    with pytest.raises(ForgedOrdersError):
        OrderCheck().answer(AgentIdentity(agent.agent, bytes(32)), answer, request)
    reported = msgspec.json.decode(answer)
    assert (reported["nonce"], reported["sequence"]) == (nonce_of(request), 0)


@pytest.mark.parametrize("scopes", [None, (Scope.INGEST, Scope.READ), (Scope.ADMIN,)])
def test_the_answer_to_an_enrolment_proves_that_the_service_has_issued_the_token(api, scopes):
    text = job_token(api) if scopes is None else api.token(*scopes)
    key = trust_of(text, {}).enrolment_key
    reported = enrol(api, token=text.partition(".")[0], nonce=NONCE).json()
    assert len(key) == 16
    assert reported["proof"] == proof_of(key, NONCE, reported["agent"], reported["secret"])
    assert key.hex() not in api.ask("GET", "/api/v1/tokens").text


def test_a_job_token_admits_the_agents_of_its_job_and_of_no_other(api):
    token = job_token(api)
    assert enrol(api, token=token).status_code == 201
    assert enrol(api, job="other", token=token).status_code == 403
    assert enrol(api, token=api.token(Scope.READ)).status_code == 403


def test_a_job_token_admits_as_many_agents_as_it_says(api):
    token = job_token(api, hosts_max=2)
    assert [enrol(api, host=f"node-{n}", token=token).status_code for n in range(3)] == [201, 201, 429]
    full = enrol(api, host="node-9", token=token)
    assert "admits 2 hosts" in full.json()["detail"]
    assert int(full.headers["Retry-After"]) > 0


@pytest.mark.parametrize(
    "body", [{"job": "", "host": "h"}, {"job": "a/b", "host": "h"}, {"job": "j", "host": ".."}, {}]
)
def test_an_agent_of_no_job_or_host_is_not_enrolled(api, body):
    assert api.ask("POST", "/api/v1/agents/enrol", json=body).status_code == 422


def test_a_token_for_this_machine_is_refused_from_others(api):
    with write(api.engine) as connection:
        _, text = create_token(connection, TokenKind.INGEST, "up", [Scope.INGEST], api.clock.unix_ns(), loopback=True)
    refused = api.send(BODY, token=text)
    assert refused.status_code == 403
    assert "rankwatch token job" in refused.json()["detail"]


def test_unsigned_telemetry_is_taken_until_the_date_that_the_policy_sets(api, clock):
    until = clock.unix_ns() + 60 * 10**9
    api.ask("PUT", "/api/v1/policy", json={"unsigned_until_unix_ns": until})
    assert api.get("/api/v1/policy").json()["unsigned_until_unix_ns"] == until
    assert api.send(wire.encode(batch(job="old"))).status_code == 202
    clock.advance(61)
    refused = api.send(wire.encode(batch(1, job="old")))
    assert refused.status_code == 403
    assert "install this version of rankwatch" in refused.json()["detail"]


def test_an_agent_that_reports_renews_its_token_and_a_stranger_does_not(api, clock):
    with write(api.engine) as connection:
        now, hour_ns = clock.unix_ns(), 3_600 * 10**9
        token_id, token = issue_token(
            connection, "test", "agents", {Scope.INGEST}, now, makers=(), job="gpt", expires_unix_ns=now + 10 * hour_ns
        )

    def hours():
        [row] = [one for one in api.get("/api/v1/tokens").json()["items"] if one["id"] == token_id]
        return (row["expires_unix_ns"] - now) // hour_ns

    assert api.send(BODY, token=token).status_code == 202  # unsigned: nobody has enrolled yet
    reported = enrol(api, token=token).json()
    agent = AgentIdentity(reported["agent"], bytes.fromhex(reported["secret"]))
    clock.advance(6 * 3_600.0)
    assert api.send(BODY, token=token).status_code == 403
    thief = AgentIdentity(agent.agent, bytes(32))
    assert api.send(thief.sign(Purpose.VIEW, VIEW), "agents/view", token=token).status_code == 403
    assert hours() == 10
    assert api.send(agent.sign(Purpose.VIEW, VIEW), "agents/view", token=token).status_code == 200
    assert hours() == 20
    clock.advance(10 * 3_600.0)
    assert api.send(agent.sign(Purpose.BATCH, BODY), token=token).status_code == 202
    assert hours() == 30
