"""The limits of connections, on a server of its own with shorter time-outs and few connections."""

import gc
import socket
import ssl
import threading
import weakref
from collections import Counter

import pytest
import uvicorn

from rankwatch_service.access.budgets import BODIES, CONNECTIONS, UNREAD, Account, Budgets, Whose
from rankwatch_service.api.http import arrivals, connection
from rankwatch_service.api.http.connection import Connections, TlsServer
from rankwatch_service.clock import SystemClock
from tests.support.service.machine import make_certificate
from tests.support.service.process import until

BEGUN = b"POST / HTTP/1.1\r\nHost: x\r\n"

LONG = 8 * 1024 * 1024


async def application(scope, receive, send):
    """Answers once the body is there.

    A path of /agent/1 stands for its token, /gone for one that is valid after the client has left, /long for an answer
    of `LONG` bytes, and /piece for one in one piece.
    """
    if scope["type"] != "http":
        return
    _, whose, name = scope["path"].split("/") if scope["path"].count("/") == 2 else ("", "", "")
    if whose and not scope["state"]["connection"].charge(Account(Whose(whose), name)):
        return
    if scope["path"] == "/gone":
        while (await receive())["type"] != "http.disconnect":
            pass
        assert not scope["state"]["connection"].charge(Account(Whose.AGENT, "1"))
        return
    while (message := await receive()).get("more_body"):
        pass
    if message["type"] == "http.request":
        if scope["path"] == "/piece":
            headers = [(b"connection", b"close"), (b"content-length", b"%d" % LONG)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": bytes(LONG)})
            return
        if scope["path"] == "/long":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for _ in range(LONG // 65_536):
                await send({"type": "http.response.body", "body": bytes(65_536), "more_body": True})
        else:
            await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})


@pytest.fixture
def closed():
    return Counter()


@pytest.fixture
def tls():
    return None


@pytest.fixture
def head_s():
    return 0.5


@pytest.fixture
def budgets():
    """Twelve connections, of which strangers have three at most and people three for themselves; two unread answers."""
    return Budgets(
        SystemClock(), lambda _what, _whose: None, [CONNECTIONS._replace(most=12), UNREAD._replace(most=8), BODIES]
    )


@pytest.fixture
def connect(monkeypatch, closed, budgets, tls, head_s):
    for name, value in {"HEAD_S": head_s, "BODY_S": 0.5, "SWEEP_S": 0.1, "ANSWER_S": 0.5}.items():
        monkeypatch.setattr(connection, name, value)
    monkeypatch.setattr(connection, "_connections_max", lambda: 12)
    connections = Connections(lambda reason: closed.update([reason]), budgets)
    config = uvicorn.Config(
        application, port=0, http=connections.protocol, lifespan="off", log_level="error", timeout_graceful_shutdown=1
    )
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


def asking(path: bytes) -> bytes:
    return BEGUN.replace(b"/ ", path + b" ") + b"Content-Length: 0\r\n\r\n"


def is_closed(one: socket.socket) -> bool:
    """After all that it may have been answered."""
    try:
        while one.recv(65_536):
            pass
    except (ConnectionResetError, ssl.SSLError):
        pass
    return True


def test_the_oldest_connection_without_a_token_makes_room_and_none_with_one(connect, closed):
    known = connect(asking(b"/agent/1"))
    assert known.recv(1000).startswith(b"HTTP/1.1 204 ")
    first, *_ = [connect() for _ in range(4)]
    assert first.recv(1000).startswith(b"HTTP/1.1 503 ")
    known.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert known.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert closed["crowded"] == 1


def test_a_lost_connection_is_freed_without_a_garbage_collection(monkeypatch, connect):
    alive = weakref.WeakSet()

    class Kept(connection.ClientConnection):
        def __init__(self, *how, **more):
            super().__init__(*how, **more)
            alive.add(self)

    monkeypatch.setattr(connection, "ClientConnection", Kept)
    gc.disable()
    try:
        answered = connect(asking(b"/agent/1"))
        assert answered.recv(1000).startswith(b"HTTP/1.1 204 ")
        half_sent = connect(BEGUN + b"Content-Length: 9\r\n\r\nhalf")
        until("both have begun", lambda: len(alive) == 2)
        answered.close()
        half_sent.close()
        newest = connect()  # the one that was accepted last is known until the next comes
        until("both are freed", lambda: len(alive) == 1)
        newest.close()
    finally:
        gc.enable()


def test_who_connects_without_a_pause_is_begun_at_a_pace_and_others_are_served(monkeypatch, closed, request):
    for name, value in {"BEGUN_AT_ONCE_MAX": 2, "BEGUN_PER_S": 50.0}.items():
        monkeypatch.setattr(arrivals, name, value)
    connect = request.getfixturevalue("connect")
    open_already = connect(asking(b"/agent/1"))
    assert open_already.recv(1000).startswith(b"HTTP/1.1 204 ")
    for _ in range(200):
        connect().close()
    open_already.sendall(BEGUN + b"Content-Length: 0\r\n\r\n")
    assert open_already.recv(1000).startswith(b"HTTP/1.1 204 ")
    newcomer = connect(asking(b"/agent/2"))
    assert newcomer.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert closed["waiting"] > 0


def test_whoever_has_a_token_may_connect_anew_for_each_request(monkeypatch, request):
    for name, value in {"BEGUN_AT_ONCE_MAX": 2, "BEGUN_PER_S": 0.01}.items():  # the third would wait for a minute
        monkeypatch.setattr(arrivals, name, value)
    connect = request.getfixturevalue("connect")
    for _ in range(20):
        with connect(asking(b"/agent/1")) as one:
            assert one.recv(1000).startswith(b"HTTP/1.1 204 ")


@pytest.mark.parametrize(("limit", "fits"), [(256, False), (1_024, True), (4_096, True), (20_000, True)])
def test_connections_and_those_that_wait_leave_descriptors_for_the_rest(monkeypatch, limit, fits):
    monkeypatch.setattr(connection.resource, "getrlimit", lambda _which: (limit, limit))
    monkeypatch.setattr(connection.resource, "setrlimit", lambda _which, _limits: None)
    most = connection._connections_max()
    waiting = most * arrivals.WAITING_MAX // connection.CONNECTIONS_MAX
    assert most >= 1
    assert (most + waiting + connection.FILES_KEPT <= limit) == fits


def test_a_malformed_request_is_answered_with_a_problem(connect, closed):
    answer = connect(b"what is this\r\n\r\n").recv(1000)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"application/problem+json" in answer
    assert closed == {"malformed": 1}


def test_a_token_that_holds_all_that_is_free_makes_room_for_others_and_people_have_a_part_of_it(connect, closed):
    def ask(path: bytes) -> socket.socket:
        one = connect(asking(path))
        assert one.recv(1000).startswith(b"HTTP/1.1 204 "), path
        return one

    hostile = [ask(b"/agent/hostile") for _ in range(9)]
    people = [ask(b"/person/ann") for _ in range(3)]
    honest = [ask(b"/agent/honest") for _ in range(4)]
    assert all(is_closed(one) for one in hostile[:4]), "the oldest"
    for one in [*hostile[4:], *people, *honest]:
        one.sendall(asking(b"/"))
        assert one.recv(1000).startswith(b"HTTP/1.1 204 ")
    assert closed == {"crowded": 4}


def test_a_client_that_is_gone_before_its_token_is_known_holds_nothing(connect, closed, budgets):
    for _ in range(12):
        connect(asking(b"/gone")).close()
    until("they are gone", lambda: sum(budgets.held(CONNECTIONS, whose) for whose in Whose) == 0, 10)
    assert connect(asking(b"/agent/1")).recv(1000).startswith(b"HTTP/1.1 204 ")
    assert budgets.held(CONNECTIONS, Whose.AGENT) == 1


def test_an_answer_that_nobody_reads_is_closed_in_time_and_one_that_is_read_slowly_ends(connect, closed):
    unread, slow = connect(asking(b"/long")), connect(asking(b"/long"))
    received = 0
    for _ in range(40):  # within 2 s, four times as long as the other has
        received += len(slow.recv(256 * 1024))
        threading.Event().wait(0.05)
    while data := slow.recv(1 << 20):
        received += len(data)
        if received > LONG:
            break
    assert received > LONG
    assert is_closed(unread)
    assert closed == {"slow_answer": 1}


def test_an_answer_in_one_piece_after_which_the_connection_ends_does_not_keep_it_open(connect, closed, budgets):
    unread, read = connect(asking(b"/piece")), connect(asking(b"/piece"))
    received = sum(iter(lambda: len(read.recv(65_536)), 0))
    assert received > LONG
    until("nobody waits", lambda: budgets.held(CONNECTIONS, Whose.ANONYMOUS) == 0, 10)
    assert is_closed(unread)
    assert closed == {"slow_answer": 1}


def test_of_strangers_answers_that_nobody_reads_a_few_are_kept(connect, closed, budgets, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 60.0)
    unread = [connect(asking(b"/long")) for _ in range(3)]
    until("one has made room", lambda: closed["unread"] == 1, 10)
    assert is_closed(unread[0])
    assert budgets.held(UNREAD, Whose.ANONYMOUS) == 2


def test_answers_that_nobody_reads_are_closed_before_those_that_are_served(connect, closed, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 60.0)
    unread = connect(asking(b"/long"))
    until("it waits", lambda: unread.recv(1, socket.MSG_PEEK), 10)
    for _ in range(3):
        assert connect(asking(b"/")).recv(1000).startswith(b"HTTP/1.1 204 ")
    assert is_closed(unread)
    assert closed == {"crowded": 1}


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

    @pytest.mark.parametrize("path", [b"/long", b"/piece"])
    def test_an_answer_that_nobody_reads_is_closed_in_time(self, secured, closed, budgets, path):
        one = secured()
        one.sendall(asking(path))
        until("it is gone", lambda: budgets.held(CONNECTIONS, Whose.ANONYMOUS) == 0, 10)
        assert set(closed) <= {"slow_answer"}, "or it did not agree to the end in time"
        assert is_closed(one)

    @pytest.mark.parametrize("head_s", [5.0])
    def test_a_slow_head_is_answered_within_tls(self, secured, closed):
        assert secured().recv(100).startswith(b"HTTP/1.1 408 ")
        assert closed == {"slow_head": 1}
