"""`rankwatch up` as a user starts it, and what is left of it when any of it is killed."""

import json
import os
import signal
import stat

import pytest

from rankwatch import wire
from tests.support.service.process import Http, Role, Up, alive, children, until

pytestmark = [pytest.mark.integration, pytest.mark.slow]
MSGPACK = {"content-type": "application/msgpack"}


class Service(Up):
    def send(self, seq):
        body = wire.encode(wire.Batch(1, "j", "l.0", "h", "b", seq, 0))
        return self.http.ask("POST", "/api/v1/telemetry", content=body, headers=MSGPACK)

    def jobs(self):
        return self.http.ask("GET", "/api/v1/jobs").json()["items"]

    def children(self):
        return children(self.process.pid)

    def end(self):
        if self.process.poll() is None:
            self.stop()


@pytest.fixture(scope="module")
def up(tmp_path_factory):
    """One that stays as it is."""
    up = Service(tmp_path_factory.mktemp("up"))
    up.start()
    yield up
    up.end()


@pytest.fixture
def own_up(tmp_path):
    """One to be killed."""
    up = Service(tmp_path / "up")
    up.start()
    yield up
    up.end()


def test_it_works_in_an_empty_folder_without_configuration(up):
    assert sorted(up.children()) == ["api", "notify", "stream"]
    ready = until("readiness", lambda: up.http.ask("GET", "/readyz").json())
    assert ready["ready"], ready
    config = up.folder / "config" / "rankwatch" / "ingest.json"
    ingest = json.loads(config.read_text())
    assert ingest["url"] == up.url
    assert ingest["token"] == (up.data / "ingest-token").read_text().strip()
    for path in (config, up.data / "ingest-token"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    collector = Http(up.url, ingest["token"])
    body = wire.encode(wire.Batch(1, "j", "l.0", "h", "b", 0, 0))
    assert collector.ask("POST", "/api/v1/telemetry", content=body, headers=MSGPACK).status_code == 202
    assert collector.ask("GET", "/api/v1/jobs").status_code == 403
    collector.close()
    stranger = Http(up.url)
    assert stranger.ask("GET", "/api/v1/jobs").status_code == 401
    assert stranger.ask("POST", "/api/v1/jobs/j/commands", json={"action": "stop"}).status_code == 401
    stranger.close()


def test_a_role_that_is_killed_comes_back_and_nothing_accepted_is_lost(own_up):
    up = own_up
    assert up.send(0).status_code == 202
    for number, role in enumerate(("api", "stream", "notify"), 1):
        before = up.children()
        pid = before[role]
        os.kill(pid, signal.SIGKILL)
        now = until(f"{role} back", lambda role=role, pid=pid: up.children().get(role, pid) != pid and up.children())
        assert {name for name in before if now.get(name) != before[name]} == {role}
        assert up.send(number).status_code == 202
    until("job known", up.jobs)


def test_the_roles_die_with_their_parent_even_when_it_is_killed(own_up):
    pids = own_up.children().values()
    own_up.kill()
    until("end of the roles", lambda: not any(alive(pid) for pid in pids), 10.0)


@pytest.mark.ci
def test_it_ends_when_asked_and_finds_its_data_at_the_next_start(tmp_path):
    up = Service(tmp_path / "up")
    up.start()
    up.send(0)
    until("job known", up.jobs)
    login, token = up.login, (up.data / "ingest-token").read_text()
    pids = up.children().values()
    assert up.stop() == 0
    assert not any(alive(pid) for pid in pids)
    up.start()
    assert [job["name"] for job in up.jobs()] == ["j"]
    assert (up.data / "ingest-token").read_text() == token
    assert up.login != login
    up.stop()


def test_a_second_one_on_the_same_folder_is_refused_with_a_reason(up):
    other = Role(up.folder / "other", "up", "--data", str(up.data), "--port", "0")
    other.start()
    assert other.process.wait(60) == 2
    assert "already running" in other.said()
    assert "Traceback" not in other.said()


def test_nobody_else_can_read_what_the_service_writes(up):
    until("readiness", lambda: up.http.ask("GET", "/readyz").json()["ready"])
    up.send(0)
    files = [path for path in (up.data).rglob("*") if path.is_file()]
    assert any(path.name == "rankwatch.db" for path in files)
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []


def test_neither_link_nor_token_stands_in_the_text_log(up):
    err = (up.folder / "err.txt").read_text()
    assert up.login not in err
    assert (up.data / "ingest-token").read_text().strip() not in err
