"""Receivers of each type by REST: what cannot work is refused, and a secret is never shown again."""

import pytest
from sqlalchemy import select

from rankwatch_service.access.scopes import Scope
from rankwatch_service.store.engine import read
from rankwatch_service.store.models import Base
from tests.support.service.api import running_api

KEY = "0123456789abcdef0123456789ABCDEF"
PAGERDUTY = {
    "name": "pd",
    "type": "pagerduty",
    "url": "https://events.pagerduty.com/v2/enqueue",
    "secret": KEY,
}
EMAIL = {"name": "mail", "type": "email", "url": "mailto:oncall@example.com"}
CHANGEABLE = ("type", "url", "kinds", "severities", "jobs", "projects", "matchers", "after_s", "enabled")


def test_a_secret_that_was_given_is_shown_nowhere(api):
    made = api.post("/api/v1/receivers", PAGERDUTY)
    assert (made.status_code, made.json()["type"], made.json()["secret"]) == (201, "pagerduty", "")
    (listed,) = api.get("/api/v1/receivers").json()["items"]
    assert (listed["type"], listed["url"]) == ("pagerduty", PAGERDUTY["url"])
    assert KEY not in api.get("/api/v1/receivers").text + api.get("/api/v1/audit").text
    with read(api.engine) as connection:
        rows = [connection.execute(select(table)).all() for table in Base.metadata.tables.values()]
    assert KEY not in str(rows)


def test_a_webhook_is_the_default_and_is_shown_its_secret_once(api):
    made = api.post("/api/v1/receivers", {"name": "pager", "url": "https://hooks.example/x"}).json()
    assert (made["type"], made["secret"][:6]) == ("webhook", "whsec_")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"secret": "x" * 31}, "integration key"),
        ({"url": "https://events.pagerduty.com/x"}, "v2/enqueue"),
        ({"url": "kafka:"}, "http"),
        ({"type": "pager"}, "pagerduty"),
        ({"type": "slack", "url": "https://slack.com/api/chat.postMessage#C1"}, "xoxb-"),
    ],
    ids=["key", "path", "kafka", "type", "token"],
)
def test_what_cannot_work_is_refused_without_repeating_the_secret(api, changes, says):
    refused = api.post("/api/v1/receivers", PAGERDUTY | changes)
    assert (refused.status_code, says in refused.text) == (422, True), refused.text
    assert (PAGERDUTY | changes)["secret"] not in refused.text


def test_the_type_of_a_receiver_stays_and_its_url_changes_with_the_secret_it_has(api):
    api.post("/api/v1/receivers", PAGERDUTY)
    body = {name: value for name, value in PAGERDUTY.items() if name in CHANGEABLE}
    europe = "https://events.eu.pagerduty.com/v2/enqueue"
    assert api.ask("PUT", "/api/v1/receivers/pd", json=body | {"url": europe}).json()["url"] == europe
    refused = api.ask("PUT", "/api/v1/receivers/pd", json=body | {"type": "teams"})
    assert (refused.status_code, "pagerduty" in refused.text) == (409, True)
    assert api.ask("PUT", "/api/v1/receivers/pd", json=body | {"url": "https://a.example/"}).status_code == 422


def test_an_email_receiver_needs_a_mail_server(api):
    refused = api.post("/api/v1/receivers", EMAIL)
    assert (refused.status_code, "RANKWATCH_SMTP_URL" in refused.text) == (422, True)


def test_with_a_mail_server_an_email_receiver_is_added(tmp_path):
    with running_api(tmp_path, smtp_url="smtp://mail.example.com", smtp_from="rw@example.com") as api:
        assert api.post("/api/v1/receivers", EMAIL).status_code == 201
        two = EMAIL | {"name": "two", "url": "mailto:a@example.com,b@example.com"}
        assert api.post("/api/v1/receivers", two).status_code == 422


def test_who_may_only_read_sees_the_type_and_not_the_path(api):
    teams = {"name": "t", "type": "teams", "url": "https://prod.example.com/workflows/x?sig=secret"}
    assert api.post("/api/v1/receivers", teams).status_code == 201
    (seen,) = api.ask("GET", "/api/v1/receivers", token=api.token(Scope.READ)).json()["items"]
    assert (seen["type"], seen["url"]) == ("teams", "https://prod.example.com/…")


def test_a_receiver_has_matchers_and_waits(api):
    body = {"name": "lead", "url": "https://hooks.example/x", "matchers": ["host=a, kind!=hang"], "after_s": 900}
    made = api.post("/api/v1/receivers", body).json()
    assert (made["matchers"], made["after_s"]) == (['host="a"', 'kind!="hang"'], 900)
    for wrong in ({"matchers": ["color=red"]}, {"after_s": -1}, {"after_s": 86_401}):
        assert api.post("/api/v1/receivers", body | {"name": "x"} | wrong).status_code == 422
