"""Receivers of each type, who was notified and why not, what people send again, and the links in messages."""

import json
from urllib.parse import urlsplit

import pytest
from sqlalchemy import delete, insert, select, update

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.api.routes import notifications
from rankwatch_service.notify.message_links import PURPOSE, VALID_S, LinkAction, SignedLinks
from rankwatch_service.notify.sender import GIVE_UP_AFTER_S
from rankwatch_service.policy.control_records import IncidentReview
from rankwatch_service.policy.notification import iso_time
from rankwatch_service.store.engine import read, write
from rankwatch_service.store.models import Base, Delivery, Incident, Outbox
from tests.support.service.api import running_api
from tests.support.store.database import add, change, rows_of
from tests.support.store.database import numbered_incident as incident
from tests.support.values.incidents import NOON_UNIX_NS, incident_row, notified

KEY = "0123456789abcdef0123456789ABCDEF"
PAGERDUTY = {"name": "pd", "type": "pagerduty", "url": "https://events.pagerduty.com/v2/enqueue", "secret": KEY}
EMAIL = {"name": "mail", "type": "email", "url": "mailto:oncall@example.com"}
CHANGEABLE = ("type", "url", "kinds", "severities", "jobs", "projects", "matchers", "after_s", "enabled")


def test_a_secret_that_was_given_is_shown_nowhere(api):
    made = api.post("/api/v1/receivers", PAGERDUTY)
    assert (made.status_code, made.json()["type"], made.json()["secret"]) == (201, "pagerduty", "")
    (listed,) = api.get("/api/v1/receivers").json()["items"]
    assert (listed["type"], listed["url"]) == ("pagerduty", PAGERDUTY["url"])
    assert KEY not in api.get("/api/v1/receivers").text + api.get("/api/v1/audit").text
    rows = [rows_of(api.engine, select(table)) for table in Base.metadata.tables.values()]
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


PATH = "/api/v1/incidents/inc_1/receivers"


def sent(api, what="opened", number=1, to="pager", error="", **values):
    [row] = notified(what, number, (to,), now_unix_ns=api.clock.unix_ns())
    add(api.engine, Outbox, row | values)
    if error:
        add(api.engine, Delivery, outbox_id=row["id"], at_unix_ns=1, status=500, error=error, seconds=0.1)
    return row["id"]


def receivers(api, *names, **incident):
    add(api.engine, Incident, incident_row(**incident))
    for name, settings in names:
        body = {"name": name, "url": f"https://hooks.example/{name}", **settings}
        assert api.post("/api/v1/receivers", body).status_code == 201


def reasons(api):
    return {one["receiver"]: one["why"] for one in api.get(PATH).json()["items"]}


def test_each_receiver_has_its_reason(api):
    receivers(
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
    assert "is warning, and the receiver gets critical incidents only" in found["critical"]
    assert "only incidents of the kinds hang" in found["hangs"]
    assert "other jobs" in found["jobs"]
    assert "other projects" in found["nlp"]
    assert "disabled" in found["off"]
    assert found["b"] == 'not sent: the receiver gets only incidents with host="node-b"'
    assert "it gets the next change" in found["new"]


def test_what_was_sent_says_what_became_of_it(api):
    receivers(api, ("a", {}), ("b", {}), ("c", {}), ("d", {}))
    for to, state, error in (
        ("a", "delivered", ""),
        ("b", "silenced", ""),
        ("c", "failed", "answered 500"),
        ("d", "waiting", "no answer within 15 s"),
    ):
        sent(api, to=to, state=state, error=error, tries=3)
    found = reasons(api)
    assert found["a"] == "sent, since the receiver subscribes to it"
    assert "a silence muted it" in found["b"]
    assert found["c"] == "not sent: given up after 3 tries: answered 500"
    assert found["d"] == "not sent yet: no answer within 15 s"


def test_a_token_of_some_jobs_sees_who_was_notified_and_no_other_receiver(api):
    receivers(api, ("a", {}), ("b", {"severities": ["critical"]}))
    sent(api, to="a", state="delivered")
    token = api.token(Scope.READ, job="gpt-small")
    assert [one["receiver"] for one in api.ask("GET", PATH, token=token).json()["items"]] == ["a"]
    other = api.token(Scope.READ, job="other")
    assert api.ask("GET", PATH, token=other).status_code == 404


WHOLE = "inc_3f9a2c1bd17744aa20c1d2e3"
RECEIVER = {"name": "pager", "url": "https://hooks.example/x"}


@pytest.fixture(autouse=True)
def no_notifier(monkeypatch):
    """No notifier runs beside these tests, so a reply need not wait for one."""
    monkeypatch.setattr(notifications, "TRIED_WITHIN_S", 0.0)


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
    add(api.engine, Incident, incident(1, id=WHOLE), incident(2))
    of_it, _ = sent(api, incident_id=WHOLE), sent(api, "updated", 2)
    values = {"outbox_id": of_it, "at_unix_ns": 1, "status": 200, "error": "", "seconds": 0.1}
    add(api.engine, Delivery, values)
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


URL = "https://w.example"


def paths(api, late_s=1):
    """Paths of the links of a message that is so old, about an incident with a hostile summary."""
    hostile = {"summary": "<script>alert(1)</script>"}
    [row] = notified("opened", 1, now_unix_ns=NOON_UNIX_NS, **hostile)
    message = json.loads(row["body"]) | {"timestamp": iso_time(api.clock.unix_ns() - late_s * 10**9)}
    add(api.engine, Incident, incident_row(**hostile))
    add(api.engine, Outbox, row)
    key = load_secret_key(api.settings, api.engine, api.clock).derive(PURPOSE)
    urls = json.loads(SignedLinks(key, URL).added(row["id"], json.dumps(message).encode()))["data"]["links"]
    return {action: urls[action].removeprefix(URL) for action in LinkAction}


@pytest.fixture
def links(api):
    return paths(api)


def opened(api, path, method="GET"):
    answer = api.ask(method, path, token="")
    return answer.status_code, answer.text


def test_to_open_a_link_asks_and_changes_nothing(api, links):
    for path in links.values():
        status, text = opened(api, path)
        assert (status, "&lt;script&gt;" in text, "<script" in text) == (200, True, False)
    assert '<form method="post"><button class="primary">Acknowledge</button>' in opened(api, links["acknowledge"])[1]
    assert api.reported(IncidentReview) == api.get("/api/v1/silences").json()["items"] == []


def test_the_form_acknowledges_once(api, links):
    assert opened(api, links["acknowledge"], "POST")[0] == 200
    for method in ("POST", "GET"):
        status, text = opened(api, links["acknowledge"], method)
        assert (status, "has been used" in text) == (403, True)
    (record,) = api.reported(IncidentReview)
    assert (record.incident, record.what, record.actor) == ("inc_1", "acknowledged", "link to pager")
    (audited,) = api.get("/api/v1/audit?action=incident.acknowledged").json()["items"]
    assert (audited["actor"], audited["target"]) == ("link to pager", "inc_1")


def test_the_form_silences_for_an_hour(api, links):
    assert opened(api, links["silence"], "POST")[0] == 200
    (silence,) = api.get("/api/v1/silences").json()["items"]
    assert (silence["job"], silence["kind"], silence["scope"]) == ("gpt-small", "straggler", "rank:3")
    assert silence["ends_unix_ns"] - silence["starts_unix_ns"] == 3_600 * 10**9
    assert (silence["created_by"], silence["comment"]) == ("link to pager", "by the link in a message")
    assert opened(api, links["silence"], "POST")[0] == 403
    assert opened(api, links["acknowledge"], "POST")[0] == 200  # each link has its own turn


@pytest.mark.parametrize(
    "altered",
    [
        lambda path: path.replace("/silence/", "/acknowledge/"),
        lambda path: path.replace("/silence/", "/resolve/"),
        lambda path: path.replace("msg_", "msg_0"),
        lambda path: path.replace("until=", "until=9"),
        lambda path: path.replace("until=", "until=-"),
        lambda path: path[:-1] + ("A" if path[-1] != "A" else "B"),
        lambda path: path.partition("?")[0],
        lambda path: path + "\u00e4",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_what_was_altered_does_nothing(api, links, altered, method):
    assert opened(api, altered(links["silence"]), method)[0] == 403
    assert api.get("/api/v1/silences").json()["items"] == []


def test_a_link_expires(api):
    status, text = opened(api, paths(api, VALID_S)["silence"], "POST")
    assert (status, "expired" in text) == (403, True)


def test_what_is_over_or_deleted_is_reported(api, links):
    change(api.engine, update(Incident).values(state="resolved"))
    assert "are resolved" in opened(api, links["acknowledge"])[1]
    change(api.engine, delete(Outbox))
    assert "not stored any more" in opened(api, links["acknowledge"], "POST")[1]
    assert api.reported(IncidentReview) == []


def test_links_are_the_same_in_every_try_and_of_other_keys_refused(api, links):
    (row,) = notified("opened", 1, now_unix_ns=NOON_UNIX_NS)
    ours = SignedLinks(b"k" * 32, URL)
    assert ours.added(row["id"], row["body"]) == ours.added(row["id"], row["body"])
    path = urlsplit(ours.url(LinkAction.SILENCE, row["id"], 2**33))
    assert opened(api, f"{path.path}?{path.query}", "POST")[0] == 403
    ended = notified("resolved", 2, now_unix_ns=NOON_UNIX_NS)
    assert [ours.added(one["id"], one["body"]) for one in ended] == [one["body"] for one in ended]
