"""Writes by REST: once for each key, sent to stream through the control log, recorded in the audit trail."""

import pytest
from sqlalchemy import select

from rankwatch.wire import Progress
from rankwatch_service.access.grants import Scope
from rankwatch_service.policy.control_records import PolicySet
from rankwatch_service.policy.policy import Mode, policy_of
from rankwatch_service.store.models import Attempt, Base, Checkpoint, Job
from tests.support.store.database import add, attempt_row, checkpoint_row, job_row, report, rows_of

RECEIVER = {"name": "pager", "url": "https://hooks.example/x"}


@pytest.fixture
def job(api):
    """A job that an agent has reported; nothing answers its orders."""
    report(api.engine, "j", api.clock.unix_ns())
    return "j"


def test_a_repeated_write_gets_the_first_reply_and_is_done_once(api, job):
    path, body = f"/api/v1/jobs/{job}/commands", {"action": "pause", "reason": "look"}
    first = api.post(path, body, key="k1")
    again = api.post(path, body, key="k1")
    assert (first.status_code, again.status_code) == (201, 201)
    assert again.json()["id"] == first.json()["id"]
    assert again.headers["idempotent-replay"] == "true"
    assert len(api.get("/api/v1/commands").json()["items"]) == 1
    assert api.post(path, body | {"reason": "other"}, key="k1").status_code == 422
    assert api.post(path, body, key="k1", token=api.token(Scope.COMMAND)).json()["id"] != first.json()["id"]


def test_a_refused_write_keeps_no_reply_under_its_key(api, job):
    path = "/api/v1/jobs/none/commands"
    assert api.post(path, {"action": "pause"}, key="k").status_code == 404
    assert api.post(f"/api/v1/jobs/{job}/commands", {"action": "pause"}, key="k").status_code == 201


@pytest.mark.parametrize(
    "body",
    [
        {"action": "explode"},
        {"action": "pause", "params": {"checkpoint": "x"}},
        {"action": "rollback", "params": {"checkpoint": "../../etc/passwd"}},
        {"action": "rollback", "params": {"checkpoint": ["x"]}},
        {"action": "rollback", "params": {"mode": "half"}},
        {"action": "rollback", "params": {"mode": ["full"]}},
        {"action": "pause", "params": {"mode": "full"}},
        {"action": "relaunch", "params": {"culprits": ["0; rm"]}},
        {"action": "relaunch", "params": {"culprits": [True]}},
        {"action": "relaunch", "params": {"from_scratch": "yes"}},
        {"action": "pause", "surprise": 1},
        {"action": "pause", "expires_s": 1e9},
        {"action": "pause", "expires_s": "NaN"},
    ],
)
def test_an_invalid_command_is_refused_and_not_stored(api, job, body):
    assert api.post(f"/api/v1/jobs/{job}/commands", body).status_code == 422
    assert api.get("/api/v1/commands").json()["items"] == []


def test_a_rollback_needs_a_registered_checkpoint_that_still_exists(api, job):
    for step, verdict in ((1, "good"), (2, "gone")):
        add(api.engine, Checkpoint, checkpoint_row(job, step, verdict=verdict))
    path = f"/api/v1/jobs/{job}/commands"
    assert api.post(path, {"action": "rollback", "params": {"checkpoint": "local:l.0:2"}}).status_code == 422
    made = api.post(path, {"action": "rollback", "params": {"checkpoint": "local:l.0:1"}})
    assert (made.status_code, made.json()["params"]) == (201, {"checkpoint": "local:l.0:1"})


def test_a_waiting_command_can_be_cancelled_once(api, job):
    made = api.post(f"/api/v1/jobs/{job}/commands", {"action": "pause"}).json()
    path = f"/api/v1/commands/{made['id']}/cancel"
    assert api.post(path).json()["state"] == "cancelled"
    assert api.post(path).status_code == 409
    assert api.get(f"/api/v1/commands/{made['id']}").json()["state"] == "cancelled"


def test_a_receiver_is_added_once_listed_without_its_secret_and_removed(api):
    made = api.post("/api/v1/receivers", RECEIVER | {"kinds": ["hang"]})
    assert made.status_code == 201
    assert made.json()["secret"].startswith("whsec_")
    (listed,) = api.get("/api/v1/receivers").json()["items"]
    assert (listed["name"], listed["kinds"], "secret" in listed) == ("pager", ["hang"], False)
    assert api.controls.read(0, 10) == [], "stream need not know"
    assert api.post("/api/v1/receivers", RECEIVER).status_code == 409
    assert api.ask("DELETE", "/api/v1/receivers/pager").status_code == 204
    assert api.get("/api/v1/receivers").json()["items"] == []


def test_the_database_holds_neither_url_nor_secret_of_a_receiver_in_plain_text(api):
    made = api.post("/api/v1/receivers", RECEIVER, key="once")
    again = api.post("/api/v1/receivers", RECEIVER, key="once")
    assert again.json() == made.json()
    assert again.headers["Idempotent-Replay"] == "true"
    moved = RECEIVER["url"] + "/T00/secret"
    body = {name: value for name, value in RECEIVER.items() if name != "name"} | {"url": moved}
    assert api.ask("PUT", "/api/v1/receivers/pager", json=body).json()["url"] == moved
    rows = [rows_of(api.engine, select(table)) for table in Base.metadata.tables.values()]
    assert "pager" in str(rows)
    assert "hooks.example/" not in str(rows)
    assert made.json()["secret"] not in str(rows)


def test_info_level_incidents_go_only_to_receivers_that_ask_for_them(api):
    assert api.post("/api/v1/receivers", RECEIVER).json()["severities"] == ["critical", "warning"]
    everything = RECEIVER | {"name": "archive", "severities": []}
    assert api.post("/api/v1/receivers", everything).json()["severities"] == []


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x/",
        "file:///etc/passwd",
        "http://",
        "javascript:alert(1)",
        "http://user:pass@host/",
        "hook",
        "http://mail.example:25/",
        "http://169.254.169.254/latest",
        "http://[ff02::1]/",
    ],
)
def test_a_receivers_address_is_a_web_address_that_webhooks_may_go_to(api, url):
    assert api.post("/api/v1/receivers", RECEIVER | {"url": url}).status_code == 422


def test_a_silence_begins_is_listed_and_ends(api):
    ends = api.clock.unix_ns() + 3_600 * 10**9
    made = api.post("/api/v1/silences", {"job": "j", "kind": "straggler", "ends_unix_ns": ends, "comment": "known"})
    assert made.status_code == 201
    path = f"/api/v1/silences/{made.json()['id']}"
    assert [one["comment"] for one in api.get("/api/v1/silences?active=true").json()["items"]] == ["known"]
    assert api.ask("DELETE", path).status_code == 204
    assert api.get("/api/v1/silences?active=true").json()["items"] == []
    assert api.get(path).json()["ends_unix_ns"] < ends


@pytest.mark.parametrize("ends", [0, 2**62, -1])
def test_a_silence_ends_in_the_future_and_within_30_days(api, ends):
    assert api.post("/api/v1/silences", {"ends_unix_ns": ends, "comment": "known"}).status_code == 422


def test_a_silence_has_matchers_on_labels(api):
    body = {"ends_unix_ns": api.clock.unix_ns() + 10**12, "comment": "known"}
    made = api.post("/api/v1/silences", body | {"matchers": ['{host=node-a,severity!="critical"}', "job=~gpt-.*"]})
    shown = ['host="node-a"', 'severity!="critical"', 'job=~"gpt-.*"']
    assert (made.status_code, made.json()["matchers"]) == (201, shown)
    assert api.get("/api/v1/silences").json()["items"][0]["matchers"] == shown


@pytest.mark.parametrize("matchers", [["host"], ["hots=node-a"], ["job=~("], ["job=~(a)\\1"], ["job=j"] * 21])
def test_a_matcher_that_can_never_match_is_refused(api, matchers):
    body = {"ends_unix_ns": api.clock.unix_ns() + 10**12, "comment": "known", "matchers": matchers}
    refused = api.post("/api/v1/silences", body)
    assert (refused.status_code, "matchers" in refused.text) == (422, True)


@pytest.mark.parametrize("comment", [{}, {"comment": ""}, {"comment": " \n"}], ids=["none", "empty", "blank"])
def test_a_silence_says_why(api, comment):
    refused = api.post("/api/v1/silences", {"ends_unix_ns": api.clock.unix_ns() + 10**12, **comment})
    assert (refused.status_code, "comment" in refused.text) == (422, True)


def test_the_policy_is_replaced_as_a_whole_and_sent_to_stream(api):
    rules = [{"id": "bits", "kind": "corruption", "mode": "act", "action": "rollback"}]
    answer = api.ask("PUT", "/api/v1/policy", json={"rules": rules, "limits": {"cool_down_s": 5}})
    assert answer.status_code == 200
    stored = api.get("/api/v1/policy").json()
    assert [rule["id"] for rule in stored["rules"]] == ["bits"]
    [record] = api.reported(PolicySet)
    assert policy_of(record).rules[0].mode is Mode.ACT
    assert policy_of(record).limits.cool_down_s == 5
    on_call = api.token(Scope.OPERATE)
    assert api.ask("PUT", "/api/v1/policy/hands-off", json={"hands_off": True}, token=on_call).status_code == 200
    assert policy_of(api.reported(PolicySet)[-1]).hands_off
    assert api.get("/api/v1/policy").json() == stored | {"hands_off": True}


def test_whoever_may_not_command_jobs_can_stop_automatic_actions_and_not_allow_them_again(api):
    on_call, commander = api.token(Scope.OPERATE), api.token(Scope.OPERATE, Scope.COMMAND)
    path = "/api/v1/policy/hands-off"
    assert api.ask("PUT", path, json={"hands_off": True}, token=on_call).status_code == 200
    assert api.ask("PUT", path, json={"hands_off": False}, token=on_call).status_code == 403
    assert api.get("/api/v1/policy").json()["hands_off"] is True
    assert api.ask("PUT", path, json={"hands_off": 0}, token=commander).status_code == 422
    assert api.ask("PUT", path, json={"hands_off": False}, token=commander).status_code == 200


@pytest.mark.parametrize(
    "rule",
    [
        {"id": "a", "mode": "act", "action": "resume"},
        {"id": "a", "mode": "act"},
        {"id": "a", "mode": "notify", "action": "stop"},
        {"id": "a", "mode": "act", "action": "stop", "kind": "bad luck"},
        {"id": "a b", "mode": "notify"},
        {"id": "a", "mode": "act", "action": "stop", "confidence_min": 2},
    ],
)
def test_a_contradictory_rule_is_refused(api, rule):
    assert api.ask("PUT", "/api/v1/policy", json={"rules": [rule]}).status_code == 422


def test_every_write_is_in_the_audit_trail(api, job):
    api.post("/api/v1/receivers", RECEIVER)
    api.post(f"/api/v1/jobs/{job}/commands", {"action": "pause", "reason": "why not"})
    api.ask("PUT", "/api/v1/policy/hands-off", json={"hands_off": True})
    lines = api.get("/api/v1/audit").json()["items"]
    assert [line["action"] for line in lines if not line["action"].endswith("refused")][:3] == [
        "policy.hands_off",
        "command.pause",
        "receiver.add",
    ]
    assert all("admin" in line["actor"] for line in lines if line["actor"] != "driver")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_body_without_the_json_content_type_is_not_parsed_as_json(api, content_type):
    answer = api.ask(
        "PUT", "/api/v1/policy/hands-off", content=b'{"hands_off": true}', headers={"content-type": content_type}
    )
    assert answer.status_code == 422
    assert api.get("/api/v1/policy").json()["hands_off"] is False


def reported(api, job, *can, views_age_s=0.0):
    """A job whose ranks have introduced themselves, with the actions that they declare."""
    report(api.engine, job, api.clock.unix_ns() - int(views_age_s * 1e9))
    add(api.engine, Job, job_row(job, world_size=1))
    ranks = [{"rank": 0, "host": "h", "tp": 0, "pp": 0, "cp": 0, "ep": 0}]
    add(api.engine, Attempt, attempt_row(job, ranks=ranks, can=can, world_size=1))


def saved(api, job, tier, step, verdict="good"):
    add(api.engine, Checkpoint, checkpoint_row(job, step, tier, verdict=verdict))


def refused_at_once(api, job, action, **params):
    answer = api.post(f"/api/v1/jobs/{job}/commands", {"action": action, "params": params})
    assert answer.status_code == 409
    assert api.get("/api/v1/commands", params={"job": job}).json()["items"] == []
    return answer.json()["detail"]


def test_two_launches_under_one_name_are_reported_until_one_of_them_ends(api):
    reported(api, "shared", "pause")
    reported(api, "alone", "pause")

    def at_once(**launches):
        now = api.clock.unix_ns()
        for launch, state in launches.items():
            ranks = (Progress(0, 7, "", 0.0, 0.0, state=state),)
            report(api.engine, "shared", now, *ranks, attempt=f"{launch}.0")
        listed = {job["name"]: job["launches_at_once"] for job in api.get("/api/v1/jobs").json()["items"]}
        assert listed["alone"] == []
        assert api.get("/api/v1/jobs/shared").json()["launches_at_once"] == listed["shared"]
        return listed["shared"]

    assert at_once(l="running") == []
    assert at_once(l="running", m="held") == ["l", "m"]
    assert at_once(l="exited", m="running") == []
    assert at_once(l="left", m="running") == []


def test_an_agent_that_carries_no_rank_shows_no_second_launch_and_one_that_does_shows_it(api):
    add(api.engine, Job, job_row("signed", world_size=1))

    def accepted(launch, agent):
        ranks = [{"rank": 0, "host": "h", "tp": 0, "pp": 0, "cp": 0, "ep": 0, "agent": agent}]
        add(
            api.engine, Attempt, attempt_row("signed", attempt=f"{launch}.0", ranks=ranks, can=("pause",), world_size=1)
        )

    def at_once():
        return api.get("/api/v1/jobs/signed").json()["launches_at_once"]

    for launch, agent in (("l", "one"), ("invented", "two")):
        running = Progress(0, 7, "", 0.0, 0.0, state="running")
        report(api.engine, "signed", api.clock.unix_ns(), running, attempt=f"{launch}.0", agent=agent)
    accepted("l", "one")
    assert at_once() == []
    accepted("invented", "two")
    assert at_once() == ["invented", "l"]


@pytest.mark.parametrize("can", [(), ("stop",), ("rollback_memory", "resume", "stop")])
def test_a_command_that_the_job_does_not_support_is_refused(api, can):
    reported(api, "steered", *can)
    assert "does not support pause; it supports: " in refused_at_once(api, "steered", "pause")


def test_commands_to_a_job_with_silent_agents_are_refused(api):
    reported(api, "alone", "pause", views_age_s=25.0)
    assert "none of attempt l.0 has reported for 20 s" in refused_at_once(api, "alone", "pause")


def test_a_resume_of_a_job_that_is_not_paused_is_refused_and_after_a_requested_pause_it_is_not(api):
    reported(api, "going", "pause", "resume")
    assert refused_at_once(api, "going", "resume") == "the job is not paused"
    assert api.post("/api/v1/jobs/going/commands", {"action": "pause"}).status_code == 201
    assert api.post("/api/v1/jobs/going/commands", {"action": "resume"}).status_code == 201


def test_a_rollback_without_a_checkpoint_to_load_is_refused(api):
    reported(api, "bare", "rollback", "rollback_memory", "relaunch")
    assert refused_at_once(api, "bare", "rollback") == "there is no checkpoint to go back to"
    saved(api, "bare", "memory", 4, "unproven")
    assert "no good checkpoint to go back to: 1 unproven (memory)" in refused_at_once(api, "bare", "rollback")
    made = api.post("/api/v1/jobs/bare/commands", {"action": "rollback", "params": {"checkpoint": "memory:l.0:4"}})
    assert made.status_code == 201


def test_a_relaunch_without_a_good_checkpoint_must_be_requested_from_scratch(api):
    reported(api, "new", "relaunch")
    refused = refused_at_once(api, "new", "relaunch")
    assert "training would begin from scratch: the script has registered no checkpoint" in refused
    assert refused.endswith("request it with from_scratch (rankwatch relaunch JOB --from-scratch)")
    saved(api, "new", "local", 4, "unproven")
    refused = refused_at_once(api, "new", "relaunch", from_scratch=False)
    assert "there is no good checkpoint on disk: 1 unproven (local)" in refused
    assert "rankwatch rollback JOB --mode relaunch --checkpoint ID" in refused
    body = {"action": "relaunch", "params": {"from_scratch": True}}
    assert api.post("/api/v1/jobs/new/commands", body).json()["params"] == {"from_scratch": True}


def test_a_relaunch_with_a_good_checkpoint_needs_no_option(api):
    reported(api, "old", "relaunch")
    saved(api, "old", "local", 4)
    assert api.post("/api/v1/jobs/old/commands", {"action": "relaunch"}).status_code == 201


def test_a_policy_rule_may_choose_the_rollback_mode(api):
    rule = {"id": "bits", "kind": "corruption", "mode": "act", "action": "rollback", "rollback_mode": "relaunch"}
    assert api.ask("PUT", "/api/v1/policy", json={"rules": [rule]}).status_code == 200
    assert api.get("/api/v1/policy").json()["rules"][0]["rollback_mode"] == "relaunch"
    [record] = api.reported(PolicySet)
    assert policy_of(record).rules[0].rollback_mode == "relaunch"
    for wrong in ({"action": "pause"}, {"rollback_mode": "half"}):
        assert api.ask("PUT", "/api/v1/policy", json={"rules": [rule | wrong]}).status_code == 422
