"""Rules on metrics by REST: stored, sent to stream, audited; and what they would have found in a job's past."""

import math

import numpy as np
import pytest

from rankwatch_detectors.base import Frame, StepKind
from rankwatch_service.access.scopes import Scope
from rankwatch_service.policy.control_records import RulesSet, decode_control
from rankwatch_service.series.writer import SeriesWriter
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Attempt, Job
from rankwatch_service.written_rule import RULES_MAX

ON_BOTH_DATABASES = True
PATH = "/api/v1/rules"
RULE = {"name": "high", "metric": "memory", "when": "above", "value": 10.0}
CHANGE = {"name": "moved", "metric": "reward", "when": "change", "direction": "down", "jobs": ["rl-*"], "hold_s": 5.0}


def names(api):
    return [rule["name"] for rule in api.get(PATH).json()["items"]]


def records(api):
    found = [decode_control(one.value) for one in api.controls.read(0, 1_000)]
    return [[rule.name for rule in one.rules] for one in found if isinstance(one, RulesSet)]


def put(api, path, body, **how):
    return api.ask("PUT", path, json=body, **how)


def test_rules_are_replaced_added_changed_and_deleted_and_stream_is_told_each_time(api):
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
    for number, attempt in enumerate(("l.0", "l.1")):
        row = {
            "job": "j",
            "attempt": attempt,
            "started_unix_ns": number * 10**12,
            "world_size": 4,
            "number": number + 1,
        }
        with write(api.engine) as connection:
            if not number:
                connection.execute(Job.__table__.insert().values(**JOB))
            ranks = [{"rank": rank, "host": "h", "dp": rank} for rank in range(4)]
            connection.execute(Attempt.__table__.insert().values(**row, topology={"ranks": ranks, "can": []}))
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


JOB = {
    "name": "j",
    "state": "running",
    "attempt": "l.1",
    "world_size": 4,
    "ranks_reporting": 4,
    "step": 299,
    "first_seen_unix_ns": 0,
    "last_seen_unix_ns": 0,
    "dropped": {},
}


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


def test_a_preview_holds_by_the_time_of_the_steps(api, job):
    found = previewed(api, job, metric="memory", when="above", value=10.0, each_rank=True, hold_s=10.0)
    assert [(one["detected_step"], one["resolved_step"]) for one in found["opens"]] == [(220, 270)]
    assert previewed(api, job, metric="memory", when="above", value=10.0, each_rank=True, hold_s=30.0)["opens"] == []


def test_a_preview_finds_what_was_absent_and_ratios_to_peers(api, job):
    absent = previewed(api, job, metric="reward", when="absent", hold_s=20.0)["opens"]
    assert [(one["attempt"], one["detected_step"], one["is_open"]) for one in absent] == [("l.1", 140, True)]
    apart = previewed(api, job, metric="memory", when="peers", value=2.0)["opens"]
    assert [(one["detected_step"], one["ranks"]) for one in apart] == [(200, [2])]


def test_a_preview_of_a_metric_that_the_job_never_logged_judges_nothing(api, job):
    found = previewed(api, job, metric="none", when="above", value=1.0)
    assert (found["opens"], found["steps"], found["first_step"], found["left_out"]) == ([], 0, None, 0)


def test_a_preview_leaves_out_what_is_older_than_its_limit(api, job, monkeypatch):
    monkeypatch.setattr("rankwatch_service.preview.export.PREVIEW_CHUNKS_MAX", 2)
    found = previewed(api, job, metric="memory", when="above", value=10.0)
    assert (found["left_out"], found["first_step"]) == (8, 192)
