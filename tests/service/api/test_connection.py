"""The limits of connections, on a server of its own with shorter time-outs."""

import socket
import ssl
import threading
from collections import Counter

import pytest
import uvicorn

from rankwatch_service.api.http import connection
from rankwatch_service.api.http.connection import Connections, TlsServer
from rankwatch_service.api.http.gate import TrustedProxies
from tests.support.service.certificates import make_certificate
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
def proxies():
    return TrustedProxies()


@pytest.fixture
def tls():
    return None


@pytest.fixture
def head_s():
    return 0.5


@pytest.fixture
def connect(monkeypatch, closed, proxies, tls, head_s):
    for name, value in {"HEAD_S": head_s, "BODY_S": 0.5, "SWEEP_S": 0.1, "ANONYMOUS_PER_ADDRESS_MAX": 3}.items():
        monkeypatch.setattr(connection, name, value)
    connections = Connections(lambda reason: closed.update([reason]), proxies)
    config = uvicorn.Config(application, port=0, http=connections.protocol, lifespan="off", log_level="error")
    server, listener = TlsServer(config, connections, tls), socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    until("the server", lambda: server.started)
    opened = []

    def connect(sent: bytes = b"") -> socket.socket:
        opened.append(socket.create_connection(listener.getsockname(), timeout=30))
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


@pytest.mark.parametrize("proxies", [TrustedProxies("127.0.0.0/8")])
def test_the_connections_of_a_trusted_proxy_are_those_of_many_clients(connect, closed):
    opened = [connect() for _ in range(6)]
    for one in opened:
        one.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert all(one.recv(1000).startswith(b"HTTP/1.1 204 ") for one in opened)
    assert not closed


class TestTls:
    """The same limits hold from the first byte of a handshake."""

    @pytest.fixture
    def files(self, tmp_path):
        make_certificate(tmp_path / "certificate.pem", tmp_path / "key.pem")
        return tmp_path / "certificate.pem", tmp_path / "key.pem"

    @pytest.fixture
    def head_s(self):
        return 60.0

    @pytest.fixture
    def tls(self, files):
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*files)
        return lambda: context

    @pytest.fixture
    def secured(self, connect, files):
        """A connection whose handshake is over."""
        context = ssl.create_default_context(cafile=str(files[0]))
        return lambda: context.wrap_socket(connect(), server_hostname="127.0.0.1")

    def test_requests_are_answered_one_after_the_other(self, secured, closed):
        one = secured()
        for _ in range(2):
            one.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
            assert one.recv(1000).startswith(b"HTTP/1.1 204 ")
        one.close()
        assert not closed

    def test_a_request_that_comes_with_the_end_of_the_handshake_is_answered(self, connect, files):
        context = ssl.create_default_context(cafile=str(files[0]))
        incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        one, plain = context.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1"), connect()
        while True:
            try:
                one.do_handshake()
                break
            except ssl.SSLWantReadError:
                plain.sendall(outgoing.read())
                incoming.write(plain.recv(65_536))
        one.write(BEGUN + b"Content-Length: 0\r\n\r\n")
        plain.sendall(outgoing.read())  # the last message of the handshake, and the request
        answer = b""
        while not answer:
            incoming.write(plain.recv(65_536))
            try:
                answer = one.read(1000)
            except ssl.SSLWantReadError:
                continue
        assert answer.startswith(b"HTTP/1.1 204 ")

    @pytest.mark.parametrize("head_s", [0.5])
    def test_who_does_not_shake_hands_is_closed_in_time_and_gets_no_plain_text(self, connect, closed):
        for begun in (b"", b"\x16\x03\x01"):
            assert connect(begun).recv(100) == b""
        until("both are counted", lambda: closed.total() == 2, 10)
        assert set(closed) <= {"slow_head", "handshake"}

    def test_plain_http_is_refused(self, connect, closed):
        one = connect(BEGUN + b"\r\n")
        assert not one.recv(100).startswith(b"HTTP")
        until("it is counted", lambda: closed == {"handshake": 1}, 10)

    def test_half_open_handshakes_make_room_for_the_newest(self, connect, secured, closed):
        first, *_ = [connect() for _ in range(3)]
        one = secured()
        one.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
        assert one.recv(1000).startswith(b"HTTP/1.1 204 ")
        assert first.recv(100) == b""
        assert closed["crowded"] == 1

    @pytest.mark.parametrize("head_s", [5.0])
    def test_a_slow_head_is_answered_within_tls(self, secured, closed):
        assert secured().recv(100).startswith(b"HTTP/1.1 408 ")
        assert closed == {"slow_head": 1}
