"""Precision by REST, as metrics and as stream is told it, on both databases."""

import pytest
from sqlalchemy import delete, insert, update

from rankwatch_service.access.scopes import Scope
from rankwatch_service.api.background.housekeeping import tell_changed_precision
from rankwatch_service.policy.control_records import PrecisionSet, decode_control
from rankwatch_service.policy.precision import WINDOW_DAYS
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, Incident, IncidentFeedback
from tests.support.service.api import running_api
from tests.support.service.process import until
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
WINDOW_NS = WINDOW_DAYS * 86_400 * 10**9


def found(api, *answers, kind="hang", job="a", age_ns=0):
    """An incident of which people say this, one answer each."""
    with write(api.engine) as connection:
        number = found.number = getattr(found, "number", 0) + 1
        at = api.clock.unix_ns() - age_ns
        row = incident_row(id=f"inc_{number}", kind=kind, job=job, detected_unix_ns=at)
        connection.execute(insert(Incident).values(**row))
        for person, answer in enumerate(answers):
            given = {"person": str(person), "name": str(person), "answer": answer, "at_unix_ns": at}
            connection.execute(insert(IncidentFeedback).values(incident_id=row["id"], **given))
    return row["id"]


def kinds(api):
    return {one["kind"]: one for one in api.get("/api/v1/precision").json()["kinds"]}


def counts(one):
    return [one[name] for name in ("useful", "noise", "duplicate", "unanswered")]


@pytest.mark.parametrize(
    ("answers", "counted"),
    [
        ((), [0, 0, 0, 1]),
        (("noise",), [0, 1, 0, 0]),
        (("noise", "noise", "useful"), [0, 1, 0, 0]),
        (("noise", "useful"), [1, 0, 0, 0]),
        (("noise", "duplicate"), [0, 1, 0, 0]),
        (("useful", "duplicate", "duplicate"), [0, 0, 1, 0]),
    ],
)
def test_an_incident_counts_once_by_what_most_people_say_of_it(api, answers, counted):
    found(api, *answers)
    assert counts(kinds(api)["hang"]) == counted


def test_each_kind_has_its_precision_over_the_window(api):
    for answer in ("useful", "useful", "useful", "noise", "duplicate"):
        found(api, answer)
    found(api)
    found(api, "noise", age_ns=WINDOW_NS + 10**9)
    found(api, kind="straggler")
    assert api.get("/api/v1/precision").json()["days"] == 30
    hang, straggler = kinds(api)["hang"], kinds(api)["straggler"]
    assert (counts(hang), hang["ratio"], hang["known"], hang["demotion"]) == ([3, 1, 1, 1], 0.75, False, "")
    assert (hang["low"], hang["high"]) == (pytest.approx(0.3006, abs=1e-3), pytest.approx(0.9544, abs=1e-3))
    assert (counts(straggler), straggler["ratio"], straggler["low"]) == ([0, 0, 0, 1], None, 0.0)


def test_a_kind_that_is_mostly_noise_is_proposed_for_demotion_with_what_to_do(api):
    rule = {"id": "again", "kind": "hang", "mode": "act", "action": "relaunch"}
    api.ask("PUT", "/api/v1/policy", json={"rules": [rule]})
    for answer in ("useful", "noise", "noise", "noise"):
        found(api, answer)
    assert kinds(api)["hang"]["demotion"] == ""
    found(api, "noise")
    assert kinds(api)["hang"]["demotion"] == "set the mode of again to suggest"


def test_jobs_are_listed_by_kind_and_those_with_the_most_answers_come_first(api):
    for job, answers in (("a", ("noise",)), ("b", ("useful", "noise")), ("c", ())):
        for answer in answers:
            found(api, answer, job=job)
        found(api, job=job)
    path = "/api/v1/precision/jobs"
    everything = api.get(path).json()["items"]
    assert [(one["job"], *counts(one)) for one in everything] == [
        ("b", 1, 1, 0, 1),
        ("a", 0, 1, 0, 1),
        ("c", 0, 0, 0, 1),
    ]
    first = api.get(f"{path}?limit=2").json()
    rest = api.get(path, params={"limit": 2, "cursor": first["next_cursor"]}).json()
    assert first["items"] + rest["items"] == everything
    mine = api.ask("GET", path, token=api.token(Scope.READ, job="a")).json()["items"]
    assert [one["job"] for one in mine] == ["a"]
    assert api.ask("GET", "/api/v1/precision", token=api.token(Scope.READ, job="a")).status_code == 403


def test_the_counts_are_metrics(api):
    found(api, "noise")
    found(api)
    text = api.get("/metrics").text
    assert 'rankwatch_incident_feedback{answer="noise",kind="hang"} 1.0' in text
    assert 'rankwatch_incident_feedback{answer="unanswered",kind="hang"} 1.0' in text


def told(api):
    records = [decode_control(one.value) for one in api.controls.read(0, 1_000)]
    return [one.kinds for one in records if isinstance(one, PrecisionSet)]


def say(api, incident, answer):
    assert api.ask("PUT", f"/api/v1/incidents/{incident}/feedback", json={"answer": answer}).status_code == 200


def test_stream_is_told_the_precision_with_each_answer_that_changes_it(api):
    first, second = found(api), found(api, kind="straggler")
    say(api, first, "noise")
    say(api, second, "duplicate")
    say(api, second, "useful")
    api.ask("DELETE", f"/api/v1/incidents/{first}/feedback")
    assert told(api) == [{"hang": (0, 1)}, {"hang": (0, 1), "straggler": (1, 0)}, {"straggler": (1, 0)}]


def test_stream_is_told_once_that_incidents_have_left_the_window_or_were_deleted(api):
    old = found(api, age_ns=WINDOW_NS - 3_600 * 10**9)
    young = found(api)
    say(api, old, "noise")
    say(api, young, "useful")
    for _ in range(2):
        tell_changed_precision(api.engine, api.controls, api.clock)
    assert told(api)[1:] == [{"hang": (1, 1)}]
    with write(api.engine) as connection:
        moved = api.clock.unix_ns() - WINDOW_NS - 1
        connection.execute(update(Incident).where(Incident.id == old).values(detected_unix_ns=moved))
    for _ in range(2):
        tell_changed_precision(api.engine, api.controls, api.clock)
    with write(api.engine) as connection:
        connection.execute(delete(Incident))
    tell_changed_precision(api.engine, api.controls, api.clock)
    assert told(api)[2:] == [{"hang": (1, 0)}, {}]


def test_an_api_process_tells_stream_what_has_changed_while_none_ran(api, tmp_path):
    found(api, "noise")
    with running_api(tmp_path, database_url=api.settings.database_url):
        until("record", lambda: told(api) == [{"hang": (0, 1)}], 30.0)


def acted(api, incident, state="applied", requested_by="policy", age_ns=0):
    at = api.clock.unix_ns() - age_ns
    number = acted.number = getattr(acted, "number", 0) + 1
    row = {
        "id": f"cmd_{number}", "job": "a", "attempt": "l.0", "action": "pause", "params": {}, "reason": "",
        "requested_by": requested_by, "incident_id": incident, "state": state, "result": "", "requested_unix_ns": at,
        "expires_unix_ns": at,
    }  # fmt: skip
    with write(api.engine) as connection:
        connection.execute(insert(Command).values(**row))


def test_the_rate_of_false_actions_counts_what_the_policy_carried_out(api):
    assert api.get("/api/v1/precision").json()["actions"]["false_ratio"] is None
    for answers in (("noise",), ("noise", "useful"), ("duplicate",), ()):
        acted(api, found(api, *answers))
    noise = found(api, "noise")
    acted(api, noise, requested_by="ann (tok_1)")
    acted(api, noise, state="refused")
    acted(api, noise, age_ns=WINDOW_NS + 10**9)
    actions = api.get("/api/v1/precision").json()["actions"]
    assert actions == {"useful": 1, "noise": 1, "duplicate": 1, "unanswered": 1, "false_ratio": 0.25}
    assert 'rankwatch_policy_actions{answer="noise"} 1.0' in api.get("/metrics").text


def test_a_kind_on_which_no_rule_acts_yet_is_marked(api):
    for answer in ("useful", "useful", "useful", "useful", "noise"):
        found(api, answer)
    found(api, kind="straggler")
    assert not any(kind["withheld"] for kind in kinds(api).values())
    for least, withheld in ((0.8, ["straggler"]), (0.9, ["hang", "straggler"])):
        assert api.ask("PUT", "/api/v1/policy", json={"limits": {"precision_min": least}}).status_code == 200
        assert [name for name, kind in kinds(api).items() if kind["withheld"]] == withheld
    assert api.ask("PUT", "/api/v1/policy", json={"limits": {"precision_min": 1.1}}).status_code == 422
