"""Links in messages: they acknowledge or silence once, for whoever got the message; to open one changes nothing."""

import json
from urllib.parse import urlsplit

import pytest
from sqlalchemy import delete, insert, update

from rankwatch_service.access.secret_key import load_secret_key
from rankwatch_service.notify.message_links import PURPOSE, VALID_S, LinkAction, SignedLinks
from rankwatch_service.policy.control_records import Judgement, SilenceSet, decode_control
from rankwatch_service.policy.notification import iso_time
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Incident, Outbox
from rankwatch_service.store.rows import outbox_row
from tests.support.values.incidents import NOON_UNIX_NS, incident_row, notified

URL = "https://w.example"


def paths(api, late_s=1):
    """Paths of the links of a message that is so old, about an incident with a hostile summary."""
    hostile = {"summary": "<script>alert(1)</script>"}
    [row] = [outbox_row(one) for one in notified("opened", 1, now_unix_ns=NOON_UNIX_NS, **hostile)]
    message = json.loads(row["body"]) | {"timestamp": iso_time(api.clock.unix_ns() - late_s * 10**9)}
    with write(api.engine) as connection:
        connection.execute(insert(Incident).values(**incident_row(**hostile)))
        connection.execute(insert(Outbox).values(**row))
    key = load_secret_key(api.settings, api.engine, api.clock).derive(PURPOSE)
    urls = json.loads(SignedLinks(key, URL).added(row["id"], json.dumps(message).encode()))["data"]["links"]
    return {action: urls[action].removeprefix(URL) for action in LinkAction}


@pytest.fixture
def links(api):
    return paths(api)


def records(api, kind):
    found = [decode_control(one.value) for one in api.controls.read(0, 1_000)]
    return [one for one in found if isinstance(one, kind)]


def opened(api, path, method="GET"):
    answer = api.ask(method, path, token="")
    return answer.status_code, answer.text


def test_to_open_a_link_asks_and_changes_nothing(api, links):
    for path in links.values():
        status, text = opened(api, path)
        assert (status, "&lt;script&gt;" in text, "<script" in text) == (200, True, False)
    assert '<form method="post"><button class="primary">Acknowledge</button>' in opened(api, links["acknowledge"])[1]
    assert records(api, Judgement) == records(api, SilenceSet) == []


def test_the_form_acknowledges_once(api, links):
    assert opened(api, links["acknowledge"], "POST")[0] == 200
    for method in ("POST", "GET"):
        status, text = opened(api, links["acknowledge"], method)
        assert (status, "has been used" in text) == (403, True)
    (record,) = records(api, Judgement)
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
    assert records(api, SilenceSet) == []


def test_a_link_expires(api):
    status, text = opened(api, paths(api, VALID_S)["silence"], "POST")
    assert (status, "expired" in text) == (403, True)


def test_what_is_over_or_deleted_is_told(api, links):
    with write(api.engine) as connection:
        connection.execute(update(Incident).values(state="resolved"))
    assert "is over" in opened(api, links["acknowledge"])[1]
    with write(api.engine) as connection:
        connection.execute(delete(Outbox))
    assert "not stored any more" in opened(api, links["acknowledge"], "POST")[1]
    assert records(api, Judgement) == []


def test_links_are_the_same_in_every_try_and_of_other_keys_refused(api, links):
    (row,) = [outbox_row(one) for one in notified("opened", 1, now_unix_ns=NOON_UNIX_NS)]
    ours = SignedLinks(b"k" * 32, URL)
    assert ours.added(row["id"], row["body"]) == ours.added(row["id"], row["body"])
    path = urlsplit(ours.url(LinkAction.SILENCE, row["id"], 2**33))
    assert opened(api, f"{path.path}?{path.query}", "POST")[0] == 403
    ended = [outbox_row(one) for one in notified("resolved", 2, now_unix_ns=NOON_UNIX_NS)]
    assert [ours.added(one["id"], one["body"]) for one in ended] == [one["body"] for one in ended]
