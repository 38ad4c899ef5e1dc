"""HTTP with the service over real sockets, the agent's identity there, and orders that only the service can give."""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from rankwatch import wire
from rankwatch.agent import service_connection
from rankwatch.agent.batch_builder import SenderIdentity
from rankwatch.agent.endpoint import Endpoint
from rankwatch.agent.enrolment import AgentIdentity, Enrolment, ForgedOrdersError, NotEnrolledError, OrderCheck
from rankwatch.agent.service_connection import FindEndpoint, ServiceConnection, Unreachable
from rankwatch.agent.uplink import HttpPublisher, Inbox, OrderStream, ViewPoster
from rankwatch.outcome import Accepted, Later, Outcome, Refused
from rankwatch.signed import Purpose, code_of, nonce_of
from rankwatch.trust import Trust
from tests.support.agent.service import KEY, TOKEN, AgentService, until
from tests.support.clock import FakeClock

BODY = wire.encode(wire.Batch(1, "gpt", "l.0", "h", "b", 0, 0))


@pytest.fixture
def service() -> Iterator[AgentService]:
    with AgentService() as service:
        yield service


@pytest.fixture
def lines() -> Iterator[list[ServiceConnection]]:
    """Lines that a test opened; they are closed after it."""
    opened: list[ServiceConnection] = []
    yield opened
    for line in opened:
        line.close()


Publisher = Callable[[FindEndpoint], HttpPublisher]
Enrol = Callable[[FindEndpoint], Enrolment]


@pytest.fixture
def enrol(lines: list[ServiceConnection], tmp_path: Path) -> Enrol:
    def make(find: FindEndpoint) -> Enrolment:
        lines.append(ServiceConnection(find))
        enrolment = Enrolment(tmp_path / "identity", "gpt", lines[-1])
        enrolment.introduce("h")
        return enrolment

    return make


@pytest.fixture
def publisher(lines: list[ServiceConnection], enrol: Enrol) -> Publisher:
    def make(find: FindEndpoint) -> HttpPublisher:
        lines.append(ServiceConnection(find))
        return HttpPublisher(lines[-1], enrol(find))

    return make


def find(service: AgentService) -> Endpoint:
    return Endpoint(service.url, TOKEN, Trust(enrolment_key=KEY))


def test_a_batch_is_accepted_with_the_token(publisher: Publisher, service: AgentService) -> None:
    assert publisher(lambda: find(service))(BODY) == Accepted()
    assert service.tokens == [f"Bearer {TOKEN}"] * 2, "one to enrol, one for the batch"
    assert len(service.batches) == 1


def test_a_base_url_may_have_a_path() -> None:
    with AgentService() as service:
        service.enrols = False
        channel = ServiceConnection(lambda: Endpoint(service.url + "/behind/a/proxy", TOKEN, Trust(enrolment_key=KEY)))
        assert channel.post("/api/v1/telemetry", BODY, "application/msgpack").status == 202
        channel.close()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        *((status, Refused(f"refused_{status}", '{"title": "no"}')) for status in (400, 413, 415, 422)),
        *((status, Later(f"status {status}", 7.0)) for status in (302, 429, 500, 503)),
    ],
)
def test_answers_are_distinguished(publisher: Publisher, service: AgentService, status: int, outcome: object) -> None:
    service.status, service.retry_after = status, "7"
    assert publisher(lambda: find(service))(BODY) == outcome


@pytest.mark.parametrize("status", [401, 403, 404, 421])
def test_what_a_person_must_mend_keeps_the_message_and_tells_a_person(publisher, service, status):
    service.status = status
    outcome = publisher(lambda: find(service))(BODY)
    assert (type(outcome), outcome.for_a_person) == (Later, True)
    assert f"{service.url} says {status}" in outcome.reason


def test_no_service_and_a_broken_configuration_are_reasons_to_wait(publisher: Publisher) -> None:
    def broken() -> Endpoint:
        raise ValueError("ingest.json: no token")

    nobody = Later("no service is configured: start `rankwatch up` here, or set RANKWATCH_URL", for_a_person=True)
    assert publisher(lambda: None)(BODY) == nobody
    assert publisher(broken)(BODY) == Later("ingest.json: no token", for_a_person=True)


def test_after_a_restart_of_the_service_the_kept_connection_costs_no_failure(publisher, service):
    publish = publisher(lambda: find(service))
    assert publish(BODY) == Accepted()
    service.stop()
    assert isinstance(publish(BODY), Later)
    service.start()
    assert publish(BODY) == Accepted()
    service.stop()
    service.start()
    assert publish(BODY) == Accepted()


def test_where_the_service_is_is_looked_up_again_after_a_failure(publisher: Publisher, service: AgentService) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = Endpoint(f"http://127.0.0.1:{closed.getsockname()[1]}", TOKEN, Trust(enrolment_key=KEY))
    places = [gone, find(service)]
    publish = publisher(lambda: places.pop(0) if len(places) > 1 else places[0])
    assert isinstance(publish(BODY), Later)
    assert publish(BODY) == Accepted()
    assert publish(BODY) == Accepted()


@contextlib.contextmanager
def answering(content: bytes) -> Iterator[ServiceConnection]:
    """A connection to a server that answers whatever comes with these bytes, and closes."""
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(content)

        pool.submit(serve)
        endpoint = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN, Trust(enrolment_key=KEY))
        yield ServiceConnection(lambda: endpoint, 5.0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"nonsense\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"x" * 3_000,
        b"HTTP/1.1 200 OK\r\nContent-Length: minus\r\nX: " + b"y" * 70_000 + b"\r\n\r\n",
    ],
)
def test_an_answer_that_is_none_is_worth_another_try_and_never_an_error(content, monkeypatch):
    monkeypatch.setattr(service_connection, "ANSWER_BYTES_MAX", 2_000)
    with answering(content) as channel, pytest.raises(Unreachable):
        channel.post("/", b"", "text/plain")


def test_a_silent_service_costs_one_time_out(service: AgentService) -> None:
    service.silent.set()
    channel = ServiceConnection(lambda: find(service), timeout_s=0.2)
    with pytest.raises(Unreachable, match="timed out"):
        channel.post("/api/v1/telemetry", BODY, "application/msgpack")
    service.silent.clear()


def test_events_of_a_stream_are_put_together_and_comments_passed_over() -> None:
    content = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
        b": hello\n\nevent: orders\ndata: one\ndata: two\n\ndata:three\r\n\r\nid: 4\nevent: empty\n\ndata: cut off"
    )
    with answering(content) as channel:
        assert list(channel.stream("/")) == [("orders", "one\ntwo"), ("message", "three")]


def test_a_stream_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_connection, "LINE_BYTES_MAX", 1_000)
    content = b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"x" * 2_000 + b"\n\n"
    with answering(content) as channel, pytest.raises(Unreachable, match="bytes"):
        list(channel.stream("/"))


def test_a_line_with_no_service_says_so() -> None:
    with pytest.raises(Unreachable, match="no service"):
        list(ServiceConnection(lambda: None).stream("/"))


def heard(inbox: Inbox, order: str) -> None:
    """Waits until this order has come."""
    until(lambda: order in [view.order for orders in inbox.take() for view in orders.orders])


def test_orders_come_by_the_stream_and_again_after_it_broke(service: AgentService, enrol: Enrol) -> None:
    inbox, look = Inbox(), lambda: find(service)
    stream = OrderStream(look, inbox, enrol(look), OrderCheck(), "gpt", SenderIdentity("h"))
    stream.start()
    service.order(wire.OrderView("o1", "gpt", "l.0", "view", "pause"))
    heard(inbox, "o1")
    service.stop()
    service.order(wire.OrderView("o2", "gpt", "l.0", "view", "pause"))
    service.start()
    heard(inbox, "o2")
    stream.close()
    service.stop()
    stream.join(60)
    assert not stream.is_alive()


def test_while_the_service_is_away_views_are_dropped_and_the_answer_to_the_newest_is_a_poll_for_orders(service, enrol):
    service.stop()
    inbox, look = Inbox(), lambda: find(service)
    poster = ViewPoster(look, inbox, enrol(look), OrderCheck())
    poster.start()
    for number in range(500):
        poster.offer([wire.View("gpt", "l.0", "h", "b", number, ())])
    service.order(wire.OrderView("o1", "gpt", "l.0", "hold", "pause"))
    service.start()
    poster.offer([wire.View("gpt", "l.0", "h", "b", 500, ())])
    until(lambda: service.views and service.views[-1].sent_unix_ns == 500)
    assert len(service.views) <= 2
    heard(inbox, "o1")
    poster.close()
    poster.join(60)


def enrolment(service: AgentService, folder: Path, host: str = "h", key: bytes = KEY) -> Enrolment:
    endpoint = Endpoint(service.url, TOKEN, Trust(enrolment_key=key))
    made = Enrolment(folder / "gpt.agent.identity", "gpt", ServiceConnection(lambda: endpoint))
    if host:
        made.introduce(host)
    return made


@pytest.fixture
def published(service: AgentService, lines: list[ServiceConnection]) -> Callable[[Enrolment], Outcome]:
    """Publishes one batch."""
    lines.append(ServiceConnection(lambda: find(service)))
    return lambda enrolled: HttpPublisher(lines[0], enrolled)(BODY)


def test_an_agent_enrols_once_and_its_next_worker_goes_on_with_the_identity(service, tmp_path):
    first = enrolment(service, tmp_path).identity()
    assert list(service.agents) == [first.agent]
    assert service.agents[first.agent] == ("h", first.secret)
    service.stop()
    assert enrolment(service, tmp_path, host="").identity() == first, "without the service, and before any rank"


def test_the_secret_is_for_its_user_alone_and_in_no_text(service, tmp_path):
    identity = enrolment(service, tmp_path).identity()
    assert {stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()} == {0o600}
    assert identity.secret.hex() not in repr(identity)


def test_threads_that_need_it_at_once_share_one_identity(service, tmp_path):
    enrolled = enrolment(service, tmp_path)
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: enrolled.identity(), range(8)))
    assert (len(found), len(service.agents)) == (1, 1)


def test_an_agent_that_the_service_does_not_know_enrols_again(service, tmp_path, published):
    enrolled = enrolment(service, tmp_path)
    assert published(enrolled) == Accepted()
    service.agents.clear()  # another database, another key, or a place that another host took
    assert isinstance(published(enrolled), Later)
    assert published(enrolled) == Accepted()
    assert list(service.agents) == [enrolment(service, tmp_path).identity().agent]


def test_before_a_rank_has_named_the_host_there_is_nothing_to_enrol_but_for_what_an_earlier_agent_left(
    service, tmp_path, published
):
    with pytest.raises(NotEnrolledError, match="which host"):
        enrolment(service, tmp_path, host="").identity()
    nameless = enrolment(service, tmp_path, host="")
    with pytest.raises(NotEnrolledError, match="which host"):
        nameless.identity(b"no batch")
    assert published(nameless) == Accepted()


def test_a_service_that_does_not_enrol_the_agent_is_not_asked_again_at_once(service, tmp_path):
    clock, token = FakeClock(), [TOKEN]
    service.enrols, service.enrolment_key = False, b""
    asked: list[str] = []
    line = ServiceConnection(lambda: Endpoint(service.url, token[0], Trust(enrolment_key=KEY)))
    post = line.post
    line.post = lambda *args: asked.append(token[0]) or post(*args)
    enrolled = Enrolment(tmp_path / "gpt.agent.identity", "gpt", line, clock.monotonic_s)
    enrolled.introduce("h")

    def refused_for(seconds: float) -> int:
        """How often the service is asked, by three threads that try twice a second each."""
        before = len(asked)
        for _ in range(int(6 * seconds)):
            with pytest.raises(NotEnrolledError, match="does not enrol this agent"):
                enrolled.identity()
            clock.advance(1 / 6)
        return len(asked) - before

    assert refused_for(60) == 4, "after 5, 10 and 20 s, then every 30 s"
    assert refused_for(60) == 2
    token[0] = TOKEN + "x"
    assert refused_for(1) == 1, "another token is tried at once"
    service.enrols, service.enrolment_key = True, KEY
    token[0] = TOKEN
    assert enrolled.identity() is not None


@pytest.mark.parametrize(("own", "known", "enrols"), [(KEY, b"", True), (KEY, bytes(16), True), (KEY, b"", False)])
def test_a_service_that_does_not_know_the_enrolment_key_enrols_no_agent_and_gets_nothing(
    service, tmp_path, published, own, known, enrols
):
    service.enrolment_key, service.enrols = known, enrols
    enrolled = enrolment(service, tmp_path, key=own)
    assert isinstance(published(enrolled), Later | Refused)
    with pytest.raises(NotEnrolledError, match=r"not issue the token|does not enrol"):
        enrolled.identity()
    assert service.batches == []
    assert not any(file.read_bytes() for file in tmp_path.iterdir()), "nothing of it is kept"


def test_with_a_token_that_was_cut_or_enrols_nobody_no_service_is_asked(service, tmp_path, published):
    trusts = [Trust()]
    line = ServiceConnection(lambda: Endpoint(service.url, TOKEN, trusts[-1]))
    cut = Enrolment(tmp_path / "gpt.agent.identity", "gpt", line)
    cut.introduce("h")
    for _ in range(3):
        with pytest.raises(NotEnrolledError, match="no enrolment key: it was not copied as a whole"):
            cut.identity()
    assert isinstance(published(cut), Later)
    assert service.tokens == []
    assert service.agents == {}
    trusts.append(Trust(enrolment_key=KEY))
    assert cut.identity() is not None, "a person has mended the token"


def test_a_file_that_cannot_be_read_is_replaced_and_who_has_enrolled_never_sends_unsigned_again(service, tmp_path):
    (tmp_path / "gpt.agent.identity").write_text('{"agent": "x", "secret": "not hex"}')
    identity = enrolment(service, tmp_path).identity()
    service.enrols = False
    assert enrolment(service, tmp_path).identity() == identity


def test_nobody_answers(service, tmp_path):
    service.stop()
    with pytest.raises(Unreachable):
        enrolment(service, tmp_path).identity()


S = 10**9
IDENTITY = AgentIdentity("00112233445566aa", bytes(range(32)))
REQUEST = IDENTITY.sign(Purpose.LISTEN, bytes(16))
NONCE = nonce_of(REQUEST)
ORDERS = wire.Orders((wire.OrderView("o1", "gpt", "l.0", "kill", "relaunch"),))


def reported(nonce: str, sequence: int = 0, at_s: float = 1_000.0, secret: bytes = IDENTITY.secret) -> bytes:
    """What a service with this secret says."""
    orders = wire.SignedOrders(msgspec.json.encode(ORDERS).decode(), nonce, sequence, int(at_s * S))
    code = code_of(Purpose.ORDERS, IDENTITY.agent, secret, orders.signed_part()).hex()
    return msgspec.json.encode(msgspec.structs.replace(orders, code=code))


def test_orders_of_the_service_are_taken_on_both_ways():
    check, request = OrderCheck(), IDENTITY.sign(Purpose.VIEW, b"view")
    assert check.answer(IDENTITY, reported(nonce_of(request)), request) == ORDERS
    assert check.event(IDENTITY, reported(NONCE, 3).decode(), REQUEST, 2) == (ORDERS, 3)


def test_orders_that_are_not_signed_or_by_somebody_else_are_not_taken():
    check, request = OrderCheck(), IDENTITY.sign(Purpose.VIEW, b"view")
    for body in (msgspec.json.encode(ORDERS), reported(nonce_of(request), secret=bytes(32)), b"{", b""):
        with pytest.raises(ForgedOrdersError):
            check.answer(IDENTITY, body, request)
        with pytest.raises(ForgedOrdersError):
            check.event(IDENTITY, body.decode(), REQUEST, -1)


@pytest.mark.parametrize(
    "changed",
    [
        {"orders": '{"orders": []}'},
        {"nonce": "another"},
        {"sequence": 9},
        {"at_unix_ns": 2_000 * S},
        {"code": ""},
        {"code": "ü"},
    ],
)
def test_every_field_is_signed(changed):
    on_its_way = msgspec.json.decode(reported(NONCE)) | changed
    with pytest.raises(ForgedOrdersError, match="not signed"):
        OrderCheck().event(IDENTITY, msgspec.json.encode(on_its_way).decode(), REQUEST, -1)


def test_the_answer_to_another_request_is_not_taken():
    first, second = (IDENTITY.sign(Purpose.VIEW, body) for body in (b"1", b"2"))
    with pytest.raises(ForgedOrdersError, match="another request"):
        OrderCheck().answer(IDENTITY, reported(nonce_of(first)), second)
    with pytest.raises(ForgedOrdersError, match="another request"):
        OrderCheck().event(IDENTITY, reported(nonce_of(first)).decode(), REQUEST, -1)


@pytest.mark.parametrize("sequence", [4, 5])
def test_an_event_that_comes_again_or_late_is_not_taken(sequence):
    with pytest.raises(ForgedOrdersError, match="came after 5"):
        OrderCheck().event(IDENTITY, reported(NONCE, sequence).decode(), REQUEST, 5)


def test_an_event_that_was_held_back_expires_by_the_service_s_clock():
    clock = FakeClock()
    check, request = OrderCheck(clock.unix_ns), IDENTITY.sign(Purpose.VIEW, b"view")
    held_back = reported(NONCE, 1, at_s=1_000.0).decode()
    check.answer(IDENTITY, reported(nonce_of(request), at_s=1_000.0), request)
    clock.advance(wire.ORDERS_VALID_S)
    assert check.event(IDENTITY, held_back, REQUEST, 0) == (ORDERS, 1)
    clock.advance(1.0)
    with pytest.raises(ForgedOrdersError, match="expired"):
        check.event(IDENTITY, held_back, REQUEST, 0)
