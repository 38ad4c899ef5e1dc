"""A stolen database, a receiver in a private network and a page that rebinds its name reveal and reach nothing."""

import shutil
import socket
import time
from pathlib import Path

import pytest
from sqlalchemy import insert, select

from rankwatch_service.access.grants import Scope
from rankwatch_service.access.tokens import TokenKind, create_token
from rankwatch_service.settings import Settings
from rankwatch_service.store.engine import open_engine, read, write
from rankwatch_service.store.models import Delivery, Outbox
from tests.support.service.process import Http, Role, free_port, running_up, until
from tests.support.service.webhook_receiver import Answer, webhook_receiver
from tests.support.store.database import new_database
from tests.support.values.incidents import notified

pytestmark = [pytest.mark.integration, pytest.mark.slow, pytest.mark.ci]

SECRET_PATH = "T00SECRET/B00SECRET"


class Roles:
    """`api` and `notify` on their own, over one database."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.engine = new_database(folder)
        port = free_port()
        named = {"RANKWATCH_DATA_DIR": str(folder), "RANKWATCH_PORT": str(port)} | environment
        self.api, self.notify = (Role(folder / name, name, environment=named) for name in ("api", "notify"))
        with write(self.engine) as connection:
            _, token = create_token(connection, TokenKind.API, "test", [Scope.ADMIN], time.time_ns())
        self.http = Http(f"http://127.0.0.1:{port}", token)

    def add(self, url: str, name: str = "pager"):
        return self.http.ask("POST", "/api/v1/receivers", json={"name": name, "url": url})

    def outcome(self, receiver: str = "pager") -> tuple[int | None, str]:
        """Status and error of the first try to send this receiver a message."""
        rows = notified("opened", 1, (receiver,), now_unix_ns=time.time_ns(), id=f"inc_{receiver}")
        with write(self.engine) as connection:
            connection.execute(insert(Outbox), rows)
        query = select(Delivery.status, Delivery.error).where(Delivery.outbox_id == rows[0]["id"])

        def first():
            with read(self.engine) as connection:
                return connection.execute(query).first()

        return tuple(until("a try", first))

    def stop(self) -> None:
        self.http.close()
        for role in (self.api, self.notify):
            if role.process is not None:
                role.stop()
        self.engine.dispose()


@pytest.fixture
def roles(tmp_path):
    started = []

    def start(**environment: str) -> Roles:
        one = Roles(tmp_path, **environment)
        started.append(one)
        one.api.start()
        return one

    yield start
    for one in started:
        one.stop()


def test_what_lies_in_the_data_folder_reveals_no_receiver_without_the_secret_key(up, admin):
    body = {"name": "chat", "url": f"https://127.0.0.1:9999/{SECRET_PATH}"}
    made = admin.post("/api/v1/receivers", json=body, headers={"Idempotency-Key": "once"})
    assert made.status_code == 201, "`rankwatch up` sends webhooks to private addresses"
    secret = made.json()["secret"]
    moved = {"url": f"https://127.0.0.1:9999/{SECRET_PATH}/moved"}
    assert admin.put("/api/v1/receivers/chat", json=moved).status_code == 200
    files = [file for file in up.data.iterdir() if file.is_file()]
    assert {"rankwatch.db", "rankwatch.db-wal", "secret.key"} <= {file.name for file in files}
    content = b"".join(file.read_bytes() for file in files)
    assert b"receiver.add" in content
    for plain in (SECRET_PATH, secret, secret.removeprefix("whsec_")):
        assert plain.encode() not in content
        assert plain not in up.said()
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_a_stolen_database_starts_nowhere_without_its_key(tmp_path):
    with running_up(tmp_path / "first") as first:
        pass
    for name, spoil, reported in (
        ("without", lambda file: file.unlink(), "is missing"),
        ("other", lambda file: file.write_text("0123456789abcdef" * 4), "is not the one of this database"),
        ("loose", lambda file: file.chmod(0o644), "run `chmod 600 "),
    ):
        shutil.copytree(first.data, tmp_path / name / "data")
        spoil(tmp_path / name / "data" / "secret.key")
        assert reported in refused(tmp_path / name).splitlines()[-1]
    key = first.kept("secret.key")
    (first.data / "secret.key").unlink()
    with running_up(tmp_path / "first", RANKWATCH_SECRET_KEY=key) as again:
        pass
    assert key not in again.said()


def refused(folder: Path) -> str:
    """What `up` says that does not start in a folder."""
    role = Role(folder, "up", "--data", str(folder / "data"), "--port", "0")
    role.start()
    assert role.process.wait(60) == 2
    return role.said()


@pytest.mark.parametrize("mode", [0o755, 0o701])
def test_a_data_folder_that_others_can_enter_is_refused_before_anything_is_stored(tmp_path, mode):
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(mode)
    assert f"chmod 700 {tmp_path / 'data'}" in refused(tmp_path)
    assert list((tmp_path / "data").iterdir()) == []


def test_an_api_on_its_own_takes_no_receiver_in_a_private_network_by_whatever_name(roles):
    one = roles()
    for host in ("127.0.0.1", "localhost", "127.1", "2130706433", "[::1]", "[::ffff:10.0.0.1]", "10.0.0.1"):
        answer = one.add(f"http://{host}:8080/hook")
        assert (answer.status_code, answer.headers["content-type"]) == (422, "application/problem+json"), host
        assert "RANKWATCH_NOTIFY_ALLOW" in answer.json()["detail"]
    for host in ("169.254.169.254", "[fd00:ec2::254]", "100.100.100.200", "0.0.0.0", "[fe80::1]"):
        assert "must never go" in one.add(f"http://{host}/latest").json()["detail"]
    assert one.http.ask("GET", "/api/v1/receivers").json()["items"] == []


def test_a_name_that_leads_to_a_private_address_later_is_refused_when_it_is_sent_to(roles):
    one = roles(RANKWATCH_NOTIFY_ALLOW="localhost")
    with webhook_receiver() as inside:
        assert one.add(inside.url.replace("127.0.0.1", "localhost")).status_code == 201
        one.notify = Role(one.notify.folder, "notify", environment={"RANKWATCH_DATA_DIR": str(one.api.folder.parent)})
        one.notify.start()
        status, error = one.outcome()
    assert (status, inside.calls) == (None, [])
    assert error.startswith("refused: ")
    assert "is a private address" in error


def test_a_redirect_into_a_private_network_is_not_followed(roles):
    one = roles(RANKWATCH_NOTIFY_ALLOW="127.0.0.1")
    one.notify.start()
    with webhook_receiver() as inside, webhook_receiver(lambda *_: Answer(302, {"location": inside.url})) as outside:
        assert one.add(outside.url).status_code == 201
        assert one.outcome() == (302, "answered 302")
        assert len(outside.calls) == 1
    assert inside.calls == []


@pytest.mark.parametrize(
    ("status", "hosts"),
    [
        (421, ("evil.example", "evil.example:PORT", "localhost.evil.example", "127.0.0.1.evil.example")),
        (400, (None, "", "127.0.0.1\r\nHost: evil.example", "a@127.0.0.1", "127.0.0.1:PORT.evil")),
        (200, ("127.0.0.1:PORT", "localhost:PORT", "[::1]:PORT", "10.3.4.5", socket.gethostname())),
    ],
)
def test_a_request_is_answered_under_the_names_of_this_machine_and_not_as_it_comes_from_a_rebound_page(
    up, status, hosts
):
    for host in hosts:
        line = "" if host is None else f"Host: {host}\r\n".replace("PORT", up.url.rpartition(":")[2])
        with up.socket() as one:
            token = up.token()
            one.sendall(
                f"GET /livez HTTP/1.1\r\n{line}Authorization: Bearer {token}\r\nConnection: close\r\n\r\n".encode()
            )
            answer = b"".join(iter(lambda: one.recv(65_536), b""))
        assert answer[:12] == f"HTTP/1.1 {status}".encode(), host
        assert (b"application/problem+json" in answer) is (status != 200)


def test_settings_show_no_secret_in_any_description(tmp_path):
    secrets = {
        "database_url": "postgresql://rankwatch:PASSWORD1@db/rankwatch",
        "kafka_sasl_password": "PASSWORD2",
        "secret_key": "PASSWORD3" * 4,
    }
    settings = Settings(data_dir=tmp_path, **secrets)
    assert "PASSWORD" not in f"{settings!r} {settings}"
    assert "PASSWORD" not in repr(open_engine(settings.database_url))
