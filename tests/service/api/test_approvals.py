"""What costs much needs a second person, and so does what weakens that; what waits for an approval is asked for."""

import json

import pytest
from sqlalchemy import select, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.orders import commands
from rankwatch_service.orders.driver import Driver
from rankwatch_service.policy.actions import APPROVAL_S, CommandRequest
from rankwatch_service.policy.control_records import PolicySet
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Command, Feed, Outbox
from tests.support.service.api import OURS
from tests.support.service.webhook_receiver import route_all
from tests.support.store.database import add, attempt_row, change, report, rows_of, values_of

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
    route_all(api.engine)
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


def make(api, token, name, *scopes, **more):
    """Make a token, as the holder of another one."""
    reply = api.post("/api/v1/tokens", {"name": name, "scopes": scopes or ["command", "admin"]} | more, token=token)
    assert reply.status_code == 201, reply.text
    return reply.json()


def made_by(api, token, name):
    """A token with scopes command and admin that the holder of another one has made, and somebody has approved."""
    made = make(api, token, name)
    assert decide(api, "approve", {"id": made["approval"]}, token=None).status_code == 200
    return made["token"]


def test_who_makes_a_token_under_another_name_is_no_second_person(careful):
    alice, carol = (named(careful, name) for name in ("alice", "carol"))
    bob = made_by(careful, alice, "bob")
    dora = made_by(careful, bob, "dora")
    reported = "a request of the person who made your token, or of a token that you made"
    for requester, others in ((alice, (bob, dora)), (bob, (alice, dora)), (dora, (alice, bob))):
        made = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=requester).json()
        for other in others:
            for what, more in (("approve", {}), ("refuse", {"reason": "no"})):
                answer = decide(careful, what, made, token=other, **more)
                assert (answer.status_code, reported in answer.json()["detail"]) == (409, True)
        careful.log_in(others[0])
        by_cookie = careful.client.post(f"/api/v1/commands/{made['id']}/approve", json={}, headers=OURS)
        careful.client.cookies.clear()
        assert by_cookie.status_code == 409
        assert decide(careful, "approve", made, token=carol).json()["state"] == "approved"
        change(careful.engine, update(Command).values(state="applied"))


def set_approvals(api, token=None, **wanted):
    return api.ask("PUT", "/api/v1/policy/approvals", json=wanted, token=token)


def two_people(api):
    policy = api.get("/api/v1/policy").json()
    return policy["two_people"], policy["limits"]["approval_ranks"]


@pytest.mark.parametrize(
    "weaker",
    [
        {},
        {"two_people": False},
        {"two_people": True, "limits": {"approval_ranks": 65}},
        {"limits": {"approval_ranks": 0}},
    ],
)
def test_a_policy_that_asks_for_fewer_approvals_is_refused_whole(careful, weaker):
    answer = careful.ask("PUT", "/api/v1/policy", json=weaker | {"hands_off": True})
    assert (answer.status_code, "PUT policy/approvals" in answer.json()["detail"]) == (409, True)
    assert careful.get("/api/v1/policy").json()["hands_off"] is False
    assert careful.ask("PUT", "/api/v1/policy", json={"two_people": True, "hands_off": True}).status_code == 200


@pytest.mark.parametrize(
    ("wanted", "after"),
    [
        ({"two_people": False}, (False, 64)),
        ({"two_people": True, "approval_ranks": 1_000_000}, (True, 1_000_000)),
        ({"two_people": False, "approval_ranks": 8}, (False, 8)),
    ],
)
def test_fewer_approvals_need_an_approval_of_which_all_receivers_hear(careful, wanted, after):
    alice, bob = named(careful, "alice"), someone_else(careful)
    receivers(careful)
    asked = set_approvals(careful, alice, **wanted, reason="too slow")
    assert (asked.status_code, asked.json()["job"], asked.json()["state"]) == (202, "*", "requested")
    again = set_approvals(careful, named(careful, "carol"), **wanted)
    assert (again.status_code, "already waits for approval" in again.json()["detail"]) == (409, True)
    assert decide(careful, "approve", asked.json(), token=alice).status_code == 409
    assert two_people(careful) == (True, 64)

    sent = messages(careful)
    assert [receiver for receiver, _ in sent] == ["all", "hangs", "others"]
    data = sent[0][1]["data"]
    assert data["text"].startswith("APPROVAL NEEDED for all jobs: set_approvals with two_people")
    assert (data["job"], data["reason"], data["params"]["two_people"]) == ("", "too slow", wanted["two_people"])

    assert decide(careful, "approve", asked.json(), token=bob).json()["state"] == "applied"
    assert two_people(careful) == after
    assert [line["actor"][:5] for line in trail(careful, "policy.approvals")] == ["alice"]
    assert careful.reported(PolicySet)[-1].two_people is after[0]


@pytest.mark.parametrize("wanted", [{"two_people": True}, {"two_people": True, "approval_ranks": 8}])
def test_as_many_approvals_or_more_need_none(careful, wanted):
    answer = set_approvals(careful, **wanted)
    assert (answer.status_code, answer.json()["two_people"]) == (200, True)
    assert two_people(careful) == (True, wanted.get("approval_ranks", 64))
    assert messages(careful) == []


def test_who_may_decide_about_some_jobs_alone_decides_nothing_about_approvals(careful):
    asked = set_approvals(careful, two_people=False).json()
    assert decide(careful, "approve", asked, token=careful.token(Scope.COMMAND, job="gpt")).status_code == 404
    assert decide(careful, "approve", asked, token=careful.token(Scope.OPERATE)).status_code == 403
    refused = decide(careful, "refuse", asked, token=someone_else(careful), reason="no")
    assert (refused.json()["state"], two_people(careful)) == ("refused", (True, 64))


def test_a_change_of_approvals_that_nobody_approves_expires(careful):
    asked = set_approvals(careful, two_people=False).json()
    change(careful.engine, update(Command).values(expires_unix_ns=careful.clock.unix_ns() - 1))
    Driver(careful.engine, careful.controls, careful.clock).run_once()
    assert careful.get(f"/api/v1/commands/{asked['id']}").json()["state"] == "expired"
    assert two_people(careful) == (True, 64)


@pytest.mark.parametrize("scopes", [["command"], ["admin"], ["read", "command"]])
def test_a_token_that_can_approve_is_of_no_use_before_it_is_approved(careful, scopes):
    alice, bob = named(careful, "alice"), someone_else(careful)
    made = make(careful, alice, "eve", *scopes, job="gpt")
    assert (made["state"], made["scopes"]) == ("waiting", sorted(scopes))
    for answer in (careful.get("/api/v1/session", token=made["token"]), careful.log_in(made["token"])):
        assert answer.status_code == 401
        assert "waits for the approval of a second person" in answer.json()["detail"]
    assert decide(careful, "approve", {"id": made["approval"]}, token=alice).status_code == 409
    assert decide(careful, "approve", {"id": made["approval"]}, token=bob).json()["state"] == "applied"
    assert careful.log_in(made["token"]).status_code == 201
    careful.client.cookies.clear()


@pytest.mark.parametrize("scopes", [["read"], ["operate", "read"], ["ingest"], ["alert"]])
def test_a_token_that_approves_nothing_needs_no_approval(careful, scopes):
    made = make(careful, None, "grafana", *scopes)
    assert (made["state"], made["approval"], messages(careful)) == ("valid", "", [])


def test_a_token_that_was_refused_or_revoked_stays_of_no_use(careful):
    refused, revoked = make(careful, None, "eve"), make(careful, None, "mallory")
    bob = someone_else(careful)
    assert decide(careful, "refuse", {"id": refused["approval"]}, token=bob, reason="no").status_code == 200
    assert careful.ask("DELETE", f"/api/v1/tokens/{revoked['id']}").status_code == 204
    decided = decide(careful, "approve", {"id": revoked["approval"]}, token=bob).json()
    assert (decided["state"], decided["result"]) == ("failed", "the token was revoked")
    for one in (refused, revoked):
        assert careful.get("/api/v1/jobs", token=one["token"]).status_code == 401


def test_two_tokens_that_one_has_made_are_two_people_once_somebody_has_approved_both(careful):
    alice = named(careful, "alice")
    x, y = made_by(careful, alice, "x"), made_by(careful, alice, "y")
    asked = careful.post("/api/v1/jobs/gpt/commands", {"action": "stop"}, token=x).json()
    assert decide(careful, "approve", asked, token=alice).status_code == 409
    assert decide(careful, "approve", asked, token=y).status_code == 200


@pytest.mark.parametrize("end", ["refused", "cancelled", "expired"])
def test_a_token_that_nobody_approves_is_revoked(careful, end):
    made = make(careful, None, "eve")
    if end == "refused":
        decide(careful, "refuse", {"id": made["approval"]}, token=someone_else(careful), reason="no")
    elif end == "cancelled":
        careful.post(f"/api/v1/commands/{made['approval']}/cancel")
    else:
        change(careful.engine, update(Command).values(expires_unix_ns=careful.clock.unix_ns() - 1))
        Driver(careful.engine, careful.controls, careful.clock).run_once()
    assert careful.get(f"/api/v1/commands/{made['approval']}").json()["state"] == end
    [eve] = [one for one in careful.get("/api/v1/tokens").json()["items"] if one["name"] == "eve"]
    assert eve["state"] == "revoked"
    assert "revoked" in careful.log_in(made["token"]).json()["detail"]


def test_who_approves_a_token_sees_what_it_may_do(careful):
    receivers(careful)
    made = make(careful, None, "eve", "command", job="gpt", expires_s=None)
    params = careful.get(f"/api/v1/commands/{made['approval']}").json()["params"]
    may = {"name": "eve", "scopes": ["command"], "job": "gpt", "project": "", "expires_s": None, "token": made["id"]}
    assert params == may
    assert '"eve"' in messages(careful)[0][1]["data"]["text"]


def test_an_approval_changes_only_what_was_asked_for(careful):
    asked = set_approvals(careful, named(careful, "alice"), two_people=False).json()
    assert set_approvals(careful, two_people=True, approval_ranks=8).status_code == 200
    assert decide(careful, "approve", asked, token=someone_else(careful)).json()["state"] == "applied"
    assert two_people(careful) == (False, 8)


@pytest.mark.parametrize("job", ["gpt", "g*"])
def test_commands_to_all_jobs_are_seen_and_cancelled_by_who_may_see_all_jobs_alone(careful, job):
    asked = set_approvals(careful, two_people=False).json()
    limited = careful.token(Scope.COMMAND, Scope.READ, job=job)
    assert careful.get("/api/v1/commands", token=limited).json()["items"] == []
    assert careful.get(f"/api/v1/commands/{asked['id']}", token=limited).status_code == 404
    assert careful.post(f"/api/v1/commands/{asked['id']}/cancel", token=limited).status_code == 404
    listed = careful.get("/api/v1/commands?action=set_approvals").json()["items"]
    assert [one["id"] for one in listed] == [asked["id"]]


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
    reported = values_of(careful.engine, select(Feed.data).where(Feed.topic == "command").order_by(Feed.id))
    assert [(one["id"], one["state"]) for one in reported] == [(made["id"], "requested"), (made["id"], "refused")]
