"""Notifications that people look for, send again, or send to try a receiver."""

import json

import pytest
from sqlalchemy import insert, select, update

from rankwatch_service.api.routes.notifications import deliveries
from rankwatch_service.notify.retry import GIVE_UP_AFTER_S
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Delivery, Incident, Outbox
from rankwatch_service.store.rows import outbox_row
from tests.service.api.test_reads import incident
from tests.support.values.incidents import notified

WHOLE = "inc_3f9a2c1bd17744aa20c1d2e3"
RECEIVER = {"name": "pager", "url": "https://hooks.example/x"}


@pytest.fixture(autouse=True)
def no_notifier(monkeypatch):
    """No notifier runs beside these tests, so a reply need not wait for one."""
    monkeypatch.setattr(deliveries, "TRIED_WITHIN_S", 0.0)


def sent(api, what="opened", number=1, **values):
    [row] = [outbox_row(one) for one in notified(what, number, now_unix_ns=api.clock.unix_ns())]
    with write(api.engine) as connection:
        connection.execute(insert(Outbox).values(**row | values))
    return row["id"]


def state_of(api, id_):
    with read(api.engine) as connection:
        return connection.execute(select(Outbox.state, Outbox.tries).where(Outbox.id == id_)).one()


def test_a_test_is_a_message_that_says_nothing_is_wrong_and_is_answered_with_what_became_of_it(api, monkeypatch):
    api.post("/api/v1/receivers", RECEIVER)
    waiting = api.post("/api/v1/receivers/pager/test")
    assert (waiting.status_code, waiting.json()["state"]) == (202, "waiting")
    id_ = waiting.json()["id"]
    with write(api.engine) as connection:
        body = connection.scalar(select(Outbox.body).where(Outbox.id == id_))
        connection.execute(update(Outbox).where(Outbox.id == id_).values(tries=1))
        failure = {"outbox_id": id_, "at_unix_ns": 1, "status": 404, "error": "answered 404", "seconds": 0.1}
        connection.execute(insert(Delivery).values(**failure))
    assert json.loads(body)["type"] == "receiver.test"
    assert "Nothing is wrong" in json.loads(body)["data"]["text"]
    (listed,) = api.get("/api/v1/notifications?receiver=pager").json()["items"]
    assert (listed["id"], listed["tries"], listed["error"]) == (id_, 1, "answered 404")


def test_a_receiver_that_is_missing_or_disabled_cannot_be_tried(api):
    assert api.post("/api/v1/receivers/pager/test").status_code == 404
    api.post("/api/v1/receivers", RECEIVER | {"enabled": False})
    assert api.post("/api/v1/receivers/pager/test").status_code == 409


def test_what_was_given_up_is_listed_and_sent_again_under_its_id(api):
    api.post("/api/v1/receivers", RECEIVER)
    delivered, failed = sent(api, state="delivered"), sent(api, "updated", 2, state="failed", tries=5)
    (listed,) = api.get("/api/v1/notifications?state=failed").json()["items"]
    assert (listed["id"], listed["incident_id"]) == (failed, "inc_1")
    assert api.post(f"/api/v1/notifications/{failed}/resend").status_code == 202
    assert tuple(state_of(api, failed)) == ("waiting", 0)
    refused = api.post(f"/api/v1/notifications/{delivered}/resend")
    assert (refused.status_code, "delivered" in refused.text) == (409, True)
    assert api.post("/api/v1/notifications/msg_none/resend").status_code == 404
    assert "notification.resend" in api.get("/api/v1/audit").text


def test_notifications_and_deliveries_of_an_incident_are_found_by_its_short_id(api):
    with write(api.engine) as connection:
        connection.execute(insert(Incident), [incident(1, id=WHOLE), incident(2)])
    of_it, _ = sent(api, incident_id=WHOLE), sent(api, "updated", 2)
    with write(api.engine) as connection:
        values = {"outbox_id": of_it, "at_unix_ns": 1, "status": 200, "error": "", "seconds": 0.1}
        connection.execute(insert(Delivery).values(**values))
    for given in ("3f9a2c1bd1", "%233f9a2c", WHOLE):
        (one,) = api.get(f"/api/v1/notifications?incident={given}").json()["items"]
        (other,) = api.get(f"/api/v1/deliveries?incident={given}").json()["items"]
        assert (one["id"], other["incident_id"]) == (of_it, WHOLE)
    assert api.get("/api/v1/deliveries?incident=ffffffffff").json()["items"] == []


@pytest.mark.parametrize("why", ["too old", "overtaken", "disabled"])
def test_what_would_be_wrong_or_useless_now_is_not_sent_again(api, why):
    api.post("/api/v1/receivers", RECEIVER | {"enabled": why != "disabled"})
    old = api.clock.unix_ns() - (GIVE_UP_AFTER_S + 1) * 10**9
    failed = sent(api, state="failed", **({"created_unix_ns": old} if why == "too old" else {}))
    if why == "overtaken":
        sent(api, "resolved", 2, state="delivered")
    assert api.post(f"/api/v1/notifications/{failed}/resend").status_code == 409
    assert state_of(api, failed).state == "failed"
