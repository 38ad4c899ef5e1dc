"""People's feedback on incidents, and the precision that follows from it, on both databases."""

import pytest
from sqlalchemy import delete, insert, select, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api.background.housekeeping import RECORD_NS, remove_expired, report_changed_precision
from rankwatch_service.policy.control_records import PrecisionSet
from rankwatch_service.policy.precision import WINDOW_DAYS
from rankwatch_service.store import job_removal
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Command, Feed, Incident, IncidentFeedback
from tests.support.service.api import running_api
from tests.support.service.process import until
from tests.support.store.database import add, change, command_row, rows_of, values_of
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
INCIDENT = "/api/v1/incidents/inc_1"


@pytest.fixture
def service(api):
    """An api whose database has one incident."""
    add(api.engine, Incident, incident_row())
    return api


def person(api, name, scopes=(Scope.OPERATE, Scope.READ), **more):
    with write(api.engine) as connection:
        return create_token(connection, TokenKind.API, name, scopes, api.clock.unix_ns(), **more)[1]


def say(api, answer, token=None, incident="inc_1", **how):
    return api.ask("PUT", f"/api/v1/incidents/{incident}/feedback", token=token, json={"answer": answer}, **how)


def answers(api):
    return {one["name"]: one["answer"] for one in api.get(INCIDENT).json()["feedback"]}


def stored(api):
    return values_of(api.engine, select(IncidentFeedback.answer))


def test_each_person_has_one_answer_with_name_and_time_and_may_change_it(service):
    ann, bob = person(service, "ann"), person(service, "bob")
    assert say(service, "noise", ann).status_code == 200
    assert say(service, "useful", bob).json()["feedback"][0]["answer"] == "useful"
    assert answers(service) == {"ann": "noise", "bob": "useful"}
    before = service.clock.unix_ns()
    assert say(service, "duplicate", ann).status_code == 200
    assert answers(service) == {"ann": "duplicate", "bob": "useful"}
    newest = service.get(INCIDENT).json()["feedback"][0]
    assert (newest["person"], newest["at_unix_ns"] >= before) == ("ann", True)


def test_another_token_of_a_person_changes_their_answer(service):
    say(service, "noise", person(service, "Ann"))
    say(service, "useful", person(service, "ann"))
    assert answers(service) == {"ann": "useful"}


def test_an_answer_is_withdrawn_once(service):
    ann = person(service, "ann")
    say(service, "noise", ann)
    say(service, "useful")
    for _ in range(2):
        assert service.ask("DELETE", f"{INCIDENT}/feedback", token=ann).status_code == 204
    assert answers(service) == {"admin": "useful"}


def test_every_change_is_in_the_audit_trail_and_in_the_feed_and_a_repeat_is_not(service):
    ann = person(service, "ann")
    for answer in ("noise", "noise", "useful"):
        say(service, answer, ann)
    service.ask("DELETE", f"{INCIDENT}/feedback", token=ann)
    audited = service.get("/api/v1/audit?target=inc_1").json()["items"]
    assert [(row["action"], row["fields"]["answer"]) for row in audited] == [
        ("incident.feedback", ""),
        ("incident.feedback", "useful"),
        ("incident.feedback", "noise"),
    ]
    assert all(row["actor"].startswith("ann (") for row in audited)
    reported = rows_of(service.engine, select(Feed.topic, Feed.job, Feed.data))
    assert [(topic, job, data["what"]) for topic, job, data in reported] == [("incident", "gpt-small", "feedback")] * 3


def test_who_may_answer_about_what(service):
    for token, status in (
        (person(service, "reader", (Scope.READ,)), 403),
        (person(service, "elsewhere", job="other"), 404),
        (person(service, "here", job="gpt-small"), 200),
    ):
        assert say(service, "noise", token).status_code == status
        taken_back = service.ask("DELETE", f"{INCIDENT}/feedback", token=token).status_code
        assert taken_back == (204 if status == 200 else status)
    assert say(service, "great").status_code == 422
    assert service.ask("PUT", "/api/v1/incidents/inc_2/feedback", json={"answer": "noise"}).status_code == 404
    assert service.ask("DELETE", "/api/v1/incidents/inc_2/feedback").status_code == 404
    assert stored(service) == []


def test_feedback_goes_with_its_incident(service):
    say(service, "noise")
    with write(service.engine) as connection:
        job_removal.delete_job(connection, "gpt-small", 1)
    assert stored(service) == []


def test_feedback_on_an_incident_of_long_ago_is_removed(service):
    now = service.clock.unix_ns()
    say(service, "noise")
    remove_expired(service.engine, now)
    assert stored(service) == ["noise"]
    with write(service.engine) as connection:
        connection.execute(delete(Incident))
        row = incident_row(state="resolved", resolved_unix_ns=now - RECORD_NS - 1)
        connection.execute(insert(Incident).values(**row))
    say(service, "noise")
    remove_expired(service.engine, now)
    assert stored(service) == []


WINDOW_NS = WINDOW_DAYS * 86_400 * 10**9


def found(api, *answers, kind="hang", job="a", age_ns=0):
    """An incident of which people say this, one answer each."""
    number = found.number = getattr(found, "number", 0) + 1
    at = api.clock.unix_ns() - age_ns
    row = incident_row(id=f"inc_{number}", kind=kind, job=job, detected_unix_ns=at)
    add(api.engine, Incident, row)
    for person, answer in enumerate(answers):
        given = {"person": str(person), "name": str(person), "answer": answer, "at_unix_ns": at}
        add(api.engine, IncidentFeedback, incident_id=row["id"], **given)
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


def reported(api):
    return [record.kinds for record in api.reported(PrecisionSet)]


def test_stream_is_told_the_precision_with_each_answer_that_changes_it(api):
    first, second = found(api), found(api, kind="straggler")
    say(api, "noise", incident=first)
    say(api, "duplicate", incident=second)
    say(api, "useful", incident=second)
    api.ask("DELETE", f"/api/v1/incidents/{first}/feedback")
    assert reported(api) == [{"hang": (0, 1)}, {"hang": (0, 1), "straggler": (1, 0)}, {"straggler": (1, 0)}]


def test_stream_is_reported_once_that_incidents_have_left_the_window_or_were_deleted(api):
    old = found(api, age_ns=WINDOW_NS - 3_600 * 10**9)
    young = found(api)
    say(api, "noise", incident=old)
    say(api, "useful", incident=young)
    for _ in range(2):
        report_changed_precision(api.engine, api.controls, api.clock)
    assert reported(api)[1:] == [{"hang": (1, 1)}]
    with write(api.engine) as connection:
        moved = api.clock.unix_ns() - WINDOW_NS - 1
        connection.execute(update(Incident).where(Incident.id == old).values(detected_unix_ns=moved))
    for _ in range(2):
        report_changed_precision(api.engine, api.controls, api.clock)
    change(api.engine, delete(Incident))
    report_changed_precision(api.engine, api.controls, api.clock)
    assert reported(api)[2:] == [{"hang": (1, 0)}, {}]


def test_an_api_process_tells_stream_what_has_changed_while_none_ran(api, tmp_path):
    found(api, "noise")
    with running_api(tmp_path, database_url=api.settings.database_url):
        until("record", lambda: reported(api) == [{"hang": (0, 1)}], 30.0)


def acted(api, incident, state="applied", requested_by="policy", age_ns=0):
    number = acted.number = getattr(acted, "number", 0) + 1
    asked = {"requested_by": requested_by, "requested_unix_ns": api.clock.unix_ns() - age_ns, "state": state}
    add(api.engine, Command, command_row(f"cmd_{number}", job="a", incident_id=incident, **asked))


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
