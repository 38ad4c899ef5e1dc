"""The limits of connections, on a server of its own with shorter time-outs."""

import socket
import threading
from collections import Counter

import pytest
import uvicorn

from rankwatch_service.api.http import connection
from rankwatch_service.api.http.connection import Connections
from tests.support.service.process import until

BEGUN = b"POST / HTTP/1.1\r\nHost: x\r\n"


async def application(scope, receive, send):
    """Answers once the body is there; a path of /token stands for a valid one."""
    if scope["type"] != "http":
        return
    if scope["path"] == "/token":
        scope["state"]["connection"].authenticated()
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


@pytest.fixture
def closed():
    return Counter()


@pytest.fixture
def connect(monkeypatch, closed):
    for name, value in {"HEAD_S": 0.5, "BODY_S": 0.5, "SWEEP_S": 0.1, "ANONYMOUS_PER_ADDRESS_MAX": 3}.items():
        monkeypatch.setattr(connection, name, value)
    connections = Connections(lambda reason: closed.update([reason]))
    config = uvicorn.Config(application, port=0, http=connections.protocol, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    until("the server", lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    opened = []

    def connect(sent: bytes = b"") -> socket.socket:
        opened.append(socket.create_connection(("127.0.0.1", port), timeout=30))
        opened[-1].sendall(sent)
        return opened[-1]

    yield connect
    for one in opened:
        one.close()
    server.should_exit = True
    thread.join()


def test_a_slow_head_and_a_slow_body_are_answered_408_and_counted(connect, closed):
    for sent in (b"", BEGUN, BEGUN + b"Content-Length: 9\r\n\r\nhalf"):
        assert connect(sent).recv(100).startswith(b"HTTP/1.1 408 ")
    assert closed == {"slow_head": 2, "slow_body": 1}


def test_a_connection_may_rest_between_two_requests(connect, closed):
    one = connect(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert one.recv(1000).startswith(b"HTTP/1.1 204 ")
    one.settimeout(1.5)
    with pytest.raises(TimeoutError):
        one.recv(1)
    one.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert one.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert not closed


def test_the_oldest_connection_without_a_token_makes_room_and_none_with_one(connect, closed):
    known = connect(BEGUN.replace(b"/ ", b"/token ") + b"Content-Length: 0\r\n\r\n")
    assert known.recv(1000).startswith(b"HTTP/1.1 204 ")
    first, *_ = [connect() for _ in range(4)]
    assert first.recv(1000).startswith(b"HTTP/1.1 503 ")
    known.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert known.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert closed["crowded"] == 1


def test_a_malformed_request_is_answered_with_a_problem(connect, closed):
    answer = connect(b"what is this\r\n\r\n").recv(1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer
    assert closed == {"malformed": 1}
