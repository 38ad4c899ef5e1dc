"""What costs much needs a second person, or a reason that all hear of; what waits for an approval is asked for."""

import json

import pytest
from sqlalchemy import select, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.orders import commands
from rankwatch_service.policy.command import APPROVAL_S, CommandRequest
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Command, Feed, Outbox
from tests.support.service.api import OURS
from tests.support.store.rows import add, attempt_row, change, report, rows_of, values_of

ON_BOTH_DATABASES = True

RANKS = 65
"""One more than a job may have by default without the approval of a second person."""


def steer(api, *, name="gpt", world_size=RANKS):
    """A job of so many ranks, whose agents report and whose ranks can be told everything."""
    report(api.engine, name, api.clock.unix_ns())
    can = ["pause", "resume", "checkpoint", "rollback", "rollback_memory", "rollback_disk", "relaunch", "stop"]
    add(api.engine, Attempt, attempt_row(name, can=can, world_size=world_size))
    return name


@pytest.fixture
def careful(api):
    """An api whose policy wants two people, with a job of many ranks."""
    assert api.ask("PUT", "/api/v1/policy", json={"two_people": True}).json()["two_people"] is True
    steer(api)
    return api


def ask(api, action="stop", *, job="gpt", **more):
    reply = api.post(f"/api/v1/jobs/{job}/commands", {"action": action, **more})
    assert reply.status_code == 201, reply.text
    return reply.json()


def decide(api, what, command, *, token, **body):
    return api.post(f"/api/v1/commands/{command['id']}/{what}", body, token=token)


def someone_else(api):
    return api.token(Scope.COMMAND)


def messages(api):
    rows = rows_of(api.engine, select(Outbox.receiver, Outbox.body).order_by(Outbox.receiver))
    return [(receiver, json.loads(body)) for receiver, body in rows]


def trail(api, action):
    return [line for line in api.get("/api/v1/audit?limit=100").json()["items"] if line["action"] == action]


def test_unless_the_policy_says_so_one_person_is_enough(api):
    steer(api)
    made = ask(api)
    assert (made["approval_required"], made["world_size"]) == (False, RANKS)
    assert api.get("/api/v1/commands?waiting=true").json()["items"] == []


@pytest.mark.parametrize(
    ("action", "world_size", "waits"),
    [
        ("stop", RANKS, True),
        ("relaunch", RANKS, True),
        ("stop", RANKS - 1, False),
        ("pause", RANKS, False),
        ("checkpoint", RANKS, False),
        ("stop", 0, True),
    ],
)
def test_what_costs_much_waits_for_a_second_person(careful, action, world_size, waits):
    job = steer(careful, name="other", world_size=world_size)
    made = ask(careful, action, job=job, params={"from_scratch": True} if action == "relaunch" else {})
    assert (made["approval_required"], made["state"]) == (waits, "requested")
    assert [one["id"] for one in careful.get("/api/v1/commands?waiting=true").json()["items"]] == [made["id"]] * waits
    wait_s = (made["expires_unix_ns"] - made["requested_unix_ns"]) / 1e9
    assert (wait_s == APPROVAL_S) is waits


def test_somebody_else_approves_and_the_trail_names_both(careful):
    made = ask(careful)
    approved = decide(careful, "approve", made, token=someone_else(careful))
    assert (approved.status_code, approved.json()["state"]) == (200, "approved")
    assert approved.json()["requested_by"].startswith("admin (")
    assert approved.json()["approved_by"].startswith("command (")
    assert careful.get("/api/v1/commands?waiting=true").json()["items"] == []
    [line] = trail(careful, "command.stop.approved")
    assert line["actor"] == approved.json()["approved_by"]
    assert line["fields"]["requested_by"] == made["requested_by"]


def test_who_requested_it_approves_nothing_by_another_token_or_session(careful):
    mine = careful.token(Scope.COMMAND)
    made = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=mine).json()
    again = careful.token(Scope.COMMAND)
    careful.log_in(mine)
    path = f"/api/v1/commands/{made['id']}/approve"
    by_cookie = careful.client.post(path, json={}, headers=OURS)
    careful.client.cookies.clear()
    for answer in (
        by_cookie,
        decide(careful, "approve", made, token=again),
        decide(careful, "approve", made, token=mine),
    ):
        assert answer.status_code == 409
        assert "somebody other than its requester" in answer.json()["detail"]
    assert decide(careful, "refuse", made, token=again, reason="no").status_code == 409
    assert careful.get(f"/api/v1/commands/{made['id']}").json()["state"] == "requested"


def named(api, name):
    """A token of a person, which nobody else has made."""
    with write(api.engine) as connection:
        scopes = [Scope.COMMAND, Scope.ADMIN]
        return create_token(connection, TokenKind.API, name, scopes, api.clock.unix_ns())[1]


def made_by(api, token, name):
    """A token with scopes command and admin that the holder of another one has made."""
    body = {"name": name, "scopes": ["command", "admin"]}
    return api.post("/api/v1/tokens", body, token=token).json()["token"]


def test_who_makes_a_token_under_another_name_is_no_second_person(careful):
    alice, carol = (named(careful, name) for name in ("alice", "carol"))
    bob = made_by(careful, alice, "bob")
    dora = made_by(careful, bob, "dora")
    told = "requested by who made their token, or by a token that they made"
    for requester, others in ((alice, (bob, dora)), (bob, (alice, dora)), (dora, (alice, bob))):
        made = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=requester).json()
        for other in others:
            for what, more in (("approve", {}), ("refuse", {"reason": "no"})):
                answer = decide(careful, what, made, token=other, **more)
                assert (answer.status_code, told in answer.json()["detail"]) == (409, True)
        careful.log_in(others[0])
        by_cookie = careful.client.post(f"/api/v1/commands/{made['id']}/approve", json={}, headers=OURS)
        careful.client.cookies.clear()
        assert by_cookie.status_code == 409
        assert decide(careful, "approve", made, token=carol).json()["state"] == "approved"
        change(careful.engine, update(Command).values(state="applied"))


def test_whoever_started_the_service_is_one_person_by_its_login_link_and_on_its_command_line(careful):
    with write(careful.engine) as connection:
        now = careful.clock.unix_ns()
        _, local = create_token(connection, TokenKind.LOCAL, "commands on this machine", [Scope.ADMIN], now)
        _, link = create_token(connection, TokenKind.LOGIN, "first login", [Scope.ADMIN], now)
    made = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=local).json()
    careful.log_in(link)
    answer = careful.client.post(f"/api/v1/commands/{made['id']}/approve", json={}, headers=OURS)
    careful.client.cookies.clear()
    assert (answer.status_code, made["requester"]) == (409, "commands on this machine")


def test_a_refusal_has_a_reason_and_ends_the_command(careful):
    made, other = ask(careful), someone_else(careful)
    assert decide(careful, "refuse", made, token=other).status_code == 422
    refused = decide(careful, "refuse", made, token=other, reason="it is nearly done")
    assert (refused.json()["state"], refused.json()["result"]) == ("refused", "by command: it is nearly done")
    for what, body in (("approve", {}), ("refuse", {"reason": "again"})):
        answer = decide(careful, what, made, token=other, **body)
        assert (answer.status_code, "it is refused by command" in answer.json()["detail"]) == (409, True)
    [line] = trail(careful, "command.stop.refused")
    assert (line["actor"][:7], line["fields"]["requested_by"]) == ("command", made["requested_by"])


def test_a_command_is_approved_once(careful):
    made = ask(careful)
    assert decide(careful, "approve", made, token=someone_else(careful)).status_code == 200
    answer = decide(careful, "approve", made, token=someone_else(careful))
    assert (answer.status_code, "does not wait for approval any more" in answer.json()["detail"]) == (409, True)


def test_an_approval_after_the_expiry_is_refused(careful):
    made = ask(careful)
    change(careful.engine, update(Command).values(expires_unix_ns=careful.clock.unix_ns() - 1))
    answer = decide(careful, "approve", made, token=someone_else(careful))
    assert (answer.status_code, "expired" in answer.json()["detail"]) == (409, True)
    assert careful.get("/api/v1/commands?waiting=true").json()["items"] == []


def test_what_needs_no_approval_cannot_be_approved(api):
    made = ask(api, "pause", job=steer(api))
    for what, body in (("approve", {}), ("refuse", {"reason": "no"})):
        answer = decide(api, what, made, token=someone_else(api), **body)
        assert (answer.status_code, answer.json()["detail"]) == (409, "the command needs no approval")


def test_only_scope_command_on_this_job_approves(careful):
    made = ask(careful)
    assert decide(careful, "approve", made, token=careful.token(Scope.OPERATE)).status_code == 403
    assert decide(careful, "approve", made, token=careful.token(Scope.COMMAND, job="other")).status_code == 404
    assert decide(careful, "approve", made, token=careful.token(Scope.COMMAND, job="gpt")).status_code == 200


def test_one_command_of_a_kind_waits_at_a_time(careful):
    first = ask(careful)
    answer = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=someone_else(careful))
    assert (answer.status_code, "already waits for approval" in answer.json()["detail"]) == (409, True)
    ask(careful, "relaunch", params={"from_scratch": True})
    assert careful.post(f"/api/v1/commands/{first['id']}/cancel").status_code == 200
    ask(careful)


def receivers(api):
    for name, more in (("all", {}), ("hangs", {"kinds": ["hang"], "jobs": ["gpt"]}), ("others", {"jobs": ["other"]})):
        body = {"name": name, "url": f"https://hooks.example/{name}"} | more
        assert api.post("/api/v1/receivers", body).status_code == 201


def test_the_receivers_of_the_job_are_asked_for_an_approval_once(careful):
    receivers(careful)
    body = {"action": "stop", "reason": "wrong data"}
    for _ in range(2):
        made = careful.post("/api/v1/jobs/gpt/commands", body, key="k").json()
    sent = messages(careful)
    assert [receiver for receiver, _ in sent] == ["all", "hangs"]
    message = sent[0][1]
    assert message["type"] == "command.approval_needed"
    data = message["data"]
    assert (data["id"], data["job"], data["action"], data["world_size"]) == (made["id"], "gpt", "stop", RANKS)
    assert (data["reason"], data["requested_by"]) == ("wrong data", made["requested_by"])
    assert data["links"]["job"].endswith("/jobs/gpt")
    assert data["expires_time"] > message["timestamp"]


def test_what_the_policy_wants_to_do_is_approved_by_anybody_who_may_command(api):
    now = api.clock.unix_ns()
    steer(api)
    request = CommandRequest(
        id="cmd_p", job="gpt", attempt="l.0", action="stop", params={}, reason="Rank 3 hangs", requested_by="policy",
        requested_unix_ns=now, world_size=RANKS, approval_required=True,
    )  # fmt: skip
    with write(api.engine) as connection:
        commands.add(connection, request)
    assert decide(api, "approve", {"id": "cmd_p"}, token=None).status_code == 200


def test_pages_are_told_of_the_request_and_of_the_decision(careful):
    made = ask(careful)
    decide(careful, "refuse", made, token=someone_else(careful), reason="no")
    told = values_of(careful.engine, select(Feed.data).where(Feed.topic == "command").order_by(Feed.id))
    assert [(one["id"], one["state"]) for one in told] == [(made["id"], "requested"), (made["id"], "refused")]
