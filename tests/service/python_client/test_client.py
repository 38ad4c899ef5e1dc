"""`rankwatch.client` against the real API on a real port."""

import math
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rankwatch.client import Client, IncidentChange, RestError
from rankwatch_service.access.scopes import Scope
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.store.models import Incident, Job
from tests.packaging.pages import ROOT, blocks
from tests.support.service.api import served_api
from tests.support.store.rows import add, job_row, report
from tests.support.values.incidents import NOON_UNIX_NS, incident_row

NOON = datetime.fromtimestamp(NOON_UNIX_NS // 10**9, UTC)


@pytest.fixture
def api(tmp_path):
    with served_api(tmp_path) as (api, url):
        api.url = url
        report(api.engine, "gpt", api.clock.unix_ns())
        yield api


@pytest.fixture
def client(api):
    return Client(api.url, api.admin)


def insert_incidents(api, *rows):
    add(api.engine, Incident, *[incident_row(**{"job": "gpt", **row}) for row in rows])


@pytest.fixture
def job(api):
    """The job "gpt", which was seen just now."""
    now = api.clock.unix_ns()
    add(api.engine, Job, job_row("gpt", first_seen_unix_ns=now, last_seen_unix_ns=now))


def test_a_list_is_read_over_all_its_pages(api, client, monkeypatch):
    monkeypatch.setattr("rankwatch.client.client.PAGE_ITEMS", 2)
    insert_incidents(api, *({"id": f"inc_{n}", "episode": n} for n in range(5)))
    assert {one.id for one in client.incidents.list()} == {f"inc_{n}" for n in range(5)}


def test_every_filter_of_incidents_reaches_the_service(api, client):
    mine = {"id": "inc_1", "kind": "hang", "severity": "critical", "ranks": [3], "hosts": ["node-a"], "devices": ["G"]}
    insert_incidents(api, mine, {"id": "inc_2", "ranks": [5], "hosts": ["node-b"], "devices": ["H"]})
    one = client.incidents.get("inc_1")
    filters = {"job": "gpt", "state": ["open", "acknowledged"], "kind": "hang", "severity": "critical", "rank": [3, 4]}
    filters |= {"host": "node-a", "device": "G", "attempt": one.attempt, "search": "inc_1"}
    filters |= {"since": NOON - timedelta(hours=1), "until": NOON + timedelta(hours=1)}
    for name, value in filters.items():
        assert "inc_1" in [one.id for one in client.incidents.list(**{name: value})], name
    for name, value in {"kind": "slowdown", "rank": 9, "host": ("x", "y"), "until": NOON - timedelta(days=1)}.items():
        assert list(client.incidents.list(**{name: value})) == [], name
    assert list(client.incidents.list(project="none of these")) == []


def test_times_are_datetimes_and_numbers_may_be_infinite(api, client):
    insert_incidents(api, {"id": "inc_1", "score": math.inf})
    one = client.incidents.get("inc_1")
    assert one.detected_at == NOON
    assert (one.score, one.ranks, one.hosts) == (math.inf, [3], ["node-a"])


def test_what_people_do_with_an_incident_reaches_stream(api, client):
    insert_incidents(api, {"id": "inc_1"})
    assert client.incidents.acknowledge("inc_1", "mine").id == "inc_1"
    assert client.incidents.resolve("inc_1").id == "inc_1"
    assert client.incidents.feedback("inc_1", "noise").id == "inc_1"
    assert [(one.answer, one.person != "") for one in client.incidents.get("inc_1").feedback] == [("noise", True)]
    assert [decode_control(one.value).what for one in api.controls.read(0, 1_000)] == ["acknowledged", "resolved"]


def test_changes_of_incidents_are_watched(api, client):
    insert_incidents(api, {"id": "inc_1"})
    seen = []
    thread = threading.Thread(target=lambda: seen.append(next(client.incidents.watch(job="gpt"))))
    thread.start()
    while thread.is_alive():  # what comes before the stream has begun is not seen
        client.incidents.feedback("inc_1", "useful")
        client.incidents.feedback("inc_1", "noise")
        thread.join(0.2)
    (change,) = seen
    assert isinstance(change, IncidentChange)
    assert (change.id, change.job, change.what) == ("inc_1", "gpt", "feedback")


def test_a_command_is_requested_cancelled_and_waited_for(api, client):
    command = client.commands.request("gpt", "pause", reason="look")
    assert (command.job, command.action, command.reason) == ("gpt", "pause", "look")
    with pytest.raises(TimeoutError, match=f"{command.id} is still .* after 0 s"):
        client.commands.wait(command.id, timeout_s=0.0)
    assert client.commands.cancel(command.id).state == "cancelled"
    assert client.commands.wait(command.id).state == "cancelled"
    assert [one.id for one in client.commands.list(job="gpt", action="pause", state="cancelled")] == [command.id]
    assert list(client.commands.list(since=datetime.now(UTC) + timedelta(days=1))) == []


def test_a_job_is_edited_unless_somebody_else_has(client, job):
    (name,) = [one.name for one in client.jobs.list()]
    read = client.jobs.get(name)
    edited = client.jobs.edit(read, owner="ann")
    assert (edited.owner, edited.etag != read.etag) == ("ann", True)
    with pytest.raises(RestError) as refused:
        client.jobs.edit(read, owner="bob")
    assert refused.value.status == 412
    assert client.jobs.get(name).owner == "ann"


def test_jobs_are_filtered(client, job):
    assert [one.name for one in client.jobs.list(name=["gpt", "other"])] == ["gpt"]
    assert list(client.jobs.list(project="none of these")) == []
    assert list(client.jobs.list(until=NOON - timedelta(days=1))) == []


def test_a_silence_is_added_listed_and_expires(client):
    ends_at = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    silence = client.silences.add("being replaced", ends_at, job="gpt", kind="hang")
    assert (silence.job, silence.kind, silence.ends_at) == ("gpt", "hang", ends_at)
    assert [one.id for one in client.silences.list(active=True)] == [silence.id]
    client.silences.expire(silence.id)
    assert list(client.silences.list(active=True)) == []


def test_receivers_are_listed(api, client):
    api.post("/api/v1/receivers", {"name": "pager", "url": "https://hooks.example/x"})
    assert [(one.name, one.type, one.enabled) for one in client.receivers.list()] == [("pager", "webhook", True)]


def test_a_refusal_has_what_the_problem_says(api, client):
    with pytest.raises(RestError) as refused:
        client.incidents.get("inc_none")
    assert (refused.value.status, refused.value.title != "", "inc_none" in refused.value.detail) == (404, True, True)
    with pytest.raises(RestError) as refused:
        Client(api.url, api.token(Scope.READ)).commands.request("gpt", "pause")
    assert refused.value.status == 403
    with pytest.raises(RestError, match="severity"):
        list(client.incidents.list(severity="awful"))


def test_the_example_of_the_page_runs(api, monkeypatch, capsys):
    insert_incidents(api, {"id": "inc_1", "severity": "critical"})
    (example,) = [text for _, text in blocks(Path(ROOT, "docs", "operations.md"), "python") if "Client()" in text]
    monkeypatch.setenv("RANKWATCH_URL", api.url)
    monkeypatch.setenv("RANKWATCH_TOKEN", api.admin)
    monkeypatch.setattr("rankwatch.client.client.POLL_S", 0.0)
    exec(example.replace("timeout_s=60.0", "timeout_s=0.1"), {})
    assert capsys.readouterr().out.startswith("gpt ")
    assert len(list(Client().commands.list(job="gpt"))) == 1
    assert len(list(Client().silences.list(active=True))) == 1
