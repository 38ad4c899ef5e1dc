"""Rules on metrics and the policy's rules: stored, sent to stream, and what they would have done in the past."""

import math

import msgspec
import numpy as np
import pytest

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.grants import Scope
from rankwatch_service.policy.control_records import RulesSet
from rankwatch_service.preview import engine, policy_preview
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.models import Attempt, Checkpoint, Incident, Job
from rankwatch_service.written_rule import RULES_MAX
from tests.support.store.database import add, attempt_row, checkpoint_row, job_row
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
PATH = "/api/v1/rules"
RULE = {"name": "high", "metric": "memory", "when": "above", "value": 10.0}
CHANGE = {"name": "moved", "metric": "reward", "when": "change", "direction": "down", "jobs": ["rl-*"], "hold_s": 5.0}


def names(api):
    return [rule["name"] for rule in api.get(PATH).json()["items"]]


def records(api):
    return [[rule.name for rule in one.rules] for one in api.reported(RulesSet)]


def put(api, path, body, **how):
    return api.ask("PUT", path, json=body, **how)


def test_rules_are_replaced_added_changed_and_deleted_and_stream_is_reported_each_time(api):
    assert put(api, PATH, {"rules": [RULE, CHANGE]}).status_code == 200
    assert put(api, f"{PATH}/low", RULE | {"name": "low", "when": "below"}).status_code == 200
    changed = put(api, f"{PATH}/high", RULE | {"value": 20.0, "severity": "critical"}).json()["items"]
    assert [(rule["name"], rule["value"]) for rule in changed] == [("high", 20.0), ("moved", None), ("low", 10.0)]
    assert api.ask("DELETE", f"{PATH}/moved").status_code == 204
    assert names(api) == ["high", "low"]
    assert records(api) == [["high", "moved"], ["high", "moved", "low"], ["high", "moved", "low"], ["high", "low"]]
    actions = [(one["action"], one["target"]) for one in api.get("/api/v1/audit").json()["items"]]
    assert [one for one in actions if one[0].startswith("rule")] == [
        ("rule.delete", "moved"),
        ("rule.set", "high"),
        ("rule.set", "low"),
        ("rules.set", "rules"),
    ]


def test_a_rule_that_stays_as_it_is_keeps_who_changed_it_last(api):
    put(api, PATH, {"rules": [RULE]})
    before = api.get(PATH).json()["items"][0]
    after = put(api, PATH, {"rules": [RULE, CHANGE]}, token=api.token(Scope.OPERATE)).json()["items"]
    assert after[0] == before
    assert after[1]["updated_by"] != before["updated_by"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("PUT", PATH, {"rules": [RULE, RULE]}, 422),
        ("PUT", PATH, {"rules": [RULE | {"name": f"r{n}"} for n in range(RULES_MAX + 1)]}, 422),
        ("PUT", PATH, {"rules": [RULE | {"value": None}]}, 422),
        ("PUT", f"{PATH}/other", RULE, 422),
        ("DELETE", f"{PATH}/none", None, 404),
        ("POST", "/api/v1/jobs/none/rules/preview", RULE, 404),
    ],
    ids=["same name", "too many", "no value", "another name", "no such rule", "no such job"],
)
def test_what_is_wrong_is_refused_and_changes_nothing(api, method, path, body, status):
    put(api, PATH, {"rules": [CHANGE]})
    assert api.ask(method, path, json=body).status_code == status
    assert names(api) == ["moved"]
    assert len(records(api)) == 1


def test_one_rule_more_than_the_limit_is_refused(api):
    assert put(api, PATH, {"rules": [RULE | {"name": f"r{n}"} for n in range(RULES_MAX)]}).status_code == 200
    assert put(api, f"{PATH}/high", RULE).status_code == 422


def test_rules_are_changed_by_operators_of_every_job_alone(api):
    assert put(api, PATH, {"rules": []}, token=api.token(Scope.READ)).status_code == 403
    assert put(api, PATH, {"rules": []}, token=api.token(Scope.OPERATE, job="j")).status_code == 403
    assert api.ask("GET", PATH, token=api.token(Scope.READ)).status_code == 200


@pytest.fixture
def job(api):
    """A job of two attempts of 300 steps each, whose memory is too high from step 200 of the first to 250."""
    series = SeriesWriter(api.engine, api.clock)
    here = np.ones(4, dtype=bool)
    ranks = [{"rank": rank, "host": "h", "dp": rank} for rank in range(4)]
    add(api.engine, Job, job_row("j", attempt="l.1"))
    for number, attempt in enumerate(("l.0", "l.1")):
        ran = {"attempt": attempt, "number": number + 1, "started_unix_ns": number * 10**12}
        add(api.engine, Attempt, attempt_row("j", ranks=ranks, **ran))
        for step in range(300):
            high = number == 0 and 200 <= step < 250
            values = {"memory": np.array([5.0, 5.0, 12.5 if high else 5.0, 5.0]), "step_time_s": np.full(4, 0.5)}
            if step % 2:
                values["reward"] = np.full(4, math.nan if step == 151 else 1.0 + step % 3)
            if number and step > 100:
                values.pop("reward", None)
            series.add(
                "j", Frame(attempt, "steps", step, StepKind.TRAIN, step / 2, values, dict.fromkeys(values, here))
            )
    series.flush("j")
    return "j"


def previewed(api, job, **rule):
    answer = api.post(f"/api/v1/jobs/{job}/rules/preview", {"name": "r", **rule}, token=api.token(Scope.READ))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_preview_shows_what_a_rule_would_have_opened_in_the_past_of_a_job(api, job):
    found = previewed(api, job, metric="memory", when="above", value=10.0, each_rank=True)
    assert (found["steps"], found["first_step"], found["last_step"], found["left_out"]) == (600, 0, 299, 0)
    (one,) = found["opens"]
    assert (one["attempt"], one["onset_step"], one["detected_step"], one["resolved_step"]) == ("l.0", 200, 200, 250)
    assert (one["ranks"], one["is_open"], one["evidence"]["value"]) == ([2], False, 12.5)


def test_a_preview_holds_by_time_finds_what_is_absent_or_apart_and_leaves_out_what_is_too_old(api, job, monkeypatch):
    def here(path, job, proposal):
        return msgspec.json.decode(msgspec.json.encode(engine.compare(path, job, proposal)))

    monkeypatch.setattr(engine, "_in_a_process", here)  # a process each would take seconds
    high = {"metric": "memory", "when": "above", "value": 10.0}
    found = previewed(api, job, **high, each_rank=True, hold_s=10.0)
    assert [(one["detected_step"], one["resolved_step"]) for one in found["opens"]] == [(220, 270)]
    assert previewed(api, job, **high, each_rank=True, hold_s=30.0)["opens"] == []
    absent = previewed(api, job, metric="reward", when="absent", hold_s=20.0)["opens"]
    assert [(one["attempt"], one["detected_step"], one["is_open"]) for one in absent] == [("l.1", 140, True)]
    apart = previewed(api, job, metric="memory", when="peers", value=2.0)["opens"]
    assert [(one["detected_step"], one["ranks"]) for one in apart] == [(200, [2])]
    never = previewed(api, job, metric="none", when="above", value=1.0)
    assert (never["opens"], never["steps"], never["first_step"], never["left_out"]) == ([], 0, None, 0)
    monkeypatch.setattr("rankwatch_service.preview.engine.PREVIEW_CHUNKS_MAX", 2)
    newest = previewed(api, job, **high)
    assert (newest["left_out"], newest["first_step"]) == (8, 192)


PREVIEW = "/api/v1/policy/preview"
MIN = 60 * 10**9
DAY = 1440 * MIN
RELAUNCH = {"id": "hangs", "kind": "hang", "mode": "act", "action": "relaunch"}


def add_attempt(api, *can, world_size=4):
    add(api.engine, Attempt, attempt_row("gpt", can=can, world_size=world_size))


def add_incident(api, name, ago_ns, **changes):
    row = {"id": name, "job": "gpt", "attempt": "l.0", "kind": "hang", "severity": "critical", "onset_step": 500,
           "detected_unix_ns": api.clock.unix_ns() - ago_ns}  # fmt: skip
    add(api.engine, Incident, incident_row(**row | changes))


def add_checkpoint(api, step, ago_ns, **changes):
    saved_ns = api.clock.unix_ns() - ago_ns
    add(api.engine, Checkpoint, checkpoint_row("gpt", step, **{"saved_unix_ns": saved_ns} | changes))


def reported(api, *rules, **policy):
    answer = api.post(PREVIEW, {"rules": list(rules), **policy}, token=api.token(Scope.READ))
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_rule_would_have_acted_on_some_and_says_why_not_on_others(api):
    add_attempt(api, "relaunch")
    add_checkpoint(api, 400, 3 * DAY)
    add_incident(api, "before-the-save", 4 * DAY)
    add_incident(api, "acted", 60 * MIN)
    add_incident(api, "too-soon", 60 * MIN - 30 * 10**9)
    add_incident(api, "unsure", 9 * MIN, confidence=0.5)
    add_incident(api, "other-kind", MIN, kind="straggler")
    add_incident(api, "too-old", 8 * DAY)
    found = reported(api, RELAUNCH)
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
    add_attempt(api, "relaunch", world_size=100)
    add_checkpoint(api, 400, DAY)
    add_incident(api, "hung", MIN)
    (held,) = reported(api, RELAUNCH, hands_off=True)["items"]
    assert (held["mode"], held["reason"]) == ("suggest", "the hands-off switch is on")
    (acted,) = reported(api, RELAUNCH)["items"]
    assert (acted["mode"], acted["approval_required"]) == ("act", True)


def test_a_capture_in_memory_that_was_replaced_since_was_good_then(api):
    add_attempt(api, "rollback", "rollback_memory")
    gone = {"tier": "memory", "location": "", "verdict": "gone", "verdict_reason": "replaced"}
    add_checkpoint(api, 400, 2 * MIN, **gone)
    add_incident(api, "nan", MIN, kind="nonfinite")
    rule = {"id": "nan", "kind": "nonfinite", "mode": "act", "action": "rollback"}
    assert [one["mode"] for one in reported(api, rule)["items"]] == ["act"]


def test_what_only_notifies_is_not_listed_and_the_policy_in_force_stays(api):
    add_incident(api, "hung", MIN)
    assert reported(api, {"id": "quiet", "mode": "notify"})["items"] == []
    assert api.get("/api/v1/policy").json()["rules"] == []


def test_two_rules_of_one_id_are_refused(api):
    assert api.post(PREVIEW, {"rules": [RELAUNCH, RELAUNCH]}).status_code == 422


def test_only_the_newest_incidents_are_decided(api, monkeypatch):
    monkeypatch.setattr(policy_preview, "INCIDENTS_MAX", 1)
    add_attempt(api)
    add_incident(api, "older", 2 * MIN)
    add_incident(api, "newest", MIN)
    found = reported(api, RELAUNCH)
    assert ([one["incident_id"] for one in found["items"]], found["left_out"]) == (["newest"], 1)
    assert found["items"][0]["reason"] == "the job does not support relaunch"
