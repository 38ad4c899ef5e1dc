"""For each incident: who was notified, and why the others were not."""

from sqlalchemy import insert

from rankwatch_service.access.scopes import Scope
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Delivery, Incident, Outbox
from rankwatch_service.store.rows import outbox_row
from tests.support.values.incidents import incident_row, notified

PATH = "/api/v1/incidents/inc_1/receivers"


def add(api, *receivers, **incident):
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row(**incident)))
    for name, settings in receivers:
        body = {"name": name, "url": f"https://hooks.example/{name}", **settings}
        assert api.post("/api/v1/receivers", body).status_code == 201


def sent(api, to, state="delivered", number=1, error=""):
    [row] = [outbox_row(one) for one in notified("opened", number, (to,), now_unix_ns=api.clock.unix_ns())]
    with write(api.engine) as connection:
        connection.execute(insert(Outbox).values(**row | {"state": state, "tries": 3}))
        if error:
            failure = {"outbox_id": row["id"], "at_unix_ns": 1, "status": 500, "error": error, "seconds": 0.1}
            connection.execute(insert(Delivery).values(**failure))


def reasons(api):
    return {one["receiver"]: one["why"] for one in api.get(PATH).json()["items"]}


def test_each_receiver_has_its_reason(api):
    add(
        api,
        ("critical", {"severities": ["critical"]}),
        ("hangs", {"kinds": ["hang"]}),
        ("jobs", {"jobs": ["other"]}),
        ("nlp", {"projects": ["nlp"]}),
        ("off", {"enabled": False}),
        ("b", {"matchers": ["host=node-b"]}),
        ("new", {}),
    )
    found = reasons(api)
    assert "is warning, and the receiver gets critical incidents alone" in found["critical"]
    assert "the kinds hang alone" in found["hangs"]
    assert "other jobs" in found["jobs"]
    assert "other projects" in found["nlp"]
    assert "disabled" in found["off"]
    assert found["b"] == 'not sent: the receiver gets incidents with host="node-b" alone'
    assert "it gets the next change" in found["new"]


def test_what_was_sent_says_what_became_of_it(api):
    add(api, ("a", {}), ("b", {}), ("c", {}), ("d", {}))
    sent(api, "a")
    sent(api, "b", "silenced")
    sent(api, "c", "failed", error="answered 500")
    sent(api, "d", "waiting", error="no answer within 15 s")
    found = reasons(api)
    assert found["a"] == "sent, since the receiver subscribes to it"
    assert "a silence muted it" in found["b"]
    assert found["c"] == "not sent: given up after 3 tries: answered 500"
    assert found["d"] == "not sent yet: no answer within 15 s"


def test_a_token_of_some_jobs_sees_who_was_notified_and_no_other_receiver(api):
    add(api, ("a", {}), ("b", {"severities": ["critical"]}))
    sent(api, "a")
    token = api.token(Scope.READ, job="gpt-small")
    assert [one["receiver"] for one in api.ask("GET", PATH, token=token).json()["items"]] == ["a"]
    other = api.token(Scope.READ, job="other")
    assert api.ask("GET", PATH, token=other).status_code == 404
