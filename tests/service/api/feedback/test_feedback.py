"""People's feedback on incidents by REST, on both databases."""

import pytest
from sqlalchemy import delete, insert, select

from rankwatch_service.access.scopes import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.api.background.housekeeping import RECORD_NS, remove_expired
from rankwatch_service.store import job_removal
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Feed, Incident, IncidentFeedback
from tests.support.values.incidents import incident_row

ON_BOTH_DATABASES = True
INCIDENT = "/api/v1/incidents/inc_1"


@pytest.fixture
def service(api):
    """An api whose database has one incident."""
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row()))
    return api


def person(api, name, scopes=(Scope.OPERATE, Scope.READ), **more):
    with write(api.engine) as connection:
        return create_token(connection, TokenKind.API, name, scopes, api.clock.unix_ns(), **more)[1]


def say(api, answer, token=None, **how):
    return api.ask("PUT", f"{INCIDENT}/feedback", token=token, json={"answer": answer}, **how)


def answers(api):
    return {one["name"]: one["answer"] for one in api.get(INCIDENT).json()["feedback"]}


def stored(api):
    with read(api.engine) as connection:
        return connection.scalars(select(IncidentFeedback.answer)).all()


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
    with read(service.engine) as connection:
        told = connection.execute(select(Feed.topic, Feed.job, Feed.data)).all()
    assert [(topic, job, data["what"]) for topic, job, data in told] == [("incident", "gpt-small", "feedback")] * 3


def test_a_repeated_request_gets_the_first_reply(service):
    first = say(service, "noise", key="k")
    again = say(service, "noise", key="k")
    assert (again.json(), again.headers["Idempotent-Replay"]) == (first.json(), "true")


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
