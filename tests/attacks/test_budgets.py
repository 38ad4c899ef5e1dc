"""Whoever takes all that is scarce keeps nobody else out: neither by address, nor by token, nor by not reading."""

import os
import socket
import threading
from collections.abc import Callable
from itertools import cycle
from typing import Any

import httpx2
import pytest

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.signed import Purpose
from rankwatch_service.access.budgets import CONNECTIONS, PART, STREAMS, UNREAD, Limit, Whose
from rankwatch_service.access.grants import Scope
from rankwatch_service.api.http import connection
from rankwatch_service.api.http.problem import not_found
from rankwatch_service.api.http.turns import TURNS_MAX
from rankwatch_service.api.routes import steps
from tests.support.service.api import Api, served_api
from tests.support.service.process import until

pytestmark = [pytest.mark.integration, pytest.mark.ci]

ROOM, STREAMS_ROOM = 64, 16
ADDRESSES = [f"127.0.0.{number}" for number in range(2, 7)]


class Crowded:
    """An api with room for `ROOM` connections and `STREAMS_ROOM` event streams, and whoever wants all of them."""

    def __init__(self, api: Api, url: str) -> None:
        self.api, self.url = api, url
        self.opened: list[socket.socket] = []
        self.budgets = api.app.state.context.budgets
        self.budgets.shrink(STREAMS, STREAMS_ROOM)
        self.tokens = {scope: api.token(scope) for scope in Scope}

    def connect(self, sent: bytes, address: str = "127.0.0.1") -> socket.socket:
        host, port = self.url.rpartition("/")[2].split(":")
        self.opened.append(socket.create_connection((host, int(port)), 30, source_address=(address, 0)))
        self.opened[-1].sendall(sent)
        return self.opened[-1]

    def asking(self, token: str, path: str = "/api/v1/jobs", **headers: str) -> bytes:
        named = headers | ({"authorization": f"Bearer {token}"} if token else {})
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        return f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\n{lines}\r\n".encode()

    def answer(self, one: socket.socket, request: bytes) -> bytes:
        """The head of the answer, if the connection is still open."""
        try:
            one.sendall(request)
            return one.recv(65_536)[:12]
        except (ConnectionResetError, BrokenPipeError):
            return b""

    def ask(self, method: str, path: str, token: str, **how: Any) -> httpx2.Response:
        """The answer to somebody new."""
        headers = {"Authorization": f"Bearer {token}"}
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=30.0, headers=headers) as client:
            return client.request(method, path, **how)

    def let_in(self, scope: Scope, **headers: str) -> bool:
        """Whether somebody new with a token of this scope is answered, at the first try."""
        path = "/api/v1/agents/view" if scope == Scope.INGEST else "/api/v1/jobs"
        headers |= {"Authorization": f"Bearer {self.tokens[scope]}"}
        with httpx2.Client(base_url=self.url, trust_env=False, timeout=30.0, headers=headers) as client:
            return client.get(path).status_code in (200, 405)

    def agent(self, token: str, job: str, host: str) -> Callable[[], bytes]:
        """Requests for the order stream of an agent that enrols."""
        reported = self.ask("POST", "/api/v1/agents/enrol", token, json={"job": job, "host": host}).json()
        identity = AgentIdentity(reported["agent"], bytes.fromhex(reported["secret"]))

        def listen() -> bytes:
            signed = identity.sign(Purpose.LISTEN, os.urandom(wire.LISTEN_BYTES)).hex()
            return self.asking(token, f"/api/v1/agents/orders?job={job}&host={host}&boot=b&signed={signed}")

        return listen

    def stream(self, request: bytes) -> tuple[bytes, socket.socket]:
        """The status of an event stream, and its connection, from which its head was read."""
        one = self.connect(request)
        return one.recv(1_000)[:12], one

    def held(self, whose: Whose, limit: Limit = CONNECTIONS) -> int:
        return self.budgets.held(limit, whose)

    def counted(self, line: str) -> float:
        text = self.ask("GET", "/metrics", self.tokens[Scope.ADMIN]).text
        return sum(float(one.rpartition(" ")[2]) for one in text.splitlines() if one.startswith(line))


def is_open(one: socket.socket) -> bool:
    """Whether the service has not closed a connection, after all that it has sent."""
    one.setblocking(False)
    try:
        while one.recv(65_536):
            pass
    except BlockingIOError:
        return True
    except ConnectionResetError:
        pass
    return False


@pytest.fixture
def settings() -> dict[str, str]:
    return {}


@pytest.fixture
def crowded(tmp_path, monkeypatch, settings):
    monkeypatch.setattr(connection, "_connections_max", lambda: ROOM)
    with served_api(tmp_path, **settings) as (api, url):
        crowded = Crowded(api, url)
        yield crowded
        for one in crowded.opened:
            one.close()


@pytest.fixture
def page(crowded: Crowded) -> bytes:
    """Requests for 5 MB that need no token."""
    return crowded.asking("", "/static/x/pages/job.js") * 300


BODY = b"POST /api/v1/session HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 9\r\n\r\n{"
STRANGERS: dict[str, Callable[[bytes], bytes]] = {
    "unread": lambda page: page,
    "half a head": lambda _page: b"GET / HTTP/1.1\r\nhost:",
    "half a body": lambda _page: BODY,
    "answered and kept": lambda _page: b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n",
}


@pytest.mark.parametrize("how", STRANGERS)
def test_strangers_of_many_addresses_keep_nobody_out(crowded, page, how):
    for address, _ in zip(cycle(ADDRESSES), range(2 * ROOM)):
        crowded.connect(STRANGERS[how](page), address)
    assert all(crowded.let_in(scope) for scope in (Scope.ADMIN, Scope.INGEST, Scope.READ))
    assert crowded.held(Whose.ANONYMOUS) <= ROOM // PART
    assert crowded.counted('rankwatch_budget_refused_total{what="connections",whose="anonymous"}') > ROOM


def test_an_answer_that_nobody_reads_is_given_up_and_one_that_is_read_is_whole(crowded, page, monkeypatch):
    monkeypatch.setattr(connection, "ANSWER_S", 2.0)
    crowded.connect(page)
    until("it waits", lambda: crowded.held(Whose.ANONYMOUS, UNREAD) == 1, 30)
    with httpx2.Client(base_url=crowded.url, trust_env=False, timeout=30.0) as client:
        assert len(client.get("/static/x/pages/job.js").content) > 10_000
    until("it was given up", lambda: crowded.held(Whose.ANONYMOUS) == 0, 30)
    assert crowded.counted('rankwatch_connections_closed_total{reason="slow_answer"}') == 1


@pytest.mark.parametrize("settings", [{"trusted_proxies": "127.0.0.1"}])
@pytest.mark.parametrize("sent", ["unread", "answered and kept"])
def test_behind_a_proxy_the_client_that_it_names_keeps_nobody_out(crowded, sent):
    path, times = ("/static/x/pages/job.js", 300) if sent == "unread" else ("/livez", 1)
    for number in range(2 * ROOM):
        forwarded = {"x-forwarded-for": f"2001:db8:0:1::{number:x}"}  # of one /64
        crowded.connect(crowded.asking("", path, **forwarded) * times)
    kept = crowded.connect(b"")
    other = crowded.asking("", "/livez", **{"x-forwarded-for": "192.0.2.9"})
    assert crowded.answer(kept, other) == b"HTTP/1.1 200"
    assert all(crowded.let_in(scope, **{"X-Forwarded-For": "192.0.2.8"}) for scope in (Scope.ADMIN, Scope.INGEST))
    crowded.connect(crowded.asking("", path, **{"x-forwarded-for": "2001:db8:0:1::1"}) * times)
    assert is_open(kept), "who holds one keeps it"


@pytest.mark.parametrize("scope", [Scope.INGEST, Scope.ALERT, Scope.READ, Scope.OPERATE, Scope.COMMAND])
def test_a_token_that_opens_all_connections_and_keeps_them_alive_keeps_nobody_out(crowded, scope):
    asking = crowded.asking(crowded.tokens[scope])
    honest = {one: crowded.connect(crowded.asking(crowded.tokens[one])) for one in (Scope.ADMIN, Scope.INGEST)}
    assert all(one.recv(65_536) for one in honest.values())
    for _ in range(3):
        for _ in range(ROOM):
            crowded.answer(crowded.connect(b""), asking)
        for one in crowded.opened[-ROOM:]:
            crowded.answer(one, asking)
        assert all(crowded.let_in(one) for one in {Scope.ADMIN, Scope.INGEST, Scope.READ} - {scope})
    for one, kept in honest.items():
        if one != scope:
            assert is_open(kept), "nobody has closed it for others"


def test_the_sessions_of_a_person_are_one_account(crowded):
    token = crowded.tokens[Scope.READ]
    for number in range(2 * ROOM):
        with httpx2.Client(base_url=crowded.url, trust_env=False, headers={"Sec-Fetch-Site": "same-origin"}) as client:
            logged_in = client.post("/api/v1/session", json={"token": token})
            cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
        assert logged_in.status_code == 201
        assert crowded.answer(crowded.connect(b""), crowded.asking("", cookie=cookie)) == b"HTTP/1.1 200", number
    assert all(crowded.let_in(one) for one in (Scope.ADMIN, Scope.INGEST))
    assert crowded.held(Whose.PERSON) <= ROOM


OK, REFUSED, FULL = b"HTTP/1.1 200", b"HTTP/1.1 403", b"HTTP/1.1 503"
EVENTS = "/api/v1/events"


def test_a_token_has_no_order_stream_without_an_agent_and_an_agent_has_one(crowded):
    thief, honest = (crowded.api.token(Scope.INGEST) for _ in range(2))
    unsigned = crowded.asking(thief, "/api/v1/agents/orders?job=empty&host=h&boot=b")
    assert {crowded.stream(unsigned)[0] for _ in range(2 * STREAMS_ROOM)} == {REFUSED}
    listen = crowded.agent(thief, "mine", "h")
    assert {crowded.stream(listen())[0] for _ in range(2 * STREAMS_ROOM)} == {OK}
    until("one is left", lambda: crowded.held(Whose.AGENT, STREAMS) == 1, 30)
    assert crowded.stream(crowded.agent(honest, "gpt", "node-1")())[0] == OK
    assert crowded.stream(crowded.asking(crowded.tokens[Scope.READ], EVENTS))[0] == OK


def test_a_token_with_many_agents_leaves_the_agents_of_others_and_people_their_streams(crowded):
    thief, honest = (crowded.api.token(Scope.INGEST) for _ in range(2))
    _, first = crowded.stream(crowded.agent(honest, "gpt", "node-0")())
    for number in range(2 * STREAMS_ROOM):
        crowded.stream(crowded.agent(thief, "mine", f"h{number}")())
    assert crowded.held(Whose.AGENT, STREAMS) == STREAMS_ROOM - STREAMS_ROOM // PART
    for number in range(1, 6):  # as many as the other may have
        assert crowded.stream(crowded.agent(honest, "gpt", f"node-{number}")())[0] == OK
    for scope in (Scope.READ, Scope.ADMIN):
        assert crowded.stream(crowded.asking(crowded.tokens[scope], EVENTS))[0] == OK
    assert is_open(first)
    assert crowded.counted('rankwatch_budget_refused_total{what="streams",whose="agent"}') >= STREAMS_ROOM


def test_many_streams_of_one_person_leave_others_theirs(crowded):
    hostile = crowded.asking(crowded.tokens[Scope.READ], EVENTS)
    statuses = [crowded.stream(hostile)[0] for _ in range(2 * STREAMS_ROOM)]
    assert statuses == [OK] * STREAMS_ROOM + [FULL] * STREAMS_ROOM
    assert crowded.stream(crowded.asking(crowded.tokens[Scope.ADMIN], EVENTS))[0] == OK
    honest = crowded.agent(crowded.tokens[Scope.INGEST], "gpt", "node-1")
    assert crowded.stream(honest())[0] == OK


def test_for_whoever_has_gone_away_nothing_is_worked_on(crowded, monkeypatch):
    asked, answer = [], threading.Event()

    def metrics_of(_context: Any, job: str) -> None:
        asked.append(job)
        answer.wait(30.0)
        raise not_found("job", job)

    monkeypatch.setattr(steps, "_require_job", metrics_of)
    requests = [crowded.asking(crowded.tokens[Scope.READ], f"/api/v1/jobs/{n}/metrics") for n in range(12)]
    first = crowded.connect(requests[0])
    until("the first is worked on", lambda: asked == ["0"], 30)
    opened = [crowded.connect(request) for request in requests[1:]]
    until("they wait for their turns", lambda: crowded.held(Whose.PERSON) == 12, 30)
    for one in opened:
        one.close()
    until("they are gone", lambda: crowded.held(Whose.PERSON) == 1, 30)
    answer.set()
    assert first.recv(65_536)[:12] == b"HTTP/1.1 404"
    assert crowded.ask("GET", "/api/v1/jobs/last/metrics", crowded.tokens[Scope.READ]).status_code == 404
    assert asked[-1] == "last"
    assert len(asked) <= TURNS_MAX + 1, "those that had no turn yet had none any more"


def test_requests_that_come_together_with_one_token_look_it_up_once(crowded, monkeypatch):
    authenticator, asked, answer = crowded.api.app.state.context.authenticator, [], threading.Event()
    look_up = authenticator.authenticate

    def slowly(text: str) -> Any:
        asked.append(text)
        answer.wait(30.0)
        return look_up(text)

    monkeypatch.setattr(authenticator, "authenticate", slowly)
    opened = [crowded.connect(crowded.asking(crowded.tokens[Scope.READ])) for _ in range(12)]
    until("all are connected", lambda: crowded.held(Whose.ANONYMOUS) == 12, 30)
    answer.set()
    assert {one.recv(65_536)[:12] for one in opened} == {OK}
    assert asked == [crowded.tokens[Scope.READ]]
