"""`rankwatch.client` against the real API on a real port, and where it is away or the connection is lost."""

import json
import math
import socket
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from rankwatch.client import Client, IncidentChange, RestError
from rankwatch.client.connection import TRIES, RestConnection, ServiceEndpoint
from rankwatch_service.access.grants import Scope
from rankwatch_service.policy.control_records import decode_control
from rankwatch_service.store.models import Incident, Job
from tests.packaging.pages import ROOT, blocks
from tests.support.service.api import served_api
from tests.support.service.process import free_port
from tests.support.store.database import add, job_row, report
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


HELLO = b"event: hello\r\nid: 7\r\ndata: {}\r\n\r\n: a comment\r\n\r\n"
CHANGE = b'event: incident\nid: 8\ndata: {"id": "inc_1", "what": "opened", "new": 1}\n\n'


@contextmanager
def service_that_answers(*answers: bytes):
    """Gives each connection the next answer, where an empty one is a lost connection; yields URL and requests."""
    requests: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for answer in answers:
                connection, _ = listener.accept()
                with connection:
                    heard = b""
                    while b"\r\n\r\n" not in heard:
                        heard += connection.recv(65_536)
                    requests.append(heard)
                    connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        thread.join()


def reply(content: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    size = len(content) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\n\r\n".encode() + content


def keys(requests: list[bytes]) -> set[str]:
    lines = (line for one in requests for line in one.decode().splitlines())
    return {line for line in lines if line.lower().startswith("idempotency-key:")}


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr("rankwatch.client.connection.RETRY_S", 0.0)
    monkeypatch.setattr("rankwatch.client.connection.RECONNECT_S", 0.0)


def test_a_post_whose_connection_is_lost_is_sent_again_with_the_same_key():
    with service_that_answers(b"", b"", reply(b"{}")) as (url, requests):
        assert RestConnection(ServiceEndpoint(url, "t")).request("POST", "/x", body={}).content == b"{}"
    assert (len(requests), len(keys(requests))) == (3, 1)


def test_after_some_tries_it_is_given_up():
    with service_that_answers(*[b""] * TRIES) as (url, requests), pytest.raises(RestError, match="does not answer"):
        RestConnection(ServiceEndpoint(url, "t")).request("GET", "/x")
    assert len(requests) == TRIES


@pytest.mark.parametrize("method", ["DELETE", "PATCH", "PUT"])
def test_what_may_not_be_done_twice_is_not_sent_again(method):
    with service_that_answers(b"") as (url, requests), pytest.raises(RestError) as lost:
        RestConnection(ServiceEndpoint(url, "t")).request(method, "/x")
    assert (lost.value.status, len(requests)) == (0, 1)


def test_where_no_service_runs_the_next_step_is_said():
    with pytest.raises(RestError) as refused:
        Client(f"http://127.0.0.1:{free_port()}", "t").incidents.get("inc_1")
    assert refused.value.status == 0
    assert "`rankwatch up`" in refused.value.remedy
    assert refused.value.remedy in str(refused.value)


def test_a_file_that_ends_too_early_is_an_error():
    with service_that_answers(reply(b"half", length=8)) as (url, _), pytest.raises(RestError, match="does not answer"):
        list(RestConnection(ServiceEndpoint(url, "t")).chunks("/x"))


def test_a_watch_goes_on_where_the_connection_broke():
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    broken: list[RestError] = []
    answers = (stream + HELLO, reply(b"busy", "503 Service Unavailable"), stream + CHANGE)
    with service_that_answers(*answers) as (url, requests):
        watching = Client(url, "t").incidents.watch(["a", "b"], on_break=broken.append)
        change = next(watching)
        watching.close()
    assert (change.id, change.what) == ("inc_1", "opened")
    assert [one.decode().split()[1] for one in requests] == [
        "/api/v1/events?job=a&job=b",
        *["/api/v1/events?after=7&job=a&job=b"] * 2,
    ]
    assert [one.status for one in broken] == [503]


def test_a_page_of_something_else_is_no_answer():
    with service_that_answers(reply(b"<html>")) as (url, _), pytest.raises(RestError, match="is it the URL") as wrong:
        Client(url, "t").jobs.get("gpt")
    assert wrong.value.title == "unknown answer"


def test_names_are_escaped_and_a_path_before_the_api_stays():
    problem = json.dumps({"title": "gone", "detail": "no such job"}).encode()
    with service_that_answers(reply(problem, "404 Not Found")) as (url, requests), pytest.raises(RestError) as gone:
        Client(f"{url}/watch/", "t").jobs.get("a/b ?%é")
    assert requests[0].split()[1] == b"/watch/api/v1/jobs/a%2Fb%20%3F%25%C3%A9"
    assert (gone.value.status, gone.value.title, str(gone.value)) == (404, "gone", "no such job (404)")
