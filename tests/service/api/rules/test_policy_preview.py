"""What a policy would have done about the incidents of the last week."""

from sqlalchemy import insert

from rankwatch_service.access.scopes import Scope
from rankwatch_service.preview import policy_preview
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Checkpoint, Incident
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
PATH = "/api/v1/policy/preview"
MIN = 60 * 10**9
DAY = 1440 * MIN
RELAUNCH = {"id": "hangs", "kind": "hang", "mode": "act", "action": "relaunch"}


def attempt(api, *can, world_size=4):
    row = {"job": "gpt", "attempt": "l.0", "started_unix_ns": 0, "ended_unix_ns": None, "world_size": world_size,
           "first_step": 0, "last_step": 9, "topology": {"ranks": [], "can": list(can)}, "number": 1}  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Attempt).values(**row))


def incident(api, name, ago_ns, **changes):
    row = {"id": name, "job": "gpt", "attempt": "l.0", "kind": "hang", "severity": "critical", "onset_step": 500,
           "detected_unix_ns": api.clock.unix_ns() - ago_ns}  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row(**row | changes)))


def checkpoint(api, step, ago_ns, **changes):
    row = {"id": f"local:l.0:{step}", "job": "gpt", "attempt": "l.0", "step": step, "tier": "local", "location": "/x",
           "shards_expected": 1, "shards": [0], "seconds": 1.0, "bytes": 1, "verdict": "good", "verdict_reason": "",
           "saved_unix_ns": api.clock.unix_ns() - ago_ns}  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Checkpoint).values(**row | changes))


def told(api, *rules, **policy):
    answer = api.post(PATH, {"rules": list(rules), **policy}, token=api.token(Scope.READ))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_rule_would_have_acted_on_some_and_says_why_not_on_others(api):
    attempt(api, "relaunch")
    checkpoint(api, 400, 3 * DAY)
    incident(api, "before-the-save", 4 * DAY)
    incident(api, "acted", 60 * MIN)
    incident(api, "too-soon", 60 * MIN - 30 * 10**9)
    incident(api, "unsure", 9 * MIN, confidence=0.5)
    incident(api, "other-kind", MIN, kind="straggler")
    incident(api, "too-old", 8 * DAY)
    found = told(api, RELAUNCH)
    assert (found["days"], found["incidents"], found["left_out"]) == (7, 5, 0)
    assert [(one["incident_id"], one["mode"], one["reason"]) for one in found["items"]] == [
        ("unsure", "suggest", "confidence 0.50 is below 0.90"),
        ("too-soon", "suggest", "the policy acted on this job less than 60 s ago"),
        ("acted", "act", ""),
        (
            "before-the-save",
            "suggest",
            "training would begin from scratch: the script has registered no checkpoint with rankwatch",
        ),
    ]
    assert {one["rule"] for one in found["items"]} == {"hangs"}


def test_hands_off_and_approvals_are_those_of_the_policy_that_is_tried(api):
    attempt(api, "relaunch", world_size=100)
    checkpoint(api, 400, DAY)
    incident(api, "hung", MIN)
    (held,) = told(api, RELAUNCH, hands_off=True)["items"]
    assert (held["mode"], held["reason"]) == ("suggest", "the hands-off switch is on")
    (acted,) = told(api, RELAUNCH)["items"]
    assert (acted["mode"], acted["approval_required"]) == ("act", True)


def test_a_capture_in_memory_that_was_replaced_since_was_good_then(api):
    attempt(api, "rollback", "rollback_memory")
    gone = {"tier": "memory", "location": "", "verdict": "gone", "verdict_reason": "replaced"}
    checkpoint(api, 400, 2 * MIN, **gone)
    incident(api, "nan", MIN, kind="nonfinite")
    rule = {"id": "nan", "kind": "nonfinite", "mode": "act", "action": "rollback"}
    assert [one["mode"] for one in told(api, rule)["items"]] == ["act"]


def test_what_only_notifies_is_not_listed_and_the_policy_in_force_stays(api):
    incident(api, "hung", MIN)
    assert told(api, {"id": "quiet", "mode": "notify"})["items"] == []
    assert api.get("/api/v1/policy").json()["rules"] == []


def test_two_rules_of_one_id_are_refused(api):
    assert api.post(PATH, {"rules": [RELAUNCH, RELAUNCH]}).status_code == 422


def test_only_the_newest_incidents_are_decided(api, monkeypatch):
    monkeypatch.setattr(policy_preview, "INCIDENTS_MAX", 1)
    attempt(api)
    incident(api, "older", 2 * MIN)
    incident(api, "newest", MIN)
    found = told(api, RELAUNCH)
    assert ([one["incident_id"] for one in found["items"]], found["left_out"]) == (["newest"], 1)
    assert found["items"][0]["reason"] == "the job does not support relaunch"
