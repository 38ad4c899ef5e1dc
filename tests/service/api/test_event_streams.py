"""Event streams of a real api process: what agents and browsers get, and when."""

import json
import os
import threading
import time

import pytest

from rankwatch import wire
from rankwatch.agent.enrolment import AgentIdentity
from rankwatch.signed import Purpose
from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.clock import SystemClock
from rankwatch_service.orders.commands import publish
from rankwatch_service.store.engine import write
from tests.support.service.process import Http, Role, free_port
from tests.support.store.database import new_database

pytestmark = pytest.mark.integration
MSGPACK = {"content-type": "application/msgpack"}
ORDERS = "/api/v1/agents/orders?job=j&host={}&boot=b&signed={}"


class Service:
    def __init__(self, folder):
        self.engine = new_database(folder)
        self.admin = self.token(Scope.ADMIN)
        port = free_port()
        database = {"RANKWATCH_DATABASE_URL": str(self.engine.url), "RANKWATCH_PORT": str(port)}
        self.role = Role(folder, "api", environment=database)
        self.role.start()
        self.http = Http(f"http://127.0.0.1:{port}", self.admin)
        self.http.ask("GET", "/readyz")

    def token(self, scope, job=""):
        with write(self.engine) as connection:
            return create_token(connection, TokenKind.API, scope, [scope], SystemClock().unix_ns(), job=job)[1]

    def publish(self, number, job="j"):
        with write(self.engine) as connection:
            publish(connection, "incident", job, {"number": number}, number)

    def enrol(self, host, job="j"):
        """An agent of a job."""
        reported = self.http.ask("POST", "/api/v1/agents/enrol", json={"job": job, "host": host}).json()
        return AgentIdentity(reported["agent"], bytes.fromhex(reported["secret"]))

    def view(self, agent):
        """Post the view of an agent on host h; the orders in the answer."""
        body = agent.sign(Purpose.VIEW, wire.encode(wire.View("j", "l.0", "h", "b", 0, ())))
        return orders_in(self.http.ask("POST", "/api/v1/agents/view", content=body, headers=MSGPACK).json())


def asking(agent, host="h"):
    """The path of an agent's order stream."""
    return ORDERS.format(host, agent.sign(Purpose.LISTEN, os.urandom(wire.LISTEN_BYTES)).hex())


def orders_in(signed):
    return json.loads(signed["orders"])["orders"]


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    service = Service(tmp_path_factory.mktemp("api"))
    yield service
    service.http.close()
    assert service.role.stop() == 0
    service.engine.dispose()


class Listening:
    """Collects (event, id, data) of a stream in a thread, until closed."""

    def __init__(self, service, path, token="", headers=None):
        self.http = Http(service.http.url, token or service.admin)
        self.came = []
        self.status = None
        self.ended = threading.Event()
        self._headers = headers or {}
        self._thread = threading.Thread(target=self._listen, args=(path,), daemon=True)
        self._thread.start()

    def _listen(self, path):
        from httpx2 import TransportError

        event = {}
        try:
            with self.http.client.stream("GET", path, headers=self._headers, timeout=60.0) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    name, _, value = line.partition(": ")
                    if name in ("event", "id", "data"):
                        event[name] = value
                    elif not line and event:
                        self.came.append((event.get("event"), event.get("id"), json.loads(event.get("data", "null"))))
                        event = {}
        except (TransportError, RuntimeError):
            pass
        finally:
            self.ended.set()

    def wait(self, count, within_s=60.0):
        deadline_s = time.monotonic() + within_s
        while len(self.came) < count:
            assert time.monotonic() < deadline_s, f"{self.status}: only {self.came}"
            time.sleep(0.01)
        return self.came[:count]

    def close(self):
        self.http.close()


@pytest.fixture
def listen(service):
    open_now = []

    def begin(path, **how):
        open_now.append(Listening(service, path, **how))
        return open_now[-1]

    yield begin
    for one in open_now:
        one.close()


def test_an_agent_gets_all_open_orders_at_once_and_each_change(service, listen):
    agent, other = service.enrol("h"), service.enrol("h2")
    service.view(agent)
    stream = listen(asking(agent), token=service.token(Scope.INGEST))
    [(event, _, first)] = stream.wait(1)
    assert (event, orders_in(first)) == ("orders", [])
    made = service.http.ask("POST", "/api/v1/jobs/j/commands", json={"action": "pause"}).json()
    _, (_, _, reported) = stream.wait(2)
    [order] = orders_in(reported)
    assert (order["order"], order["attempt"], order["phase"]) == (f"{made['id']}.1", "l.0", "view")
    late = listen(asking(other, "h2"))
    assert orders_in(late.wait(1)[0][2]) == [order]
    assert service.view(agent) == [order]
    service.http.ask("POST", f"/api/v1/commands/{made['id']}/cancel", json={})
    *_, (_, _, reported) = stream.wait(3)
    assert [one["phase"] for one in orders_in(reported)] == ["closed"]
    assert [one["sequence"] for _, _, one in stream.came[:3]] == [0, 1, 2]


def test_an_agent_has_one_stream_which_is_the_newest(service, listen):
    agent = service.enrol("h")
    first = listen(asking(agent))
    first.wait(1)
    second = listen(asking(agent))
    second.wait(1)
    assert first.ended.wait(60)
    other = listen(asking(service.enrol("h2"), "h2"))
    other.wait(1)
    assert not second.ended.is_set()


def test_a_token_for_one_job_gets_no_orders_of_another(service, listen):
    stream = listen(asking(service.enrol("h")), token=service.token(Scope.INGEST, job="other"))
    assert stream.ended.wait(60)
    assert (stream.status, stream.came) == (403, [])


@pytest.mark.parametrize("body", [b"", b"\xff\xff", wire.encode(wire.View("", "l.0", "h", "b", 0, ()))])
def test_a_malformed_view_is_refused(service, body):
    answer = service.http.ask("POST", "/api/v1/agents/view", content=body, headers=MSGPACK)
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_browser_gets_each_change_and_after_a_reconnect_those_it_missed(service, listen):
    stream = listen("/api/v1/events?job=a")
    [(hello, start, _)] = stream.wait(1)
    assert hello == "hello"
    service.publish(1, "a")
    service.publish(2, "b")
    service.publish(3, "a")
    _, *came = stream.wait(3)
    assert [(event, data["number"]) for event, _, data in came] == [("incident", 1), ("incident", 3)]
    stream.close()
    again = listen("/api/v1/events?job=a", headers={"Last-Event-ID": came[0][1]})
    assert [data.get("number") for _, _, data in again.wait(2)] == [None, 3]
    assert int(came[0][1]) > int(start)


@pytest.mark.parametrize("lost", ["999999999", "00"])
def test_an_event_id_that_cannot_be_resumed_from_gives_reset(service, listen, lost):
    service.publish(1)
    with write(service.engine) as connection:
        # The oldest rows have left meanwhile.
        connection.exec_driver_sql("UPDATE feed SET id = id + 1000 WHERE id = (SELECT max(id) FROM feed)")
        connection.exec_driver_sql("DELETE FROM feed WHERE id < (SELECT max(id) FROM feed)")
    stream = listen("/api/v1/events", headers={"Last-Event-ID": lost})
    [(event, _, data)] = stream.wait(1)
    assert event == "reset"
    service.publish(7)
    assert stream.wait(2)[1][2]["number"] == 7
    assert int(stream.came[1][1]) == data["after"] + 1


def test_a_token_for_one_job_gets_no_events_of_another(service, listen):
    stream = listen("/api/v1/events", token=service.token(Scope.READ, job="mine"))
    stream.wait(1)
    service.publish(1, "other")
    service.publish(2, "mine")
    assert stream.wait(2)[1][2]["number"] == 2


def test_streams_end_at_once_when_the_service_does(tmp_path):
    service = Service(tmp_path)
    stream = Listening(service, "/api/v1/events")
    stream.wait(1)
    assert service.role.stop() == 0
    assert stream.ended.wait(60)
    assert "Traceback" not in service.role.said()
    stream.close()
    service.http.close()
    service.engine.dispose()
