"""`rankwatch.client` where the service is away, or the connection is lost before the reply."""

import json
import socket
import threading
from contextlib import contextmanager

import pytest

from rankwatch.client import Client, RestError
from rankwatch.client.connection import TRIES, RestConnection, ServiceEndpoint
from tests.support.service.process import free_port

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
