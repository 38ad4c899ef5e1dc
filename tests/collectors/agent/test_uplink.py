"""HTTP with the service, over real sockets."""

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankwatch import wire
from rankwatch.agent import service_connection
from rankwatch.agent.draft import Numbering
from rankwatch.agent.endpoint import Endpoint
from rankwatch.agent.enrolment import Enrolment, OrderCheck
from rankwatch.agent.service_connection import FindEndpoint, ServiceConnection, Unreachable
from rankwatch.agent.uplink import HttpPublisher, Inbox, OrderStream, ViewPoster
from rankwatch.outcome import Accepted, Later, Refused
from tests.support.agent.service import TOKEN, AgentService, until

BODY = wire.encode(wire.Batch(1, "gpt", "l.0", "h", "b", 0, 0))
VIEW = wire.View("gpt", "l.0", "h", "b", 1, ())


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
    return Endpoint(service.url, TOKEN)


def test_a_batch_is_accepted_with_the_token(publisher: Publisher, service: AgentService) -> None:
    assert publisher(lambda: find(service))(BODY) == Accepted()
    assert service.tokens == [f"Bearer {TOKEN}"] * 2, "one to enrol, one for the batch"
    assert len(service.batches) == 1


def test_a_base_url_may_have_a_path() -> None:
    with AgentService() as service:
        service.enrols = False
        channel = ServiceConnection(lambda: Endpoint(service.url + "/behind/a/proxy", TOKEN))
        assert channel.post("/api/v1/telemetry", BODY, "application/msgpack").status == 202
        channel.close()


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (400, Refused("refused_400", '{"title": "no"}')),
        (503, Later("status 503", 7.0)),
        (302, Later("status 302", 7.0)),
    ],
)
def test_answers_are_told_apart(publisher: Publisher, service: AgentService, status: int, outcome: object) -> None:
    service.status, service.retry_after = status, "7"
    assert publisher(lambda: find(service))(BODY) == outcome


def test_a_service_that_does_not_answer_to_its_name_keeps_the_message_and_tells_a_person(publisher, service):
    service.status = 421
    outcome = publisher(lambda: find(service))(BODY)
    assert isinstance(outcome, Later)
    assert outcome.for_a_person
    assert f"{service.url} says 421" in outcome.reason


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
        gone = Endpoint(f"http://127.0.0.1:{closed.getsockname()[1]}", TOKEN)
    places = [gone, find(service)]
    publish = publisher(lambda: places.pop(0) if len(places) > 1 else places[0])
    assert isinstance(publish(BODY), Later)
    assert publish(BODY) == Accepted()
    assert publish(BODY) == Accepted()


def answering(content: bytes) -> tuple[socket.socket, threading.Thread]:
    """A server that answers whatever comes with these bytes, and closes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(content)

    thread = threading.Thread(target=serve)
    thread.start()
    return server, thread


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
    server, thread = answering(content)
    endpoint = Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN)
    try:
        channel = ServiceConnection(lambda: endpoint, 5.0)
        with pytest.raises(Unreachable):
            channel.post("/", b"", "text/plain")
    finally:
        thread.join(60)
        server.close()


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
    server, thread = answering(content)
    channel = ServiceConnection(lambda: Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN))
    assert list(channel.stream("/")) == [("orders", "one\ntwo"), ("message", "three")]
    thread.join(60)
    server.close()


def test_a_stream_line_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_connection, "LINE_BYTES_MAX", 1_000)
    server, thread = answering(b"HTTP/1.1 200 OK\r\n\r\ndata: " + b"x" * 2_000 + b"\n\n")
    channel = ServiceConnection(lambda: Endpoint(f"http://127.0.0.1:{server.getsockname()[1]}", TOKEN))
    with pytest.raises(Unreachable, match="bytes"):
        list(channel.stream("/"))
    thread.join(60)
    server.close()


def test_a_line_with_no_service_says_so() -> None:
    with pytest.raises(Unreachable, match="no service"):
        list(ServiceConnection(lambda: None).stream("/"))


def test_orders_come_by_the_stream_and_again_after_it_broke(service: AgentService, enrol: Enrol) -> None:
    inbox = Inbox()
    stream = OrderStream(
        lambda: find(service), inbox, enrol(lambda: find(service)), OrderCheck(), "gpt", Numbering("h")
    )
    stream.start()
    found: list[wire.Orders] = []

    def heard(order: str) -> bool:
        found.extend(inbox.take())
        return any(view.order == order for orders in found[-1:] for view in orders.orders)

    service.order(wire.OrderView("o1", "gpt", "l.0", "view", "pause"))
    until(lambda: heard("o1"))
    service.stop()
    service.order(wire.OrderView("o2", "gpt", "l.0", "view", "pause"))
    service.start()
    until(lambda: heard("o2"))
    stream.close()
    service.stop()
    stream.join(60)
    assert not stream.is_alive()


def test_the_answer_to_a_view_is_a_poll_for_orders(service: AgentService, enrol: Enrol) -> None:
    inbox = Inbox()
    service.order(wire.OrderView("o1", "gpt", "l.0", "hold", "pause"))
    poster = ViewPoster(lambda: find(service), inbox, enrol(lambda: find(service)), OrderCheck())
    poster.start()
    poster.offer([VIEW])
    found: list[wire.Orders] = []
    until(lambda: found.extend(inbox.take()) or found)
    assert found[0].orders[0].order == "o1"
    poster.close()
    poster.join(60)


def test_while_the_service_is_away_views_are_dropped_and_only_the_newest_is_posted_afterwards(service, enrol):
    service.stop()
    poster = ViewPoster(lambda: find(service), Inbox(), enrol(lambda: find(service)), OrderCheck())
    poster.start()
    for number in range(500):
        poster.offer([wire.View("gpt", "l.0", "h", "b", number, ())])
    service.start()
    poster.offer([wire.View("gpt", "l.0", "h", "b", 500, ())])
    until(lambda: service.views and service.views[-1].sent_unix_ns == 500)
    assert len(service.views) <= 2
    poster.close()
    poster.join(60)
