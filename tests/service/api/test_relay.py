"""Requests of people are answered by a second process, which finds them as the gate of the first has let them pass."""

import os
import signal
import socket
import threading
from contextlib import contextmanager

import httpx2
import pytest
from sqlalchemy import select, update
from structlog.testing import capture_logs

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.refusals import TRIES_MAX
from rankwatch_service.api import people_process
from rankwatch_service.api.http.gate import BODY_BYTES_MAX
from rankwatch_service.api.people_process import PeopleProcess
from rankwatch_service.clock import SystemClock
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import write
from rankwatch_service.store.models import Audit, Incident, Job, Token
from tests.support.service.api import Api, people_app, served_api
from tests.support.service.process import until
from tests.support.store.database import add, job_row, numbered_incident, values_of

LIST = "/api/v1/incidents?limit=50&order=oldest"


@pytest.fixture
def relaying(tmp_path):
    """The first application; the second is not served yet."""
    api = Api(tmp_path, people=tmp_path / "people")
    with api.client:
        yield api
    api.engine.dispose()


def not_relayed(api: Api) -> float:
    return api.app.state.context.counters.not_relayed._value.get()


def test_both_processes_answer_alike(relaying, tmp_path):
    add(relaying.engine, Incident, *(numbered_incident(n) for n in range(1, 40)))
    paths = (LIST, "/api/v1/jobs/none", "/api/v1/incidents?nothing=1", "/api/v1/policy", "/api/v1/nothing")
    asked = [*(("GET", path) for path in paths), ("OPTIONS", LIST), ("HEAD", LIST)]
    alone = [relaying.ask(method, path) for method, path in asked]
    assert not_relayed(relaying) == len(asked)
    with people_app(relaying, tmp_path / "people"):
        relayed = [relaying.ask(method, path) for method, path in asked]
    assert not_relayed(relaying) == len(asked)

    def shown(answer):
        own = {"x-request-id", "date", "content-length"}
        fields = {name: value for name, value in answer.headers.items() if name not in own}
        return answer.status_code, fields, {**answer.json(), "request_id": ""} if answer.content else {}

    assert [shown(answer) for answer in relayed] == [shown(answer) for answer in alone]
    assert [answer.status_code for answer in relayed] == [200, 404, 422, 200, 404, 204, 405]
    assert relayed[0].headers["content-encoding"] == "gzip"
    assert relayed[2].json()["request_id"] == relayed[2].headers["x-request-id"]


def test_agents_are_answered_without_the_second_process(relaying):
    assert relaying.send(b"", "telemetry").status_code == 400
    assert relaying.get("/api/v1/health").status_code == 200
    assert not_relayed(relaying) == 0


def test_a_write_is_done_once_and_its_client_is_in_the_audit_trail(relaying, tmp_path):
    add(relaying.engine, Job, job_row(state="ended", last_seen_unix_ns=1))
    silence = {"job": "j", "comment": "upgrade", "ends_unix_ns": relaying.clock.unix_ns() + 10**12}
    with people_app(relaying, tmp_path / "people"):
        answer, again = (relaying.post("/api/v1/silences", silence, key="once") for _ in range(2))
        removed = relaying.ask("DELETE", "/api/v1/jobs/j")
    assert (answer.status_code, again.status_code, removed.status_code) == (201, 201, 202), removed.text
    assert again.headers["idempotent-replay"] == "true"
    assert len(relaying.get("/api/v1/silences").json()["items"]) == 1
    assert "testclient" in values_of(relaying.engine, select(Audit.source))


def test_alerts_are_counted_where_metrics_are_asked_for(relaying, tmp_path):
    add(relaying.engine, Job, job_row())
    firing = [{"labels": {"alertname": "disk full", "job": "j"}}, {"labels": {"alertname": "late"}}]
    with people_app(relaying, tmp_path / "people"):
        answer = relaying.post("/api/v2/alerts", firing, headers={"X-Rankwatch-Alerts": '{"accepted": 100}'})
    assert answer.status_code == 200
    assert "x-rankwatch-alerts" not in answer.headers
    counted = [line for line in relaying.get("/metrics").text.splitlines() if line.startswith("rankwatch_alerts_total")]
    assert sum(float(line.split()[-1]) for line in counted) == 2


def test_nobody_outside_says_for_whom_a_request_is_relayed(relaying, tmp_path):
    add(relaying.engine, Job, job_row(state="ended", last_seen_unix_ns=1))
    claimed = {"X-Rankwatch-Relayed": "0 https 10.0.0.1"}
    with people_app(relaying, tmp_path / "people"):
        answer = relaying.ask("DELETE", "/api/v1/jobs/j", headers=claimed)
    assert answer.status_code == 202, answer.text
    assert answer.headers["x-request-id"] != "0"
    assert set(values_of(relaying.engine, select(Audit.source))) - {""} == {"testclient"}


def test_a_token_without_the_scope_or_that_ends_meanwhile_is_refused(relaying, tmp_path):
    reader = relaying.token(Scope.READ)
    with people_app(relaying, tmp_path / "people"):
        assert relaying.get(LIST, token=reader).status_code == 200
        refused = relaying.post("/api/v1/tokens", {"name": "x", "scopes": ["read"]}, token=reader)
        assert refused.status_code == 403
        with write(relaying.engine) as connection:
            connection.execute(update(Token).where(Token.name == "read").values(revoked=True))
        until("the token is refused", lambda: relaying.get(LIST, token=reader).status_code == 401)


def test_a_body_that_is_too_long_is_a_413_also_here(relaying, tmp_path):
    with people_app(relaying, tmp_path / "people"):
        answer = relaying.ask("POST", "/api/v1/silences", content=b"x" * (BODY_BYTES_MAX + 1))
    assert (answer.status_code, answer.headers["x-frame-options"]) == (413, "DENY")


def test_who_sends_a_revoked_token_does_not_guess(relaying, tmp_path):
    reader = relaying.token(Scope.READ)
    with people_app(relaying, tmp_path / "people") as second:
        assert relaying.get(LIST, token=reader).status_code == 200
        with write(relaying.engine) as connection:
            connection.execute(update(Token).where(Token.name == "read").values(revoked=True))
        second.state.context.authenticator.clear_cache()
        answers = [relaying.get(LIST, token=reader) for _ in range(2 * TRIES_MAX)]
    assert {answer.status_code for answer in answers} == {401}
    assert {answer.json()["detail"] for answer in answers} == {"this token was revoked"}
    assert answers[0].headers["www-authenticate"] == "Bearer"


@contextmanager
def breaking_off(path, sent):
    """A second process that answers one request with these bytes, and ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            accepted, _ = listener.accept()
            accepted.recv(65_536)
            accepted.sendall(sent)
            accepted.close()

        thread = threading.Thread(target=answer)
        thread.start()
        yield
        thread.join()


@pytest.mark.parametrize("sent", [b"", b"HTTP/1.1 200 OK\r\ncontent-le", b"what\r\n\r\n"])
def test_a_second_process_that_dies_before_it_answers_is_a_503_that_may_be_tried_again(relaying, tmp_path, sent):
    with breaking_off(tmp_path / "people", sent):
        answer = relaying.get(LIST)
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")


@pytest.mark.parametrize("head", [b"content-length: 1000", b"transfer-encoding: chunked"])
def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one(tmp_path, head, caplog):
    with (
        capture_logs() as logged,
        breaking_off(tmp_path / "people", b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n5\r\n{"),
        served_api(tmp_path, people=tmp_path / "people") as (api, url),
        pytest.raises(httpx2.RemoteProtocolError),
    ):
        httpx2.get(url + LIST, headers={"Authorization": f"Bearer {api.admin}"})
    assert [line["path"] for line in logged if line["event"] == "answer_broken_off"] == [LIST.partition("?")[0]]
    assert caplog.messages == []


@pytest.mark.integration
def test_a_second_process_that_stands_still_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(people_process, "ANSWER_S", 1.0)
    with served_api(tmp_path) as (api, _):
        keeper = PeopleProcess(api.settings, SystemClock())
        keeper.start()
        until("it listens", lambda: answers(keeper))
        first = keeper._child.pid
        os.kill(first, signal.SIGSTOP)
        until("another one listens", lambda: keeper._child.pid != first and answers(keeper))
        keeper.stop()


def test_one_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    monkeypatch.setattr(people_process, "RESTART_FIRST_S", 0.0)
    tries = []

    def fail(*arguments, **named):
        tries.append(arguments)
        raise OSError("no more processes")

    monkeypatch.setattr(people_process.children, "start", fail)
    keeper = PeopleProcess(Settings(data_dir=tmp_path), SystemClock())
    keeper.start()
    until("it is tried again", lambda: len(tries) > 1)
    keeper.stop()


@pytest.mark.integration
def test_the_second_process_is_started_again_and_ends_with_the_first(tmp_path):
    with served_api(tmp_path) as (api, _):
        keeper = PeopleProcess(api.settings, SystemClock())
        keeper.start()
        until("it listens", lambda: answers(keeper))
        first = keeper._child.pid
        os.kill(first, signal.SIGKILL)
        until("another one listens", lambda: keeper._child.pid != first and answers(keeper))
        keeper._child.stdin.close()  # as when the first process is killed
        assert keeper._child.wait(30) == 0
        keeper.stop()
        assert not keeper.socket.parent.exists()


def answers(keeper: PeopleProcess) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(keeper.socket)) == 0
