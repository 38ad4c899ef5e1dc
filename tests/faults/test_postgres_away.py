"""The server of the database dies, is away for a moment and comes back: everything goes on by itself."""

import json
import time
from contextlib import contextmanager

import httpx2
import pytest

from rankwatch import wire
from rankwatch_service.store.engine import open_engine
from rankwatch_service.store.errors import StoreBusyError
from rankwatch_service.store.migrate import check
from tests.support.service.process import Role, Up, children, until
from tests.support.store.postgres import postgres_server

pytestmark = [pytest.mark.integration, pytest.mark.ci]
MSGPACK = {"content-type": "application/msgpack"}
AWAY_S = 2.0


@pytest.fixture
def server():
    with postgres_server() as server:
        yield server


@pytest.fixture
def up(tmp_path, server):
    up = Up(tmp_path, "--database-url", server.url())
    up.start()
    yield up
    up.stop()


def reported(up, seq):
    """Send a batch; return the answer, whatever it is."""
    body = wire.encode(wire.Batch(1, f"job-{seq}", "l.0", "h", "b", seq, 0))
    return up.http.client.post("/api/v1/telemetry", content=body, headers=MSGPACK, timeout=30.0)


def test_every_role_outlives_a_database_that_is_killed_and_who_listens_misses_nothing(up, server):
    with listening(up, after=0) as lines:
        assert reported(up, 0).status_code == 202
        next(line for line in lines if "job-0" in line)
        last = int(next(line for line in lines if line.startswith("id: "))[4:])
        before = children(up.process.pid)
        assert sorted(before) == ["api", "notify", "stream"]
        server.kill()
        while_it_is_away(up)
        list(lines)  # the service ends the stream
    server.start()
    until("ingest", lambda: reported(up, 1).status_code == 202)
    with listening(up, after=last) as lines:
        assert any("job-1" in line for line in lines)
    assert children(up.process.pid) == before
    until("readiness", lambda: up.http.ask("GET", "/readyz").json()["ready"])
    assert "Exception in ASGI" not in up.said()


def while_it_is_away(up):
    ends_s = time.monotonic() + AWAY_S
    while time.monotonic() < ends_s:
        assert up.http.client.get("/livez").status_code == 200
        for answer in (reported(up, 1), up.http.client.get("/api/v1/jobs"), up.http.client.get("/api/v1/incidents")):
            assert answer.status_code == 503
            assert int(answer.headers["retry-after"]) >= 1
            assert answer.headers["content-type"] == "application/problem+json"
            assert "refused" not in answer.text
    ready = up.http.client.get("/readyz")
    assert ready.status_code == 503
    assert "password" not in ready.text


@contextmanager
def listening(up, after):
    client = httpx2.Client(base_url=up.http.url, headers=up.http.headers, timeout=30.0, trust_env=False)
    with client, client.stream("GET", "/api/v1/events", params={"after": after}) as stream:
        yield stream.iter_lines()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda url: url.replace("postgres:", "postgres:wrong", 1), "password authentication failed"),
        (lambda url: url.rpartition("/")[0] + "/nowhere", 'database "nowhere" does not exist'),
        (lambda url: "postgresql://127.0.0.1:9/x", "refused"),
    ],
)
def test_a_server_that_refuses_us_is_reported_in_one_line_without_the_password(server, change, said):
    engine = open_engine(change(server.url()))
    with pytest.raises(StoreBusyError, match=said) as error:
        check(engine)
    assert "\n" not in str(error.value)
    assert engine.url.password is None or engine.url.password not in str(error.value)


def test_a_command_that_cannot_reach_the_database_says_so_and_ends(tmp_path):
    role = Role(tmp_path, "up", "--data", str(tmp_path), "--port", "0", "--database-url", "postgresql://127.0.0.1:9/x")
    role.start()
    assert role.process.wait(60) == 3
    (line,) = role.said().splitlines()
    assert json.loads(line)["reason"].startswith("the database: ")
